"""Operators that return what they are given."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph.operators import arguments, permutation_of
from crossfade.graph.passes import Numerics
from crossfade.graph.private import statically_equal
from crossfade.graph.rewrite import WRITTEN, Match, Rule
from crossfade.graph.rule_pass import RulePass
from crossfade.simplify.canonicalize_views import REORDERINGS
from crossfade.simplify.collapse_conversions import TO
from crossfade.simplify.filled import fill_of

_aten = torch.ops.aten


@dataclass(frozen=True)
class RemoveNoops(RulePass):
    """Let users of an operator that changes nothing read its input: whole slices, conversions to the same, copies.

    Never where it would be seen: a copy before a write stays, and so does one that is a result of the program. `alias`
    and `detach` are `remove-aliases`'s.

    Also known as: Inductor's `remove_noop_ops`; part of XLA's algebraic simplifier.

    Before:
        x: bf16[4, 6] = input("x")
        slice_1: bf16[4, 6] = aten.slice.Tensor(x, 0, 0, 9223372036854775807)
        expand: bf16[4, 6] = aten.expand(slice_1, [4, 6])
        _to_copy: bf16[4, 6] = aten._to_copy(expand, dtype=bf16)
        mul: bf16[4, 6] = aten.mul.Tensor(_to_copy, 1.0)
        cat: bf16[4, 6] = aten.cat([mul])
        neg: bf16[4, 6] = aten.neg(cat)
        return output("y", neg)

    After:
        x: bf16[4, 6] = input("x")
        neg: bf16[4, 6] = aten.neg(x)
        return output("y", neg)
    """

    name = "remove-noops"
    numerics = Numerics.BITWISE

    def rules(self) -> Sequence[Rule]:
        """Views, then copies, then arithmetic."""
        return _RULES


def _value(match: Match, name: str = "x") -> Tensor:
    return match[name].meta["val"]


# ------------------------------------------------------------------------------------------------------------- views


def _reason_against_shape(match: Match) -> str | None:
    """For ops whose result in the input's shape can only be the input: they keep the order of elements."""
    same = statically_equal(_value(match).shape, match.root.meta["val"].shape)
    return None if same else "it changes the shape"


def _reason_against_order(match: Match) -> str | None:
    """Dims of one element may change places: nothing else moves."""
    shape = _value(match).shape
    kept = [dim for dim in permutation_of(match.root) if not statically_equal(shape[dim], 1)]
    return "it moves dims of several elements" if kept != sorted(kept) else _reason_against_shape(match)


def _reason_against_part(match: Match) -> str | None:
    """For a `slice_scatter` of `x` over something."""
    given = arguments(match.root)
    start, end, step = (_number(given[name]) for name in ("start", "end", "step"))
    size = match.root.meta["val"].shape[given["dim"]]
    from_first = start is None or statically_equal(start, 0)
    if not (from_first and _reaches(end, size) and statically_equal(step, 1)):
        return "it does not provably write everything"
    return _reason_against_shape(match)


def _number(value: Any) -> Any:
    return value.meta["val"] if isinstance(value, fx.Node) else value


def _reaches(end: Any, size: Any) -> bool:
    if end is None or (isinstance(end, int) and end == _NO_END):
        return True
    if isinstance(end, int) and isinstance(size, int):
        return end >= size
    return statically_equal(end, size)


_NO_END = 2**63 - 1
"""How torch spells an end left out."""


def _reason_against_padding(match: Match) -> str | None:
    is_none = all(statically_equal(_number(width), 0) for width in match["pad"])
    return None if is_none else "it pads"


def _only_filled(match: Match) -> Any:
    """The one input of a `cat` that has elements, or may; None if there are several."""
    tensors = list(match["tensors"])
    filled = [tensor for tensor in tensors if not any(statically_equal(size, 0) for size in tensor.meta["val"].shape)]
    return (filled or tensors)[0] if len(filled) < 2 else None


def _reason_against_joining(match: Match) -> str | None:
    if (filled := _only_filled(match)) is None:
        return "it joins several inputs"
    same = statically_equal(filled.meta["val"].shape, match.root.meta["val"].shape)
    return None if same else "it changes the shape"


# ------------------------------------------------------------------------------------------------------------ copies


def _reason_against_to(match: Match) -> str | None:
    """A `to` that must copy has memory of its own, though its operator does not say so."""
    given = arguments(match.root)
    if given.get("copy"):
        return "it must be a copy"
    if given.get("memory_format") not in (None, torch.preserve_format):
        return "it asks for a memory format"
    return _reason_against_conversion(match)


def _reason_against_conversion(match: Match) -> str | None:
    source, result = _value(match), match.root.meta["val"]
    if source.dtype is not result.dtype or source.device != result.device or source.layout is not result.layout:
        return "it changes dtype, device or layout"
    return "it pins its memory" if arguments(match.root).get("pin_memory") else None


def _reason_against_dropout(match: Match) -> str | None:
    if not match.root.users:
        return "nothing reads it"
    return None if match["p"] == 0 or match["train"] is False else "it drops values"


# -------------------------------------------------------------------------------------------------------- arithmetic


def _reason_against_fractions(match: Match) -> str | None:
    dtype = _value(match).dtype
    return "it rounds fractions" if dtype.is_floating_point or dtype.is_complex else None


def _reason_against_product(match: Match) -> str | None:
    return "a complex product can turn an infinity into a NaN" if _value(match).dtype.is_complex else None


def _reason_against_sum(match: Match) -> str | None:
    return _reason_against_zero(match, arguments(match.root)["other"])


