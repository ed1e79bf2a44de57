"""A program with calls in place of its regions: what stands where."""

from __future__ import annotations

import torch

from crossfade.execute.outline import with_calls
from crossfade.execute.regions import regions_of
from crossfade.graph.text import parse


def order(text: str, *, host_first: bool = False, takes_numbers: bool = False) -> list[str]:
    """The names of the nodes that a rewritten program computes, in order."""

    class Call:
        takes_staged = takes_numbers

        def __call__(self, *inputs: object) -> list[object]:
            return []

    program = parse(text, groups={"dp": 2})
    chosen = regions_of(program)
    calls = {region: Call() for region in chosen.regions}
    called = with_calls(program, chosen, calls, torch.device("cpu"), host_first=host_first)
    return [node.name for node in called.graph.nodes if node.op == "call_function"]


def test_a_region_stands_before_what_follows_it_though_an_element_of_its_results_is_taken_out_later() -> None:
    """Schedules put an element where it is first needed."""
    text = """
        x: f32[4, 2] = input("x")
        n: f32[4, 2] = aten.neg(x)
        m: (f32[4], i64[4]) = aten.max.dim(n, 1)
        s: f32[4, 2] = c10d.all_reduce(n, "sum", "dp")
        values: f32[4] = m[0]
        w: f32[4, 2] = c10d.wait_tensor(s)
        return output("w", w), output("values", values)
    """
    assert order(text) == ["region", "n", "values", "s", "w"]


UPDATES = """
    p: f32[4] = parameter("p")
    x: f32[4] = input("x")
    step: f32[] = optimizer_state("p:step")
    lr: float = scalar("lr")
    count: f32[] = aten.add_.Tensor(step, 1)
    number: float = aten._local_scalar_dense(count)
    rate: float = operator.truediv(lr, number)
    a: f32[4] = aten.neg(x)
    g: f32[4] = aten.exp(a)
    sent: f32[4] = c10d.all_reduce(g, "sum", "dp")
    came: f32[4] = c10d.wait_tensor(sent)
    scaled: f32[4] = aten.mul.Tensor(came, rate)
    new: f32[4] = aten.sub_.Tensor(p, scaled)
    return output("came", came)
"""
HOST = ["_foreach_add__scalar", "number", "rate"]


def test_the_host_computes_its_numbers_where_they_are_first_needed() -> None:
    update = ["region_1"]
    device = ["region", "g", "sent", "came"]
    assert order(UPDATES) == [*device, *HOST, *update]
    assert order(UPDATES, host_first=True) == [*HOST, *device, *update]


def test_numbers_of_compiled_regions_are_sent_to_the_device_together() -> None:
    found = order(UPDATES, takes_numbers=True)
    assert found == ["region", "g", "sent", "came", *HOST, "staged", "slice_tensor", "region_1"]
