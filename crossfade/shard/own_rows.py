"""How a tensor's rows are split over ranks: equal parts, the last ones padded; and this rank's part of a value."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.errors import CaptureError
from crossfade.graph.program import Input, InputKind, Program, rows_per_rank
from crossfade.graph.splice import insert_call

RANK_INPUT = "rank"
"""The input that says which rank this is, so that all ranks run one program; `rank.dp_shard` along an axis of many."""


def rank_input(program: Program, axis: str = "") -> fx.Node:
    """The input that says which rank this is, of all or along an axis, added if there is none yet."""
    name = f"{RANK_INPUT}.{axis}" if axis else RANK_INPUT
    if (known := program.input_nodes().get(name)) is not None:
        if Input(InputKind.SCALAR, name) not in program.inputs:
            raise CaptureError(f"the model has a tensor named {name!r}", remedy="rename it: the step needs the name")
        return known
    return program.add_input(Input(InputKind.SCALAR, name), 0)


def own_rows(program: Program, whole: fx.Node, rows: int, dim: int, *, before: fx.Node, axis: str = "") -> fx.Node:
    """The rows of `whole` along a dim that belong to this rank, if each rank (of an axis) has `rows` of them."""

    def call(target: Any, *args: Any) -> fx.Node:
        return insert_call(program, target, *args, before=before, like=whole)

    start = call(operator.mul, rank_input(program, axis), rows)
    end = call(operator.add, start, rows)
    return call(torch.ops.aten.slice.Tensor, whole, dim, start, end)


def padded(value: Tensor, ranks: int) -> Tensor:
    """A tensor with rows of zeros added at its end, so that every rank has as many."""
    missing = rows_per_rank(value.shape[0], ranks) * ranks - value.shape[0]
    if not missing:
        return value.contiguous()
    return torch.ops.aten.constant_pad_nd(value, [0, 0] * (value.dim() - 1) + [0, missing])