def _reason_against_zero(match: Match, zero: float) -> str | None:
    """-0.0 + 0.0 is 0.0, and so is -0.0 - -0.0."""
    target = match.root.target
    neutral = 1 if target in (_aten.sub.Tensor, _aten.sub.Scalar) else -1
    if _value(match).dtype.is_floating_point and math.copysign(1, zero) != neutral:
        return "it turns -0.0 into 0.0"
    return "a complex sum has two zeros" if _value(match).dtype.is_complex else None


_NOT_NEUTRAL = "its other operand is not filled with the number that changes nothing"


def _reason_against_filled_product(match: Match) -> str | None:
    """For a product with a tensor of ones, or a division by one."""
    if not (isinstance(match["other"], fx.Node) and fill_of(match["other"]) == 1):
        return _NOT_NEUTRAL
    return WRITTEN if match.is_written(match["other"]) else _reason_against_product(match)


def _reason_against_filled_sum(match: Match) -> str | None:
    """For a sum with a tensor of zeros, or a difference."""
    zero = fill_of(match["other"]) if isinstance(match["other"], fx.Node) else None
    if zero is None or zero != 0:
        return _NOT_NEUTRAL
    zero = zero if match["other"].meta["val"].dtype.is_floating_point else 0
    return WRITTEN if match.is_written(match["other"]) else _reason_against_zero(match, zero)


# ------------------------------------------------------------------------------------------------------------- rules

_TO_COPY = "aten._to_copy(x, dtype=_, layout=_, device=_, pin_memory=_, non_blocking=_, memory_format=_)"


def _view_rules() -> Iterator[Rule]:
    for name, pattern in (
        ("slice", "aten.slice.Tensor(x, _, _, _, _)"),
        ("slice", "aten.narrow(x, _, _, _)"),
        ("split", "(aten.split.Tensor | aten.split_with_sizes | aten.chunk)(x, _, _)[_]"),
        ("repeat", "(aten.repeat | aten.tile)(x, _)"),
        ("expand", "aten.expand(x, _, implicit=_)"),
        ("expand", "(aten.expand_as | aten.broadcast_to)(x, _)"),
        ("view", "(aten.view | aten._unsafe_view | aten.reshape | aten.view_as | aten.reshape_as)(x, _)"),
        ("view", "aten._reshape_alias(x, _, _)"),
        ("view", "(aten.flatten.using_ints | aten.unflatten.int)(x, _, _)"),
        ("squeeze", "(aten.squeeze.dim | aten.squeeze.dims)(x, _)"),
        ("squeeze", "aten.squeeze(x)"),
    ):
        yield Rule(name, pattern, _input, _reason_against_shape)
    for pattern in REORDERINGS:
        yield Rule("permute", pattern.format("x"), _input, _reason_against_order)
    yield Rule("view-dtype", "aten.view.dtype(x, _)", _input, _reason_against_conversion)


def _copy_rules() -> Iterator[Rule]:
    yield Rule("slice-scatter", "aten.slice_scatter(_, x, _, _, _, _)", _input, _reason_against_part)
    yield Rule("pad", "aten.constant_pad_nd(x, pad, _)", _input, _reason_against_padding)
    yield Rule("cat", "aten.cat(tensors, _)", _only_filled, _reason_against_joining)
    yield Rule("clone", "aten.clone(x, memory_format=_)", _input)
    yield Rule("contiguous", "aten.contiguous(x, memory_format=_)", _input)
    yield Rule("lift", "(aten.lift_fresh | aten.lift_fresh_copy)(x)", _input)
    yield Rule("copy", "aten.copy(_, x, _)", _input)
    for pattern in TO:
        yield Rule("conversion", pattern, _input, _reason_against_to)
    for pattern in (_TO_COPY, "prims.convert_element_type(x, _)", "prims.device_put(x, _, _)"):
        yield Rule("conversion", pattern, _input, _reason_against_conversion)
    yield Rule("wait", "c10d.wait_tensor(c10d.wait_tensor(_))", lambda match: match.root.args[0])
    yield Rule("dropout", "aten.dropout(x, p, train)", _input, _reason_against_dropout)


def _arithmetic_rules() -> Iterator[Rule]:
    """Exact whatever the numbers; NaNs stay NaNs. Results of another dtype are left, as everywhere."""
    rounding = "(aten.floor | aten.ceil | aten.round | aten.trunc)(x)"
    yield Rule("round-integers", rounding, _input, _reason_against_fractions)
    for one in ("1", "1.0"):
        yield Rule("power-of-one", f"aten.pow.Tensor_Scalar(x, {one})", _input)
        product = f"(aten.mul.Tensor | aten.mul.Scalar | aten.div.Tensor | aten.div.Scalar)(x, {one})"
        yield Rule("times-one", product, _input, _reason_against_product)
    for zero in ("0", "0.0"):  # a pattern's 0.0 is also -0.0
        total = f"(aten.add.Tensor | aten.add.Scalar | aten.sub.Tensor | aten.sub.Scalar)(x, {zero})"
        yield Rule("plus-zero", total, _input, _reason_against_sum)
    for filled in ("aten.mul.Tensor(x, other)", "aten.mul.Tensor(other, x)", "aten.div.Tensor(x, other)"):
        yield Rule("times-ones", filled, _input, _reason_against_filled_product)
    for filled in ("aten.add.Tensor(x, other)", "aten.add.Tensor(other, x)", "aten.sub.Tensor(x, other)"):
        yield Rule("plus-zeros", filled, _input, _reason_against_filled_sum)
    yield Rule("where", "aten.where.self(_, x, x)", _input)


def _input(match: Match) -> Any:
    return match["x"]


_RULES = (*_view_rules(), *_copy_rules(), *_arithmetic_rules())
