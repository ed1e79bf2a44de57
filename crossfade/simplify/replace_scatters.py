"""One number scattered into another becomes a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph.passes import Numerics
from crossfade.graph.private import statically_equal
from crossfade.graph.rewrite import WRITTEN, Match, Rule
from crossfade.graph.rule_pass import RulePass
from crossfade.simplify.filled import fill_of, held_exactly

_aten = torch.ops.aten
_NOT_FILLED = "what it scatters, or into, is not one number everywhere"
_NOT_HELD = "its dtype does not hold its numbers exactly"
_ONE_BYTE = "its elements are of one byte, as those of a comparison would be"
_SEVERAL = "its index is not provably of size one along the dim and as large as the result along the others"
_UNKNOWN_SIZE = "its size along the dim is not a known number"


@dataclass(frozen=True)
class ReplaceScatters(RulePass):
    """Compare positions with the index instead of scattering one number into a tensor of another: one-hot encodings.

    A scatter writes the background, copies it, and writes where the index says; the comparison writes a mask of a byte
    for each element and then the result, half the bytes in float32. Both are pointwise, so that a compiler that fuses
    them into a pointwise user writes neither. The index has one entry for each line along the dim, so that no two
    entries meet. An index out of range, which scatter refuses on CPU, selects nothing.

    Also known as: Inductor's `scatter_upon_const_tensor`.

    Before:
        index: i64[4, 1] = input("index")
        zeros: f32[4, 8] = aten.zeros([4, 8])
        scatter: f32[4, 8] = aten.scatter.value(zeros, 1, index, 1.0)
        neg: f32[4, 8] = aten.neg(scatter)
        return output("y", neg)

    After:
        index: i64[4, 1] = input("index")
        arange: i64[8] = aten.arange(8, dtype=i64, device=device("cpu"))
        view: i64[1, 8] = aten.view(arange, [1, 8])
        eq: b8[4, 8] = aten.eq.Tensor(view, index)
        full: f32[] = aten.full([], 1.0, dtype=f32, device=device("cpu"))
        full_1: f32[] = aten.full([], 0, dtype=f32, device=device("cpu"))
        where: f32[4, 8] = aten.where.self(eq, full, full_1)
        neg: f32[4, 8] = aten.neg(where)
        return output("y", neg)
    """

    name = "replace-scatters"
    numerics = Numerics.BITWISE

    def rules(self) -> Sequence[Rule]:
        """Scatters of a number, and of a tensor filled with one."""
        return (
            Rule("scatter-a-number", "aten.scatter.value(background, dim, index, value)", _as_where, _reason_against),
            Rule("scatter-a-tensor", "aten.scatter.src(background, dim, index, value)", _as_where, _reason_against),
        )


def _reason_against(match: Match) -> str | None:
    operands = (match["background"], match["value"])
    if match.is_written(*(operand for operand in operands if isinstance(operand, fx.Node))):
        return WRITTEN
    background, value = fill_of(match["background"]), _scattered(match)
    if background is None or value is None:
        return _NOT_FILLED
    result, index = match.root.meta["val"], match["index"].meta["val"]
    if result.itemsize == 1:
        return _ONE_BYTE
    if not held_exactly(background, result.dtype) or not held_exactly(value, result.dtype):
        return _NOT_HELD
    if result.dim() == 0 or index.dim() != result.dim():
        return _SEVERAL
    wanted = list(result.shape)
    wanted[match["dim"]] = 1
    if not statically_equal(list(index.shape), wanted):
        return _SEVERAL
    return None if isinstance(result.shape[match["dim"]], int) else _UNKNOWN_SIZE


def _scattered(match: Match) -> Any:
    value = match["value"]
    if isinstance(value, fx.Node):
        return fill_of(value)
    return value if isinstance(value, bool | int | float) else None


def _as_where(match: Match) -> fx.Node:
    result, dim = match.root.meta["val"], match["dim"]
    background, value = fill_of(match["background"]), _scattered(match)
    view = [1] * result.dim()
    view[dim] = result.shape[dim]

    def selected(index: Tensor) -> Tensor:
        place = _aten.arange.default(view[dim], dtype=index.dtype, device=result.device)
        mask = (place if len(view) == 1 else place.view(view)) == index
        scattered = _aten.full.default([], value, dtype=result.dtype, device=result.device)
        other = _aten.full.default([], background, dtype=result.dtype, device=result.device)
        return torch.where(mask, scattered, other)

    return match.splice(selected, match["index"])
