"""Runs of parts are found by where their elements lie, in whatever shape they have come."""

from __future__ import annotations

import pytest

from crossfade.simplify.blocks import runs_of
from tests.simplify.holds import program_of

JOINS = {
    "a: f32[2] = aten.select.int(x, 0, 1)\nb: f32[2] = aten.select.int(x, 0, 2)\nj: f32[4] = aten.cat([a, b])": [
        ("x", 0, 1, 3)
    ],
    "a: f32[4] = aten.select.int(x, 1, 0)\nb: f32[4] = aten.select.int(x, 1, 1)\n"
    "j: f32[4, 2] = aten.stack([a, b], 1)": [("x", 1, 0, 2)],
    "a: f32[4] = aten.select.int(x, 1, 0)\nb: f32[4] = aten.select.int(x, 1, 1)\n"
    "j: f32[2, 4] = aten.stack([a, b])": None,
    "a: f32[2] = aten.select.int(x, 0, 1)\nb: f32[2] = aten.select.int(x, 0, 3)\nj: f32[4] = aten.cat([a, b])": None,
    "e: f32[0, 2] = aten.slice.Tensor(x, 0, 0, 0)\nf: f32[0, 2] = aten.slice.Tensor(x, 0, 0, 0)\n"
    "j: f32[0, 2] = aten.cat([e, f])": None,
    "a: f32[1, 2] = aten.slice.Tensor(x, 0, 0, 1)\nb: f32[1, 2] = aten.slice.Tensor(x, 0, 1, 2)\n"
    "j: f32[3, 2] = aten.cat([a, b, b])": [("x", 0, 0, 2), ("b", 0, 0, 1)],
}


@pytest.mark.parametrize("lines", JOINS)
def test_runs(lines: str) -> None:
    program = program_of(f'x: f32[4, 2] = input("x")\n{lines}\nreturn output("j", j)')
    join = program.output_node.prev
    dim = join.args[1] if len(join.args) > 1 else 0
    runs = runs_of(join, list(join.args[0]), dim)
    expected = JOINS[lines]
    found = runs and [(run.source.name, run.dim, run.start, run.stop) for run in runs]
    assert found == expected
