"""Values of other strides are taken where nothing below can see it."""

from __future__ import annotations

import pytest
import torch

from crossfade.errors import RewriteError
from crossfade.graph.changed_strides import Strides, replace_strided
from tests.simplify.holds import program_of

READERS = {
    "b: f32[4, 2] = aten.exp(a)": None,
    "v: f32[8] = aten.view(a, [8])\nb: f32[8] = aten.exp(v)": "a view of it could not be taken",
    "b: f32[4, 2] = aten.alias(a)": "a result of the program would have other strides",
    "b: f32[2, 2] = aten.as_strided(a, [2, 2], [2, 1])": "something goes by its strides",
    "b: bool = aten.is_contiguous(a)": "something goes by its strides",
    'b: f32[4, 2] = c10d.all_reduce(a, "sum", "dp")': "something communicates or writes it",
    "b: f32[4, 2] = aten.copy_(a, x)": "something communicates or writes it",
    "t: f32[2, 4] = aten.t(a)\nb: f32[2, 4] = aten.exp(t)": None,
    "t: f32[2, 4] = aten.t(a)\nb: f32[2, 2] = aten.mm(t, x)": None,
}


@pytest.mark.parametrize("lines", READERS)
def test_readers(lines: str):
    text = f'x: f32[4, 2] = input("x")\na: f32[4, 2] = aten.neg(x)\n{lines}\nreturn output("b", b)'
    program = program_of(text, dp=2)
    a = list(program.graph.nodes)[1]
    with program.fake_mode:
        wide = torch.empty(4, 4)[:, :2]
    assert Strides(program).take({a: wide}) == READERS[lines]


def test_the_same_strides_are_always_taken():
    program = program_of('x: f32[4, 2] = input("x")\na: f32[4, 2] = aten.neg(x)\nreturn output("a", a)')
    _, a, _ = program.graph.nodes
    with program.fake_mode:
        assert Strides(program).take({a: torch.empty(4, 2)}) is None


def test_what_is_not_planned_first_is_refused():
    program = program_of('x: f32[2, 4] = input("x")\na: f32[4, 2] = aten.t(x)\nreturn output("a", a)')
    _, a, _ = program.graph.nodes
    with program.graph.inserting_before(a):
        other = program.graph.call_function(torch.ops.aten.clone.default, (a,))
    with program.fake_mode:
        other.meta["val"] = torch.empty(4, 2)
    with pytest.raises(RewriteError, match="though a result of the program would have other strides"):
        replace_strided(program, {a: other})
