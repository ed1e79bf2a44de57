"""Counts marked in the graph are taken over all ranks and micro-batches, before the forward where they can be."""

from __future__ import annotations

import pytest
import torch

from crossfade.execute.executable import Executable
from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify
from crossfade.shard.count_globally import CountGlobally
from crossfade.shard.loss_parts import COUNT, SCALED

MASKED = """
x: f32[4] = input("x")
m: f32[4] = input("m")
y: f32[4] = aten.exp(x)
s: f32[] = aten.dot(y, m)
c: f32[] = {count}
loss: f32[] = aten.div.Tensor(s, c)
return loss("loss", loss)
"""
NLL = """
x: f32[4, 3] = input("x")
y: i64[4] = input("y")
nll: (f32[], f32[]) = aten.nll_loss_forward(x, y, {weight}, 1, -100)
loss: f32[] = nll[0]
return loss("loss", loss)
"""


def marked(text: str, name: str, power: int) -> Program:
    program = parse(text, groups={"dp": 2})
    node = next(node for node in program.graph.nodes if node.name == name)
    node.meta[COUNT] = (0, power)
    return program


def lines_after(program: Program, step: CountGlobally) -> list[str]:
    done = run_passes(program, [step])
    verify(done, recompute=True)
    return render(done).splitlines()


def test_a_mean_of_counts_is_divided_by_the_parts_before_it_is_summed():
    found = lines_after(marked(MASKED.format(count="aten.mean(m)"), "c", 1), CountGlobally(micro_batches=3))
    assert found[2:8] == [
        "c: f32[] = aten.mean(m)",
        "div: f32[] = aten.div.Tensor(c, 6)",
        'all_reduce: f32[] = c10d.all_reduce(div, "sum", "dp")',
        "wait_tensor: f32[] = c10d.wait_tensor(all_reduce)",
        "y: f32[4] = aten.exp(x)",
        "s: f32[] = aten.dot(y, m)",
    ]
    assert found[8] == "loss: f32[] = aten.div.Tensor(s, wait_tensor)"


def test_a_count_that_draws_stays_where_it_draws():
    text = MASKED.replace("c: f32[] = {count}", "r: f32[4] = aten.rand_like(m)\nc: f32[] = aten.sum(r)")
    found = lines_after(marked(text, "c", 0), CountGlobally())
    assert [line.partition(":")[0] for line in found[2:]][:6] == ["y", "s", "r", "c", "all_reduce", "wait_tensor"]


def test_alone_there_is_nothing_to_reduce():
    found = lines_after(marked(MASKED.format(count="aten.sum(m)"), "c", 0), CountGlobally(ranks=1))
    assert not any("c10d" in line for line in found)


def test_a_factor_grows_and_a_divisor_shrinks_with_the_number_of_parts():
    for call, scaled in (("mul", "mul: f32[] = aten.mul.Tensor(c, 4)"), ("div", "div: f32[] = aten.div.Tensor(c, 4)")):
        text = MASKED.format(count="aten.sum(m)").replace("aten.div.Tensor(s, c)", f"aten.{call}.Tensor(s, c)")
        program = parse(text, groups={"dp": 2})
        next(node for node in program.graph.nodes if node.name == "loss").meta[SCALED] = 1
        found = lines_after(program, CountGlobally(micro_batches=2))
        assert found[-3] == scaled


@pytest.mark.parametrize("weighted", [False, True])
def test_a_part_weighs_as_much_as_it_counts(weighted: bool):
    """On one rank that runs alone as the only part, a mean stays what it is; as one of two, it weighs half."""
    text = NLL.format(weight="w" if weighted else "None")
    text = text.replace('y: i64[4] = input("y")', 'y: i64[4] = input("y")\nw: f32[3] = input("w")')
    x, y, w = torch.randn(4, 3), torch.tensor([0, 2, -100, 1]), torch.tensor([0.5, 2.0, 1.0])
    expected = torch.nn.functional.nll_loss(x, y, w if weighted else None)
    for parts in (1, 2):
        done = run_passes(marked(text, "nll", 1), [CountGlobally(ranks=1, micro_batches=parts)])
        (loss,) = Executable(done, {})([x, y, w])
        torch.testing.assert_close(loss, expected * parts)


def test_a_part_without_targets_counts_for_nothing():
    done = run_passes(marked(NLL.format(weight="None"), "nll", 1), [CountGlobally(ranks=1)])
    program = render(done)
    assert "aten.where.self(" in program
    (loss,) = Executable(done, {})([torch.randn(4, 3), torch.full((4,), -100)])
    assert loss.isnan(), "no part of the batch has a target"
