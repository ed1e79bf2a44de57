"""Chains of views and of copies, each replaced by one or none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from crossfade.graph.operators import arguments, permutation_of
from crossfade.graph.passes import Numerics
from crossfade.graph.private import statically_equal
from crossfade.graph.rewrite import Match, Rule
from crossfade.graph.rule_pass import RulePass
from crossfade.graph.splice import insert_call
from crossfade.simplify.canonicalize_views import REORDERINGS, is_view, spelled_sizes

_aten = torch.ops.aten


@dataclass(frozen=True)
class CollapseViews(RulePass):
    """See a value at once in the shape, the order of dims or the layout that it took several steps to.

    Each rule makes a chain one step shorter, or leads back to where it began. What lies in between stays if something
    else reads it.

    Also known as: Inductor's `pointless_view_pair` and `pointless_permute_pair`; XLA's algebraic simplifier (reshape of
    reshape, transpose of transpose).

    Before:
        x: f32[4, 6] = input("x")
        view: f32[4, 2, 3] = aten.view(x, [4, 2, 3])
        view_1: f32[8, 3] = aten.view(view, [8, 3])
        t: f32[3, 8] = aten.t(view_1)
        permute: f32[8, 3] = aten.permute(t, [1, 0])
        neg: f32[8, 3] = aten.neg(permute)
        return output("y", neg)

    After:
        x: f32[4, 6] = input("x")
        view_2: f32[8, 3] = aten.view(x, [8, 3])
        neg: f32[8, 3] = aten.neg(view_2)
        return output("y", neg)
    """

    name = "collapse-views"
    numerics = Numerics.BITWISE

    def rules(self) -> Sequence[Rule]:
        """Shapes, orders of dims, expansions, copies."""
        return _RULES


def _between(match: Match) -> fx.Node:
    return match.root.all_input_nodes[0]


# ------------------------------------------------------------------------------------------------------------ shapes

_SIZED = "(aten.view | aten._unsafe_view | aten.reshape)({0}, _)"
_SHAPES = (
    _SIZED,
    "(aten.flatten.using_ints | aten.unflatten.int)({0}, _, _)",
    "(aten.squeeze.dim | aten.squeeze.dims | aten.unsqueeze)({0}, _)",
    "aten.squeeze({0})",
)
"""Ops that keep the elements in their order and only change the shape."""

_MAY_COPY = (_aten.reshape.default, _aten.flatten.using_ints)


def _reason_against_round_trip(match: Match) -> str | None:
    same = statically_equal(match["x"].meta["val"].shape, match.root.meta["val"].shape)
    return None if same else "it ends in another shape"


def _reason_against_one_shape(match: Match) -> str | None:
    if not is_view(match["x"].meta["val"], _between(match).meta["val"].shape):
        return "the first is not provably free of a copy"
    return _reason_against_sizes(match)


def _reason_against_order(match: Match) -> str | None:
    """Dims of one element may stand anywhere: all others must have kept their order."""
    shape = match["x"].meta["val"].shape
    kept = [dim for dim in permutation_of(_between(match)) if not statically_equal(shape[dim], 1)]
    return _reason_against_sizes(match) if kept == sorted(kept) else "the first moves dims of several elements"


def _reason_against_sizes(match: Match) -> str | None:
    if match.root.target not in _MAY_COPY and not is_view(match["x"].meta["val"], match.root.meta["val"].shape):
        return "it is not provably free of a copy"
    return "several of its sizes are symbolic" if _sizes(match) is None else None


def _sizes(match: Match) -> Any:
    given = arguments(match.root)
    return given.get("size", given.get("shape", spelled_sizes(match.root.meta["val"])))


def _shape_once(match: Match) -> Any:
    x, shape = match["x"], match.root.meta["val"].shape
    if is_view(x.meta["val"], shape):
        return match.splice(_aten.view.default, x, _sizes(match))
    target = _aten.reshape.default
    return insert_call(match.program, target, x, _sizes(match), before=match.root, like=match.root)


# ------------------------------------------------------------------------------------------------------ other chains


def _order_once(match: Match) -> Any:
    first = permutation_of(_between(match))
    order = [first[dim] for dim in permutation_of(match.root)]
    if order == sorted(order):
        return match["x"]
    return match.splice(_aten.permute.default, match["x"], order)


def _expand_once(match: Match) -> Any:
    """-1 keeps a size of what lies between: then that one's word on it counts."""
    first, sizes = match["first"], list(match["sizes"])
    added = len(sizes) - len(first)
    sizes = [first[dim - added] if size == -1 else size for dim, size in enumerate(sizes)]
    return match.splice(_aten.expand.default, match["x"], sizes)


def _reason_against_one_copy(match: Match) -> str | None:
    old, new = _between(match).meta["val"], match.root.meta["val"]
    is_same = match.root.target is _aten.contiguous.default and statically_equal(old.stride(), new.stride())
    return "the second copies nothing" if is_same else None


def _copy_once(match: Match) -> Any:
    named = {}
    for node in (_between(match), match.root):  # the later word on the memory format counts
        if (memory_format := arguments(node)["memory_format"]) not in (None, torch.preserve_format):
            named["memory_format"] = memory_format
    return match.splice(lambda x: _aten.clone.default(x, **named), match["x"])


def _rules() -> Iterator[Rule]:
    shapes = [(outer, inner.format("x")) for outer in _SHAPES for inner in _SHAPES]
    for outer, inner in shapes:
        yield Rule("same-shape-again", outer.format(inner), lambda match: match["x"], _reason_against_round_trip)
    for outer, inner in shapes:
        yield Rule("one-shape", outer.format(inner), _shape_once, _reason_against_one_shape)
    for outer in _SHAPES:
        for inner in REORDERINGS:
            yield Rule("shape-of-moved-ones", outer.format(inner.format("x")), _shape_once, _reason_against_order)
    for outer in REORDERINGS:
        for inner in REORDERINGS:
            yield Rule("one-permute", outer.format(inner.format("x")), _order_once)
    yield Rule("one-expand", "aten.expand(aten.expand(x, first, implicit=_), sizes, implicit=_)", _expand_once)
    clone, contiguous = "aten.clone({0}, memory_format=_)", "aten.contiguous({0}, memory_format=_)"
    for outer, inner in ((clone, clone), (clone, contiguous), (contiguous, clone)):
        yield Rule("one-copy", outer.format(inner.format("x")), _copy_once, _reason_against_one_copy)


_RULES = tuple(_rules())
