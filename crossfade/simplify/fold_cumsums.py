"""Running sums of one number, written down instead of summed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph.operators import arguments
from crossfade.graph.passes import Numerics
from crossfade.graph.rewrite import WRITTEN, Match, Rule
from crossfade.graph.rule_pass import RulePass
from crossfade.simplify.filled import FLOATS, INTEGERS, fill_of, held_exactly

_aten = torch.ops.aten
_NOT_A_NUMBER = "what it sums is not a tensor filled with one number"
_NOT_WHOLE = "the number is zero, no whole number, or not one that its dtype holds"
_UNKNOWN_SIZE = "its size is not a known number"
_OTHER_DTYPE = "sums of its dtype are not known to be exact"
_TOO_LARGE = "its sums leave the whole numbers that its dtype holds exactly"


@dataclass(frozen=True)
class FoldCumsums(RulePass):
    """Make the running sum of a tensor that holds one number everywhere an `arange`: position ids are made like that.

    Only where every sum is exact, in whatever order it is taken: whole numbers within what the dtype holds exactly.
    A dim is scanned no more; along other dims the numbers are repeated, which is written once and not read.

    Also known as: Inductor's `pointless_cumsum_replacement`.

    Before:
        ones: i64[2, 4] = aten.ones([2, 4], dtype=i64)
        cumsum: i64[2, 4] = aten.cumsum(ones, 1)
        neg: i64[2, 4] = aten.neg(cumsum)
        return output("y", neg)

    After:
        arange: i64[4] = aten.arange.start_step(1, 5, dtype=i64, device=device("cpu"))
        view: i64[1, 4] = aten.view(arange, [1, 4])
        expand: i64[2, 4] = aten.expand(view, [2, 4])
        clone: i64[2, 4] = aten.clone(expand, memory_format=contiguous_format)
        neg: i64[2, 4] = aten.neg(clone)
        return output("y", neg)
    """

    name = "fold-cumsums"
    numerics = Numerics.BITWISE

    def rules(self) -> Sequence[Rule]:
        """Sums along a dim, with a dtype or without."""
        return (Rule("cumsum-of-one-number", "aten.cumsum(filled, dim, dtype=dtype)", _as_arange, _reason_against),)


def _reason_against(match: Match) -> str | None:
    if match.is_written(match["filled"]):
        return WRITTEN
    filled, result = match["filled"].meta["val"], match.root.meta["val"]
    value = fill_of(match["filled"])
    if value is None:
        return _NOT_A_NUMBER
    if not all(isinstance(size, int) for size in result.shape):
        return _UNKNOWN_SIZE
    number = _number(value, filled.dtype)
    if number is None:
        return _NOT_WHOLE
    if result.dtype not in (*INTEGERS, *FLOATS) or result.layout != torch.strided:
        return _OTHER_DTYPE
    last = abs(number) * (_length(match.root) + 1)  # the end that arange stops before must be exact too
    return _TOO_LARGE if last > _exact_up_to(result.dtype) else None


def _number(value: bool | int | float, dtype: torch.dtype) -> int | None:
    """The whole number that a tensor filled with `value` holds; None if it is zero (of a sign, perhaps) or no such."""
    if dtype == torch.bool:
        return 1 if value else None
    if not value or not math.isfinite(value) or value != int(value) or not held_exactly(value, dtype):
        return None
    return int(value) if abs(value) <= _exact_up_to(dtype) else None


def _exact_up_to(dtype: torch.dtype) -> int:
    """The largest number up to which the dtype holds every whole one."""
    return int(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max


def _length(cumsum: fx.Node) -> int:
    shape, dim = cumsum.meta["val"].shape, arguments(cumsum)["dim"]
    return shape[dim] if len(shape) else 1


def _as_arange(match: Match) -> fx.Node:
    result, dim = match.root.meta["val"], match["dim"]
    value = fill_of(match["filled"])
    number = _number(value, match["filled"].meta["val"].dtype) if value is not None else None
    assert number is not None  # the check has seen to that
    length = _length(match.root)
    view = [1] * result.dim()
    if view:
        view[dim] = length

    def numbers() -> Any:
        end = number * (length + 1)
        line: Tensor = _aten.arange.start_step(number, end, number, dtype=result.dtype, device=result.device)
        line = line if list(line.shape) == view else line.view(view)
        return line if line.shape == result.shape else line.expand(result.shape).contiguous()

    return match.splice(numbers)
