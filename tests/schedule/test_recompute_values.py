"""Values computed again: exact text for each case, the same numbers on sampled programs, no more bytes than said."""

from __future__ import annotations

import random

import pytest
import torch

from crossfade.errors import PassError
from crossfade.execute.executable import Executable
from crossfade.finish.update_in_place import UpdateInPlace
from crossfade.graph.memory import memory_curve
from crossfade.graph.passes import run_passes
from crossfade.graph.text import parse, render
from crossfade.schedule.choose_recompute import frontier
from crossfade.schedule.recompute_values import RecomputeValues
from tests.schedule.test_choose_recompute import forward_and_backward


def after(text: str, *again: str) -> list[str]:
    """The calls of a program, values computed again."""
    program = run_passes(parse(text, groups={"dp": 2}), [RecomputeValues(again)])
    return [line for line in render(program).splitlines() if "= aten." in line or "c10d." in line or "[" in line[-3:]]


CHAIN = """
x: f32[4] = input("x")
a: f32[4] = aten.exp(x)
b: f32[4] = aten.neg(a)
c: f32[4] = aten.exp(b)
d: f32[4] = aten.neg(c)
e: f32[4] = aten.mul.Tensor(d, b)
f: f32[4] = aten.mul.Tensor(e, x)
return output("f", f)
"""


def test_a_chain_is_computed_again_as_far_as_it_is_named():
    assert after(CHAIN, "b@e")[-3:] == [
        "b_1: f32[4] = aten.neg(a)",
        "e: f32[4] = aten.mul.Tensor(d, b_1)",
        "f: f32[4] = aten.mul.Tensor(e, x)",
    ]
    assert after(CHAIN, "b@e", "a")[-4:] == [
        "a_1: f32[4] = aten.exp(x)",
        "b_1: f32[4] = aten.neg(a_1)",
        "e: f32[4] = aten.mul.Tensor(d, b_1)",
        "f: f32[4] = aten.mul.Tensor(e, x)",
    ]


def test_a_gather_runs_again_and_is_waited_for_again():
    text = """
w: f32[2, 2] = parameter("w")
x: f32[4, 4] = input("x")
start: f32[4, 2] = c10d.all_gather_into_tensor(w, 2, "dp")
done: f32[4, 2] = c10d.wait_tensor(start)
mm: f32[4, 2] = aten.mm(x, done)
exp: f32[4, 2] = aten.exp(mm)
t: f32[2, 4] = aten.permute(done, [1, 0])
mm_1: f32[4, 4] = aten.mm(exp, t)
return output("y", mm_1)
"""
    assert after(text, "start@t")[-4:] == [
        'start_1: f32[4, 2] = c10d.all_gather_into_tensor(w, 2, "dp")',
        "done_1: f32[4, 2] = c10d.wait_tensor(start_1)",
        "t: f32[2, 4] = aten.permute(done_1, [1, 0])",
        "mm_1: f32[4, 4] = aten.mm(exp, t)",
    ]


def test_names_that_are_not_there_are_refused():
    with pytest.raises(PassError, match=r"no node 'nothing' to compute again.*memory="):
        after(CHAIN, "nothing@e")


@pytest.mark.parametrize("seed", range(12))
def test_sampled_programs_compute_the_same_within_sampled_limits(seed: int):
    choose = random.Random(seed)
    values = forward_and_backward(choose.randint(5, 25), seed=seed)
    found = frontier(values)
    limit = choose.randint(found.least.peak, found.choices[0].peak)
    choice = found.within(limit)
    again = RecomputeValues(tuple(sorted(values.spelled(cell) for cell in choice.cells)))
    lean = run_passes(values.program, [again, UpdateInPlace()])
    assert memory_curve(lean).peak <= limit
    batch = torch.randn(64, 8) / 100
    expected, results = (Executable(program, {})([batch.clone()]) for program in (values.program, lean))
    assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))
