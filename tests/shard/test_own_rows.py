"""Rows of a tensor by rank: padded to equal parts, and cut out where the program's input `rank` says."""

from __future__ import annotations

import pytest
import torch

from crossfade.errors import CaptureError
from crossfade.graph.text import parse, render
from crossfade.shard.own_rows import own_rows, padded, rank_input

TEXT = 'x: f32[4, 2] = input("x")\nreturn output("x", x)'


@pytest.mark.parametrize(("rows", "ranks", "made"), [(4, 2, 4), (5, 2, 6), (3, 4, 4), (1, 3, 3)])
def test_rows_are_padded_with_zeros_to_a_multiple_of_the_ranks(rows: int, ranks: int, made: int):
    value = torch.ones(rows, 2)
    found = padded(value, ranks)
    assert found.shape == (made, 2)
    assert torch.equal(found[:rows], value) and not found[rows:].any()


def test_what_divides_is_made_contiguous_and_not_copied_otherwise():
    value = torch.ones(4, 2)
    assert padded(value, 2) is value
    assert padded(torch.ones(2, 4).t(), 2).is_contiguous()


def test_a_rank_takes_its_rows_along_any_dim():
    program = parse(TEXT)
    x, output = program.placeholders[0], program.output_node
    part = own_rows(program, x, 1, 1, before=output, axis="dp")
    program.set_results([part])
    assert render(program).splitlines() == [
        'x: f32[4, 2] = input("x")',
        'rank_dp: int = scalar("rank.dp")',
        "mul: int = operator.mul(rank_dp, 1)",
        "add: int = operator.add(mul, 1)",
        "slice_1: f32[4, 1] = aten.slice.Tensor(x, 1, mul, add)",
        'return output("x", slice_1)',
    ]


def test_the_rank_is_one_input_for_each_axis():
    program = parse(TEXT)
    assert rank_input(program) is rank_input(program) is not rank_input(program, "dp")
    assert [item.name for item in program.inputs] == ["x", "rank", "rank.dp"]


def test_a_tensor_of_that_name_is_refused():
    program = parse('rank: f32[4] = input("rank")\nreturn output("y", rank)')
    with pytest.raises(CaptureError, match=r"the model has a tensor named 'rank'. Remedy: rename it"):
        rank_input(program)
