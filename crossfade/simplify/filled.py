"""Tensors that hold one number everywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from crossfade.graph.operators import arguments

_aten = torch.ops.aten

FILLING: Mapping[Any, int | str] = {
    **dict.fromkeys((_aten.full.default, _aten.full_like.default, _aten.new_full.default), "fill_value"),
    **dict.fromkeys((_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default), 0),
    **dict.fromkeys((_aten.ones.default, _aten.ones_like.default, _aten.new_ones.default), 1),
    _aten.scalar_tensor.default: "s",
}
"""Operators that make tensors of one number: the number, or the name of the argument that has it."""

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def fill_of(node: Any) -> bool | int | float | None:
    """The number that a node fills a new tensor with, as it is written there; None if it does something else.

    >>> graph = fx.Graph()
    >>> fill_of(graph.call_function(_aten.full.default, ([2, 3], 7))), fill_of(graph.placeholder("x"))
    (7, None)
    """
    fill = FILLING.get(node.target) if isinstance(node, fx.Node) else None
    value = arguments(node)[fill] if isinstance(fill, str) else fill
    return value if isinstance(value, bool | int | float) else None


def held_exactly(value: bool | int | float, dtype: torch.dtype) -> bool:
    """Whether a dtype holds a number in the same bits, however converted: no overflow, no fraction cut off, no NaN.

    >>> held_exactly(300, torch.uint8), held_exactly(0.1, torch.float32), held_exactly(1e9, torch.float16)
    (False, True, False)
    """
    if dtype in INTEGERS:
        limits = torch.iinfo(dtype)
        return math.isfinite(value) and value == int(value) and limits.min <= value <= limits.max
    return dtype in FLOATS and (math.isinf(value) or abs(value) <= torch.finfo(dtype).max)
