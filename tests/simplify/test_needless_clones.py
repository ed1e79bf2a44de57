"""Clones go where nothing reads the memory of what they copy afterwards."""

from __future__ import annotations

import pytest

from crossfade.simplify.needless_clones import drop_needless_clones
from tests.simplify.holds import program_of

PROGRAMS = {
    "nothing reads it again": ("", "y", 1),
    "an operator reads it again": ("z: f32[4] = aten.exp(n)\n", "z", 0),
    "a view of it is read again": ("z: f32[4] = aten.exp(v)\n", "z", 0),
    "it is a result": ("", "n", 0),
}


@pytest.mark.parametrize("why", PROGRAMS)
def test_own_values(why: str):
    lines, result, dropped = PROGRAMS[why]
    text = f"""x: f32[4] = input("x")
n: f32[4] = aten.neg(x)
v: f32[4] = aten.view(n, [4])
c: f32[4] = aten.clone(n)
y: f32[4] = aten.mul_.Tensor(c, 2)
{lines}return output("y", y), output("z", {result})
"""
    if result == "y":
        text = text.replace(', output("z", y)', "")
    program = program_of(text)
    clones = [node for node in program.graph.nodes if node.name == "c"]
    assert drop_needless_clones(program, clones) == dropped


def test_inputs_are_not_the_programs_own():
    text = (
        'x: f32[4] = input("x")\nc: f32[4] = aten.clone(x)\ny: f32[4] = aten.mul_.Tensor(c, 2)\nreturn output("y", y)'
    )
    program = program_of(text)
    assert drop_needless_clones(program, [list(program.graph.nodes)[1]]) == 0


def test_what_a_collective_sends_is_read_until_its_wait():
    text = """
        x: f32[4] = input("x")
        n: f32[4] = aten.neg(x)
        s: f32[4] = c10d.all_reduce(n, "sum", "dp")
        c: f32[4] = aten.clone(n)
        y: f32[4] = aten.mul_.Tensor(c, 2)
        w: f32[4] = c10d.wait_tensor(s)
        return output("y", y), output("w", w)
        """
    program = program_of(text, dp=2)
    clones = [node for node in program.graph.nodes if node.name == "c"]
    assert drop_needless_clones(program, clones) == 0


def test_a_second_clone_of_a_value_that_the_first_took_stays():
    text = """
        x: f32[4] = input("x")
        n: f32[4] = aten.neg(x)
        c: f32[4] = aten.clone(n)
        y: f32[4] = aten.mul_.Tensor(c, 2)
        d: f32[4] = aten.clone(c)
        z: f32[4] = aten.mul_.Tensor(d, 3)
        return output("y", y), output("z", z)
        """
    program = program_of(text)
    clones = [node for node in program.graph.nodes if node.name in "cd"]
    assert drop_needless_clones(program, clones) == 1
    assert [node.name for node in program.graph.nodes] == ["x", "n", "y", "d", "z", "output"]
