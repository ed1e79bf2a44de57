"""Chains of dtype conversions, cut short where the dtype between holds every value that passes through it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from crossfade.graph.operators import arguments
from crossfade.graph.passes import Numerics
from crossfade.graph.rewrite import Match, Rule
from crossfade.graph.rule_pass import RulePass

_aten, _prims = torch.ops.aten, torch.ops.prims

_f8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_f16, _bf16, _f32, _f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
_i8, _i16, _i32, _i64 = torch.int8, torch.int16, torch.int32, torch.int64
_u8, _u16, _u32 = torch.uint8, torch.uint16, torch.uint32

HELD_BY: Mapping[torch.dtype, frozenset[torch.dtype]] = {
    torch.bool: frozenset((_u8, _i8, _u16, _i16, _u32, _i32, _i64, *_f8, _f16, _bf16, _f32, _f64)),
    _u8: frozenset((_u16, _i16, _u32, _i32, _i64, _f16, _bf16, _f32, _f64)),  # 8 bits
    _i8: frozenset((_i16, _i32, _i64, _f16, _bf16, _f32, _f64)),  # 7 bits and a sign
    _u16: frozenset((_u32, _i32, _i64, _f32, _f64)),
    _i16: frozenset((_i32, _i64, _f32, _f64)),
    _u32: frozenset((_i64, _f64)),
    _i32: frozenset((_i64, _f64)),
    torch.float8_e4m3fn: frozenset((_f16, _bf16, _f32, _f64)),  # 4 bits, exponents -9 to 8
    torch.float8_e5m2: frozenset((_f16, _bf16, _f32, _f64)),  # 3 bits, exponents -16 to 15
    _f16: frozenset((_f32, _f64)),  # 11 bits, exponents -24 to 15
    _bf16: frozenset((_f32, _f64)),  # 8 bits, exponents -133 to 127
    _f32: frozenset((_f64,)),  # 24 bits, exponents -149 to 127
    torch.complex64: frozenset((torch.complex128,)),
}
"""For each dtype, the other dtypes that hold every value of it exactly, -0.0 and infinities included.

