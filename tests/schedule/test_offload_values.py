"""Values moved to the host: the copies and waits of small programs as text, verdicts by simulation, refusals."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from crossfade.cost.machine_parts import HostLink
from crossfade.cost.presets import preset
from crossfade.errors import PassError
from crossfade.execute.executable import Executable
from crossfade.graph.memory import memory_curve
from crossfade.graph.passes import Outcome, run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse, render
from crossfade.schedule.offload_values import OffloadValues

VIEWED = """
x: f32[4, 2] = input("x")
exp: f32[4, 2] = aten.exp(x)
view: f32[8] = aten.view(exp, [8])
first: f32[4] = aten.slice.Tensor(view, 0, 0, 4)
neg: f32[8] = aten.neg(view)
sum_1: f32[] = aten.sum(neg)
sin: f32[] = aten.sin(sum_1)
cos: f32[4] = aten.cos(first)
mul: f32[4, 2] = aten.mul.Tensor(exp, sin)
return output("cos", cos), output("mul", mul)
"""


def moved(program: Program, *moves: str, **context: object) -> Program:
    return run_passes(program, [OffloadValues(moves)], context=context)


def test_views_are_made_again_of_what_came_back():
    assert (
        render(moved(parse(VIEWED), "exp@neg@sum_1")).strip()
        == """
x: f32[4, 2] = input("x")
exp: f32[4, 2] = aten.exp(x)
to_host: f32[4, 2] = crossfade.to_host(exp)
view: f32[8] = aten.view(exp, [8])
first: f32[4] = aten.slice.Tensor(view, 0, 0, 4)
neg: f32[8] = aten.neg(view)
on_host: f32[4, 2] = crossfade.on_host(to_host, exp)
sum_1: f32[] = aten.sum(neg)
from_host: f32[4, 2] = crossfade.from_host(on_host, device=device("cpu"))
sin: f32[] = aten.sin(sum_1)
on_device: f32[4, 2] = crossfade.on_device(from_host)
view_1: f32[8] = aten.view(on_device, [8])
slice_1: f32[4] = aten.slice.Tensor(view_1, 0, 0, 4)
cos: f32[4] = aten.cos(slice_1)
mul: f32[4, 2] = aten.mul.Tensor(on_device, sin)
return output("cos", cos), output("mul", mul)
""".strip()
    )


def test_what_moves_is_the_same_bit_for_bit_and_held_for_less_long():
    program = parse(VIEWED)
    done, x = moved(program, "exp@neg@sum_1"), torch.randn(4, 2)
    for found, expected in zip(Executable(done, {})([x]), Executable(program, {})([x]), strict=True):
        assert torch.equal(found, expected)
    before, after = (
        dict(zip([n.name for n in p.graph.nodes], memory_curve(p).during, strict=True)) for p in (program, done)
    )
    assert before["sum_1"] - after["sum_1"] == 32
    assert before["cos"] == after["cos"]


LONG = """
x: f32[1024, 1024] = input("x")
exp: f32[1024, 1024] = aten.exp(x)
mm: f32[1024, 1024] = aten.mm(exp, x)
mm_1: f32[1024, 1024] = aten.mm(mm, x)
mm_2: f32[1024, 1024] = aten.mm(mm_1, x)
mm_3: f32[1024, 1024] = aten.mm(mm_2, x)
mul: f32[1024, 1024] = aten.mul.Tensor(mm_3, exp)
return output("mul", mul)
"""


@pytest.mark.parametrize(("latency", "exposed"), [(1e-6, 0.0), (1e-2, 1.9e-2)])
def test_a_verdict_says_what_a_simulated_run_waits_for(latency: float, exposed: float):
    """Two products of 2 GFLOP at 120 GFLOP/s take 36 ms; a copy there is waited for after the first of them."""
    machine = dataclasses.replace(preset("loopback-gloo"), host=HostLink(latency, 1e12))
    done = moved(parse(LONG), "exp@mm@mm_1", machine=machine)
    (verdict,) = done.history[-1].verdicts
    assert (verdict.subject, verdict.bytes) == ("exp", 4 * 2**20)
    if exposed:
        machine = dataclasses.replace(machine, flops={"float32": 1e20})  # the copies alone are left
        (verdict,) = moved(parse(LONG), "exp@mm@mm_1", machine=machine).history[-1].verdicts
        assert verdict.outcome is Outcome.EXPOSED
        assert float(verdict.detail.split()[-2]) == pytest.approx(1e3 * exposed, rel=0.1)
    else:
        assert verdict.outcome is Outcome.HIDDEN


@pytest.mark.parametrize(
    ("move", "message"),
    [
        ("exp@neg", "three names of nodes"),
        ("exp@gone@sum_1", "three names of nodes"),
        ("exp@exp@sum_1", "view uses exp while that is on the host"),
        ("neg@sum_1@sin", "not used after it is back"),
    ],
)
def test_moves_that_make_no_sense_are_refused(move: str, message: str):
    with pytest.raises(PassError, match=message):
        moved(parse(VIEWED), move)
