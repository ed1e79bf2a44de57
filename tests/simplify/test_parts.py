"""Slices and pieces of splits as parts of a value."""

from __future__ import annotations

import sys

import pytest
from torch import fx

from crossfade.simplify.parts import Part, as_part, part_inside
from tests.simplify.holds import program_of


def nodes_of(*lines: str) -> dict[str, fx.Node]:
    text = "\n".join(['x: f32[6, 4] = input("x")', *lines, 'return output("x", x)'])
    return {node.name: node for node in program_of(text).graph.nodes}


SLICES = {
    "p: f32[2, 4] = aten.slice.Tensor(x, 0, 1, 3)": (1, 3),
    "p: f32[2, 4] = aten.slice.Tensor(x, 0, -2, 9223372036854775807)": (4, 6),
    "p: f32[6, 4] = aten.slice.Tensor(x, 0, None, None)": (0, 6),
    "p: f32[0, 4] = aten.slice.Tensor(x, 0, 9, 12)": (6, 6),
    "p: f32[3, 4] = aten.slice.Tensor(x, 0, 0, 6, 2)": None,
    "p: f32[6, 2] = aten.slice.Tensor(x, 1, 0, 2)": None,
    "p: f32[6, 4] = aten.neg(x)": None,
}


@pytest.mark.parametrize("line", SLICES)
def test_slices(line: str):
    nodes = nodes_of(line)
    expected = SLICES[line] and Part(nodes["x"], *SLICES[line], nodes["p"])
    assert as_part(nodes["p"], 0) == expected


@pytest.mark.parametrize(
    ("split", "index", "bounds"),
    [
        ("s: (f32[4, 4], f32[2, 4]) = aten.split.Tensor(x, 4)", 1, (4, 6)),
        ("s: (f32[4, 4], f32[2, 4]) = aten.split.Tensor(x, 4)", -2, (0, 4)),
        ("s: (f32[1, 4], f32[2, 4], f32[3, 4]) = aten.split_with_sizes(x, [1, 2, 3])", 2, (3, 6)),
        ("s: (f32[3, 4], f32[3, 4]) = aten.chunk(x, 2)", 1, (3, 6)),
    ],
)
def test_pieces(split: str, index: int, bounds: tuple[int, int]):
    rows = bounds[1] - bounds[0]
    nodes = nodes_of(split, f"p: f32[{rows}, 4] = s[{index}]")
    assert as_part(nodes["p"], 0) == Part(nodes["x"], *bounds, nodes["p"])
    assert as_part(nodes["p"], 1) is None


def test_all_of_a_value_is_the_value():
    x = nodes_of()["x"]
    assert part_inside(x, 0, 6, 0).node is x
    part = part_inside(x, 2, 6, 0)
    assert part.node is None and part.is_last(0) and not part.is_last(1) and part.bounds() == (2, 6)


def test_bounds_that_are_not_known_are_expressible_only_at_the_end():
    symbolic = """
        n: f32[s0, 4] = input("n")
        p: f32[s0 - 1, 4] = aten.slice.Tensor(n, 0, 1, 9223372036854775807)
        return output("p", p)
        """
    source, piece, _ = program_of(symbolic).graph.nodes
    part = as_part(piece, 0)
    assert part is not None and not part.proved and part.is_expressible(0), "it is there already"
    cut = part_inside(source, 0, part.stop - 1, 0)
    assert not cut.is_expressible(0)
    rest = part_inside(source, 1, part.stop, 0)
    assert rest.is_expressible(0) == rest.is_last(0)
    assert not rest.is_last(0) or rest.bounds() == (1, sys.maxsize)