A float holds an integer of no more bits than its mantissa has (`f16` 11, `bf16` 8, `f32` 24, `f64` 53), and a float of
no more bits and no wider exponents. NaNs stay NaNs; their payload is no value.
"""


TO = (
    "(aten.to.dtype | aten.to.other)(x, _, _, _, _)",
    "aten.to.device(x, _, _, _, _, _)",
    "aten.to.dtype_layout(x, dtype=_, layout=_, device=_, pin_memory=_, non_blocking=_, copy=_, memory_format=_)",
    "aten.type_as(x, _)",
)
"""The ways to spell a conversion that may return its input, as patterns."""


@dataclass(frozen=True)
class CollapseConversions(RulePass):
    """Convert once, or not at all, where a value goes through a dtype that holds it exactly: bf16 → f32 → bf16.

    `to` is spelled `_to_copy` where it does copy. Through a narrower dtype, nothing is changed: that rounds.

    Also known as: Inductor's `pointless_convert`; XLA's `simplify-fp-conversions`.

    Before:
        x: bf16[4] = input("x")
        _to_copy: f32[4] = aten._to_copy(x, dtype=f32)
        back: bf16[4] = aten._to_copy(_to_copy, dtype=bf16)
        wider: f64[4] = aten._to_copy(_to_copy, dtype=f64)
        neg: bf16[4] = aten.neg(back)
        return output("neg", neg), output("wider", wider)

    After:
        x: bf16[4] = input("x")
        _to_copy_1: f64[4] = aten._to_copy(x, dtype=f64)
        neg: bf16[4] = aten.neg(x)
        return output("neg", neg), output("wider", _to_copy_1)
    """

    name = "collapse-conversions"
    numerics = Numerics.BITWISE

    def rules(self) -> Sequence[Rule]:
        """One spelling, then the way there and back, then the way through."""
        return _RULES


def reason_to_convert_twice(before: torch.dtype, between: torch.dtype, after: torch.dtype) -> str | None:
    """Why two conversions are not provably one, if they are not: the second may see other values than the first did.

    >>> reason_to_convert_twice(torch.bfloat16, torch.float32, torch.bfloat16)
    >>> reason_to_convert_twice(torch.float32, torch.bfloat16, torch.float32)
    'the dtype between does not hold every value'
    """
    if not _holds(between, before):
        return "the dtype between does not hold every value"
    if before.is_complex != after.is_complex:
        return "it goes between real and complex numbers"
    if _is_integer(after) and not (_is_integer(between) or _holds(after, before)):
        return "what an integer cannot hold depends on the dtype before it"
    return None


def _holds(dtype: torch.dtype, values_of: torch.dtype) -> bool:
    return dtype is values_of or dtype in HELD_BY.get(values_of, ())


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def _chain(match: Match) -> tuple[fx.Node, fx.Node, fx.Node]:
    """What is converted, what lies between, and the end."""
    return match["x"], match.root.all_input_nodes[0], match.root


def _reason_against_none(match: Match) -> str | None:
    before, _, after = (node.meta["val"].dtype for node in _chain(match))
    return "it ends in another dtype" if before is not after else _reason_against_chain(match)


def _reason_against_one(match: Match) -> str | None:
    if len({node.meta["val"].device for node in _chain(match)}) > 1:
        return "it goes to another device"
    return _reason_against_chain(match)


def _reason_against_chain(match: Match) -> str | None:
    reason = reason_to_convert_twice(*(node.meta["val"].dtype for node in _chain(match)))
    return reason or next(filter(None, map(_reason_against_copy, _chain(match)[1:])), None)


def _reason_against_copy(node: fx.Node) -> str | None:
    """Why a conversion is more than new numbers in new memory."""
    if node.meta["val"].layout is not torch.strided or node.all_input_nodes[0].meta["val"].layout is not torch.strided:
        return "it is not strided"
    return "it pins its memory" if arguments(node).get("pin_memory") else None


def _convert_once(match: Match) -> Any:
    dtype = match.root.meta["val"].dtype
    if match.root.target is _prims.convert_element_type.default:
        return match.splice(_prims.convert_element_type.default, match["x"], dtype)
    named = {"dtype": dtype}
    for node in _chain(match)[1:]:  # the later word on the memory format counts
        if (memory_format := arguments(node).get("memory_format")) not in (None, torch.preserve_format):
            named["memory_format"] = memory_format
    return match.splice(lambda x: _aten._to_copy.default(x, **named), match["x"])


def _reason_against_copy_of_to(match: Match) -> str | None:
    given, source, result = arguments(match.root), match["x"].meta["val"], match.root.meta["val"]
    if not given.get("copy") and source.dtype is result.dtype and source.device == result.device:
        return "it may be its input itself"
    return _reason_against_copy(match.root)


def _copy_of_to(match: Match) -> Any:
    given, source, result = arguments(match.root), match["x"].meta["val"], match.root.meta["val"]
    named: dict[str, Any] = {"dtype": result.dtype}
    if source.device != result.device:
        named["device"] = result.device
    named |= {name: given[name] for name in ("non_blocking", "memory_format") if given.get(name)}
    return match.splice(lambda x: _aten._to_copy.default(x, **named), match["x"])


_CONVERSIONS = (
    "aten._to_copy({0}, dtype=_, layout=_, device=_, pin_memory=_, non_blocking=_, memory_format=_)",
    "prims.convert_element_type({0}, _)",
)


def _rules() -> Iterator[Rule]:
    for pattern in TO:
        yield Rule("copying-to", pattern, _copy_of_to, _reason_against_copy_of_to)
    chains = [outer.format(inner.format("x")) for outer in _CONVERSIONS for inner in _CONVERSIONS]
    for pattern in chains:
        yield Rule("there-and-back", pattern, lambda match: match["x"], _reason_against_none)
    for pattern in chains:
        yield Rule("one-conversion", pattern, _convert_once, _reason_against_one)


_RULES = tuple(_rules())
