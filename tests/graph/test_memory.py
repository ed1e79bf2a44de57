"""Live bytes of programs, held against what really lives while their generated code runs."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from crossfade.execute.executable import Executable
from crossfade.graph import collectives
from crossfade.graph.memory import memory_curve
from crossfade.graph.program import Program
from tests.graph.small_programs import program_of
from tests.live_bytes import LiveBytes


class Meter(LiveBytes):
    """Beside the inputs' memory; keeps the most."""

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self.theirs = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        self.most = 0

    def counts(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() not in self.theirs

    def seen(self, operator: str) -> None:
        self.most = max(self.most, self.live)


def measured(program: Program, groups: dict[str, str]) -> tuple[list[int], list[int]]:
    """The most live bytes during each line of the generated code, and those after it, by watching it line by line."""
    run = Executable(program, groups)
    inputs = [torch.ones(tuple(node.meta["val"].shape)) for node in program.placeholders]
    during, after = [], []
    meter = Meter(inputs)

    def watch(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != run.compiled.filename:
            return None
        if event == "line":
            node = run.compiled.node_at.get(frame.f_lineno - 1)
            if node is not None and collectives.is_wait(node):
                time.sleep(0.05)  # the backend's thread lets go of what it sent a moment after it is done
            after.append(meter.live)
            during.append(max(meter.most, meter.live))
            meter.most = meter.live
        return watch

    sys.settrace(watch)
    try:
        with meter:
            run(list(inputs))
    finally:
        sys.settrace(None)
    return during[2:], after[2:]  # before the first line, and unpacking the inputs


def counted(text: str) -> tuple[list[int], list[int]]:
    """What the curve says of the nodes that the generated code has lines for."""
    program = program_of(text)
    curve = memory_curve(program)
    assert curve.peak == max(curve.during)
    first = len(program.inputs)
    return list(curve.during[first:-1]), list(curve.after[first:-1])


CASES = {
    "views": """
        x: f32[64, 8] = input("x")
        a: f32[64, 8] = aten.neg(x)
        v: f32[512] = aten.view(a, [512])
        s: f32[16] = aten.slice.Tensor(v, 0, 0, 16)
        b: f32[64, 8] = aten.exp(x)
        c: f32[16] = aten.neg(s)
        d: f32[64, 8] = aten.exp(b)
        return output("c", c), output("d", d)
    """,
    "views of inputs and results": """
        x: f32[64, 8] = input("x")
        v: f32[8, 64] = aten.t(x)
        e: f32[2, 8, 64] = aten.expand(v, [2, 8, 64])
        n: f32[2, 8, 64] = aten.neg(e)
        half: f32[8, 64] = aten.select.int(n, 0, 1)
        last: f32[8, 64] = aten.exp(half)
        return output("v", v), output("half", half), output("last", last)
    """,
    "reshape copies what it cannot view": """
        x: f32[64, 8] = input("x")
        a: f32[64, 8] = aten.neg(x)
        v: f32[512] = aten.reshape(a, [512])
        t: f32[8, 64] = aten.t(a)
        c: f32[512] = aten.reshape(t, [512])
        same: f32[64, 8] = aten.contiguous(a)
        other: f32[8, 64] = aten.contiguous(t)
        y: f32[512] = aten.add.Tensor(v, c)
        z: f32[8, 64] = aten.exp(other)
        w: f32[64, 8] = aten.exp(same)
        return output("y", y), output("z", z), output("w", w)
    """,
    "lists": """
        x: f32[64, 8] = input("x")
        a: f32[64, 8] = aten.neg(x)
        parts: (f32[32, 8], f32[32, 8]) = aten.split.Tensor(a, 32)
        p0: f32[32, 8] = parts[0]
        b: f32[32, 8] = aten.exp(p0)
        pair: (f32[8], f32[8]) = aten.aminmax(x, dim=0)
        low: f32[8] = pair[0]
        high: f32[8] = pair[1]
        n: f32[8] = aten.neg(low)
        m: f32[8] = aten.neg(high)
        return output("b", b), output("n", n), output("m", m)
    """,
    "an element that nobody takes": """
        x: f32[64, 8] = input("x")
        norm: (f32[64, 8], f32[64, 1], f32[64, 1]) = aten.native_layer_norm(x, [8], None, None, 1e-05)
        y: f32[64, 8] = norm[0]
        z: f32[64, 8] = aten.neg(y)
        return output("z", z)
    """,
    "writes": """
        x: f32[64, 8] = input("x")
        a: f32[64, 8] = aten.neg(x)
        b: f32[64, 8] = aten.exp_(a)
        c: f32[64, 8] = aten.add.Tensor(b, x)
        d: f32[64, 8] = aten.add_.Tensor(x, c)
        e: f32[] = aten.sum(d)
        return output("e", e)
    """,
    "values that nobody uses": """
        x: f32[64, 8] = input("x")
        unused: f32[64, 8] = aten.neg(x)
        view: f32[512] = aten.view(x, [512])
        y: f32[64, 8] = aten.exp(x)
        return output("y", y), output("again", y)
    """,
}


@pytest.mark.parametrize("case", CASES)
def test_as_measured(case: str) -> None:
    assert counted(CASES[case]) == measured(program_of(CASES[case]), {})


IN_FLIGHT = {
    "an all-reduce sends a copy": """
        x: f32[64, 8] = input("x")
        a: f32[64, 8] = aten.neg(x)
        start: f32[64, 8] = c10d.all_reduce(a, "sum", "dp")
        e: f32[64, 8] = aten.exp(x)
        done: f32[64, 8] = c10d.wait_tensor(start)
        y: f32[64, 8] = aten.add.Tensor(done, e)
        return output("y", y)
    """,
    "a gather keeps what it sends": """
        x: f32[64, 8] = input("x")
        a: f32[64, 8] = aten.neg(x)
        start: f32[128, 8] = c10d.all_gather_into_tensor(a, 2, "dp")
        e: f32[64, 8] = aten.exp(x)
        done: f32[128, 8] = c10d.wait_tensor(start)
        s: f32[] = aten.sum(done)
        return output("e", e), output("s", s)
    """,
    "an exchange keeps what it sends": """
        x: f32[64, 8] = input("x")
        a: f32[64, 8] = aten.neg(x)
        start: f32[64, 8] = c10d.all_to_all_single(a, [32, 32], [32, 32], "dp")
        e: f32[64, 8] = aten.exp(x)
        done: f32[64, 8] = c10d.wait_tensor(start)
        s: f32[] = aten.sum(done)
        return output("e", e), output("s", s)
    """,
    "coalesced, results stay until the last wait": """
        x: f32[64, 8] = input("x")
        a: f32[64, 8] = aten.neg(x)
        b: f32[64, 8] = aten.exp(x)
        both: (f32[64, 8], f32[64, 8]) = c10d.all_reduce_coalesced([a, b], "sum", "dp")
        one: f32[64, 8] = both[0]
        two: f32[64, 8] = both[1]
        done: f32[64, 8] = c10d.wait_tensor(one)
        y: f32[] = aten.sum(done)
        done_1: f32[64, 8] = c10d.wait_tensor(two)
        z: f32[] = aten.sum(done_1)
        return output("y", y), output("z", z)
    """,
    "in place": """
        x: f32[64, 8] = input("x")
        a: f32[64, 8] = aten.neg(x)
        start: f32[64, 8] = c10d.all_reduce_(a, "sum", "dp")
        done: f32[64, 8] = c10d.wait_tensor(start)
        s: f32[] = aten.sum(done)
        return output("s", s)
    """,
}


def measured_on_a_rank(text: str) -> tuple[list[int], list[int]]:
    return measured(program_of(text), {"dp": dist.group.WORLD.group_name})  # type: ignore[union-attr]


@pytest.mark.ranks
@pytest.mark.parametrize("case", IN_FLIGHT)
def test_collectives_as_measured(ranks: Any, case: str) -> None:
    assert ranks(2).run(measured_on_a_rank, IN_FLIGHT[case]) == [counted(IN_FLIGHT[case])] * 2


def test_a_reduce_scatter_keeps_what_it_sends() -> None:
    """Not measured: gloo sends a copy, which no tensor of the program holds."""
    during, after = counted("""
        x: f32[64, 8] = input("x")
        a: f32[64, 8] = aten.neg(x)
        start: f32[32, 8] = c10d.reduce_scatter_tensor(a, "sum", 2, "dp")
        e: f32[64, 8] = aten.exp(x)
        done: f32[32, 8] = c10d.wait_tensor(start)
        s: f32[] = aten.sum(done)
        return output("e", e), output("s", s)
    """)
    assert during == [2048, 3072, 5120, 5120, 3076]
    assert after == [2048, 3072, 5120, 3072, 2052]


def test_inputs_and_constants_are_held() -> None:
    program = program_of("""
        x: f32[64, 8] = input("x")
        c: f32[4] = constant("c")
        d: f32[4] = constant("c")
        s: f32[4] = aten.add.Tensor(c, d)
        return output("s", s)
    """)
    curve = memory_curve(program)
    assert (curve.held, curve.peak, curve.at) == (64 * 8 * 4 + 16, 16, "s")
    assert str(curve) == "16 bytes at s, beside 2,064 of inputs and constants"


def test_another_order_of_the_nodes() -> None:
    program = program_of("""
        x: f32[64] = input("x")
        a: f32[64] = aten.neg(x)
        b: f32[64] = aten.exp(x)
        y: f32[] = aten.sum(a)
        z: f32[] = aten.sum(b)
        return output("y", y), output("z", z)
    """)
    x, a, b, y, z, out = program.graph.nodes
    assert memory_curve(program).peak == 2 * 256 + 4
    assert memory_curve(program, [x, a, y, b, z, out]).during == (0, 256, 260, 260, 264, 8)
