"""Dims that hold samples are those that grow with the batch."""

from __future__ import annotations

import pytest
import torch

from crossfade.errors import CaptureError
from crossfade.graph.program import Program
from crossfade.graph.text import parse
from crossfade.shard.batch_dims import batch_dims, growing_dims, mark_batch_dims, needs_batch_dims, of_whole_batch

TEXT = """
w: f32[3, 2] = parameter("w")
x: f32[{rows}, 3] = input("x")
mm: f32[{rows}, 2] = aten.mm(x, w)
t: f32[2, {rows}] = aten.t(mm)
gram: f32[{rows}, {rows}] = aten.mm(mm, t)
sum_1: f32[] = aten.sum(gram)
return output("y", sum_1)
"""


def program(rows: int, text: str = TEXT) -> Program:
    return parse(text.format(rows=rows))


def test_dims_that_differ_between_two_batch_sizes():
    small = program(2)
    mark_batch_dims(small, program(6))
    found = {node.name: batch_dims(node) for node in small.graph.nodes if node.op != "output"}
    assert found == {"w": (), "x": (0,), "mm": (0,), "t": (1,), "gram": (0, 1), "sum_1": ()}


def test_sizes_and_strides_are_those_of_the_whole_batch():
    small = program(2)
    mark_batch_dims(small, program(6))
    turned = next(node for node in small.graph.nodes if node.name == "t")
    whole = of_whole_batch(turned)
    assert whole is not None and whole.shape == (2, 6)
    assert whole.strides == (1, 2)


def test_values_that_are_no_tensors_have_no_dims():
    assert growing_dims(torch.empty(2, 3, 4), torch.empty(6, 3, 12)) == (0, 2)
    assert growing_dims(2, 6) == growing_dims(torch.empty(2), None) == ()


def test_unmarked_nodes_have_none():
    node = program(2).placeholders[1]
    assert batch_dims(node) == () and of_whole_batch(node) is None


@pytest.mark.parametrize("other", [TEXT.replace("aten.sum", "aten.mean"), None])
def test_programs_that_differ_by_more_than_sizes_are_refused(other: str | None):
    shorter = TEXT.replace("sum_1: f32[] = aten.sum(gram)\n", "").replace("sum_1", "gram")
    with pytest.raises(CaptureError, match=r"computes differently on batches of different sizes"):
        mark_batch_dims(program(2), program(6, other or shorter))


@pytest.mark.parametrize(
    ("line", "needed"),
    [("aten.rand_like(x)", True), ("aten.neg(x)", False)],
)
def test_only_draws_and_batch_statistics_need_them(line: str, needed: bool):
    text = f'x: f32[4, 3] = input("x")\ny: f32[4, 3] = {line}\nreturn output("y", y)'
    assert needs_batch_dims(parse(text)) is needed
