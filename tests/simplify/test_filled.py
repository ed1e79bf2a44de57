"""Numbers that tensors are filled with, and what dtypes hold of them."""

from __future__ import annotations

import math

import pytest
import torch

from crossfade.simplify.filled import fill_of, held_exactly
from tests.simplify.holds import program_of

FILLS = {
    "aten.full([2], 7, dtype=f32)": 7,
    "aten.full_like(x, 0.5)": 0.5,
    "aten.new_full(x, [2], -1)": -1,
    "aten.zeros([2], dtype=f32)": 0,
    "aten.ones_like(x)": 1,
    "aten.neg(x)": None,
    "aten.rand_like(x)": None,
}


@pytest.mark.parametrize("call", FILLS)
def test_numbers_as_they_are_written(call: str):
    program = program_of(f'x: f32[2] = input("x")\ny: f32[2] = {call}\nreturn output("y", y)')
    _, y, _ = program.graph.nodes
    assert fill_of(y) == FILLS[call]
    assert fill_of("y") is None


@pytest.mark.parametrize(
    ("value", "dtype", "held"),
    [
        (255, torch.uint8, True),
        (256, torch.uint8, False),
        (-1, torch.uint8, False),
        (2.5, torch.int64, False),
        (math.inf, torch.int64, False),
        (True, torch.int8, True),
        (65504.0, torch.float16, True),
        (65505.0, torch.float16, False),
        (math.inf, torch.float16, True),
        (math.nan, torch.float32, False),
        (1, torch.bool, False),
        (1, torch.complex64, False),
    ],
)
def test_what_a_dtype_holds(value: float, dtype: torch.dtype, held: bool):
    assert held_exactly(value, dtype) is held
