"""What is cut and joined again, or joined and cut again."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph.operators import arguments
from crossfade.graph.passes import Numerics
from crossfade.graph.private import statically_equal
from crossfade.graph.rewrite import WRITTEN, Match, Rule
from crossfade.graph.rule_pass import RulePass
from crossfade.simplify.parts import SPLITS, Part, as_part, dim_of, part_inside, size_along

_aten = torch.ops.aten

_MOST_INPUTS = 128
"""How many inputs a cat may have after its inner ones are opened: torch's CUDA kernel takes no more at once."""

_MIXED = "its inputs are of several dtypes or numbers of dims"
_NOTHING_TO_JOIN = "its inputs are neither adjoining parts of one value nor cats along its dim"
_USED_ELSEWHERE = "a cat among its inputs has other users, so that nothing would be saved"
_TOO_MANY = "it would have too many inputs"
_UNPROVED = "its bounds are not provably where they would have to be"
_OTHER_DIM = "it takes along another dim, or with steps"
_SEVERAL = "it does not lie inside one input"
_NOT_ELEMENTS = "its inputs are not neighbouring elements of one value"


@dataclass(frozen=True)
class SimplifyCats(RulePass):
    """Take values where they are, instead of cutting and joining copies of them.

    Parts joined in their order are what they were cut from, or one slice of it; parts of a joined value are the inputs
    that were joined, or slices of them; nested cats and slices are one each; `stack` and `unbind` likewise.

    Also known as: Inductor's `cat_slice_cat`, `splitwithsizes_cat_replace` and `cat_splitwithsizes_replace`; part of
    XLA's algebraic simplifier.

    Before:
        x: f32[6, 2] = input("x")
        y: f32[3, 2] = input("y")
        split: (f32[2, 2], f32[2, 2], f32[2, 2]) = aten.split.Tensor(x, 2)
        a: f32[2, 2] = split[0]
        b: f32[2, 2] = split[1]
        c: f32[2, 2] = split[2]
        x_1: f32[6, 2] = aten.cat([a, b, c])
        xy: f32[9, 2] = aten.cat([x_1, y])
        exp: f32[9, 2] = aten.exp(xy)
        y_1: f32[3, 2] = aten.slice.Tensor(xy, 0, 6, 9)
        neg: f32[3, 2] = aten.neg(y_1)
        return output("exp", exp), output("neg", neg)

    After:
        x: f32[6, 2] = input("x")
        y: f32[3, 2] = input("y")
        xy: f32[9, 2] = aten.cat([x, y])
        exp: f32[9, 2] = aten.exp(xy)
        neg: f32[3, 2] = aten.neg(y)
        return output("exp", exp), output("neg", neg)
    """

    name = "simplify-cats"
    numerics = Numerics.BITWISE

    def rules(self) -> Sequence[Rule]:
        """Joins of parts and of elements, parts and elements of joins, parts of parts."""
        split = "(aten.split.Tensor | aten.split_with_sizes | aten.chunk)"
        of_slice, slice_of = "aten.slice.Tensor(_, _, _, _, _)", "aten.slice.Tensor({}, _, _, _, _)"
        return (
            Rule("join-parts", "aten.cat(_, _)", _join, _reason_against_join),
            Rule("slice-of-cat", slice_of.format("aten.cat(_, _)"), _take, _reason_against_part),
            Rule("slice-of-slice", slice_of.format(of_slice), _take, _reason_against_part),
            Rule("slice-of-piece", slice_of.format(f"{split}(_, _, _)[_]"), _take, _reason_against_part),
            Rule("piece-of-cat", f"{split}(aten.cat(_, _), _, _)[_]", _take, _reason_against_part),
            Rule("join-elements", "aten.stack(_, _)", _unstack, _reason_against_elements),
            Rule("element-of-join", "aten.select.int((aten.cat | aten.stack)(_, _), _, _)", _pick, _reason_against_one),
            Rule("unbind-of-join", "aten.unbind.int((aten.cat | aten.stack)(_, _), _)[_]", _pick, _reason_against_one),
        )


# -------------------------------------------------------------------------------------------------------------- cats


def _inputs(join: fx.Node) -> list[fx.Node] | None:
    """The inputs of a cat or stack of one dtype; None if it converts some or leaves out empty ones of other ranks."""
    values, result = list(arguments(join)["tensors"]), join.meta["val"]
    rank = result.dim() - (join.target is _aten.stack.default)
    plain = all(value.meta["val"].dim() == rank and value.meta["val"].dtype == result.dtype for value in values)
    return values if plain else None


def _joined(cat: fx.Node) -> list[Part] | str:
    """The fewer parts that a cat can be made of, or why it stays."""
    inputs, dim = _inputs(cat), dim_of(cat, cat.meta["val"].dim())
    if inputs is None:
        return _MIXED
    parts = [as_part(value, dim) or part_inside(value, 0, size_along(value, dim), dim) for value in inputs]
    joined: list[Part] | str = _merged(parts, dim)
    if len(joined) == len(inputs) > 1:
        joined = _opened(cat, parts, dim)
    if isinstance(joined, str):
        return joined
    return joined if all(part.is_expressible(dim) for part in joined) else _UNPROVED


def _merged(parts: list[Part], dim: int) -> list[Part]:
    """The parts with neighbours in one value made one."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        if last and last.source is part.source and last.proved and statically_equal(last.stop, part.start):
            merged[-1] = part_inside(part.source, last.start, part.stop, dim)
        else:
            merged.append(part)
    return merged


def _opened(cat: fx.Node, parts: list[Part], dim: int) -> list[Part] | str:
    """The parts with those of inner cats replaced by what the inner cats join; nothing else may use these."""
    inner = {part.source for part in parts if _is_cat(part.source, dim)}
    if not inner:
        return _NOTHING_TO_JOIN
    taken = {part.node for part in parts}
    mine = {source for source in inner if all(_ends_in(user, cat, taken) for user in source.users)}
    if not mine:
        return _USED_ELSEWHERE
    opened: list[Part] = []
    for part in parts:
        cut = _cut(part, dim) if part.source in mine else [part]
        if cut is None:
            return _UNPROVED
        opened += cut
        if len(opened) > _MOST_INPUTS:
            return _TOO_MANY
    return _merged(opened, dim)


def _ends_in(user: fx.Node, cat: fx.Node, taken: set[fx.Node | None]) -> bool:
    """Whether what a user makes of an inner cat reaches nothing but the outer one, as parts that it takes."""
    if user in taken:
        return all(reader is cat for reader in user.users)
    return user is cat or (user.target in SPLITS and all(_ends_in(piece, cat, taken) for piece in user.users))


def _is_cat(node: fx.Node, dim: int) -> bool:
    return (
        node.target is _aten.cat.default and dim_of(node, node.meta["val"].dim()) == dim and _inputs(node) is not None
    )


def _cut(part: Part, dim: int) -> list[Part] | None:
    """The parts of a cat's inputs that make a part of the cat; None if it is not known where they begin and end."""
    inputs = _inputs(part.source) or []
    bounds = list(itertools.accumulate((size_along(value, dim) for value in inputs), initial=0))
    if all(isinstance(bound, int) for bound in (*bounds, part.start, part.stop)):
        return [
            part_inside(value, max(part.start, low) - low, min(part.stop, high) - low, dim)
            for value, low, high in zip(inputs, bounds, bounds[1:], strict=False)
            if max(part.start, low) < min(part.stop, high)
        ]
    first = next((i for i, bound in enumerate(bounds) if statically_equal(bound, part.start)), None)
    last = next((i for i, bound in enumerate(bounds) if statically_equal(bound, part.stop)), None)
    if first is None or last is None or first >= last:
        return None
    return [part_inside(value, 0, size_along(value, dim), dim) for value in inputs[first:last]]


def _reason_against_join(match: Match) -> str | None:
    found = _joined(match.root)
    if isinstance(found, str):
        return found
    # an input that is read again here is near, but a cat inside read it before what is written in between
    return WRITTEN if match.is_written(*(part.source for part in found)) else None


def _join(match: Match) -> fx.Node:
    dim, parts = dim_of(match.root, match.root.meta["val"].dim()), _joined(match.root)
    assert not isinstance(parts, str)
    if len(parts) == 1:
        return _made(match, parts[0], dim)
    bounds = [None if part.node is not None else part.bounds() for part in parts]

    def joined(values: list[Tensor]) -> Tensor:
        pairs = zip(values, bounds, strict=True)
        return _aten.cat.default([_sliced(value, dim, cut) if cut else value for value, cut in pairs], *at)

    at = [dim] if dim else []
    return match.splice(joined, [part.node if part.node is not None else part.source for part in parts])


def _made(match: Match, part: Part, dim: int) -> fx.Node:
    if part.node is not None:
        return part.node
    return match.splice(lambda source: _sliced(source, dim, part.bounds()), part.source)


def _sliced(value: Tensor, dim: int, bounds: tuple[Any, Any]) -> Tensor:
    return _aten.slice.Tensor(value, dim, *bounds)


# ---------------------------------------------------------------------------------------------------- parts of values


def _resolved(node: fx.Node) -> tuple[Part, int] | str:
    """The part of a cat's input, or of what a part was cut from, that a slice or piece is, and its dim; or why not."""
    cutter = node if node.target is _aten.slice.Tensor else node.args[0]
    assert isinstance(cutter, fx.Node)
    dim = dim_of(cutter, arguments(cutter)["self"].meta["val"].dim())
    outer = as_part(node, dim)
    if outer is None:
        return _OTHER_DIM
    found: Part | str = _of_cat(outer, dim) if outer.source.target is _aten.cat.default else _of_part(outer, dim)
    if isinstance(found, str):
        return found
    return (found, dim) if found.is_expressible(dim) else _UNPROVED


def _of_cat(outer: Part, dim: int) -> Part | str:
    if _inputs(outer.source) is None:
        return _MIXED
    if not _is_cat(outer.source, dim):
        return _OTHER_DIM
    cut = _cut(outer, dim)
    if cut is None:
        return _UNPROVED
    return cut[0] if len(cut) == 1 else _SEVERAL


def _of_part(outer: Part, dim: int) -> Part | str:
    inner = as_part(outer.source, dim)
    if inner is None:
        return _OTHER_DIM
    if not (inner.proved and outer.proved):
        return _UNPROVED
    return part_inside(inner.source, inner.start + outer.start, inner.start + outer.stop, dim)


def _reason_against_part(match: Match) -> str | None:
    found = _resolved(match.root)
    return found if isinstance(found, str) else None


def _take(match: Match) -> fx.Node:
    found = _resolved(match.root)
    assert not isinstance(found, str)
    return _made(match, *found)


# ----------------------------------------------------------------------------------------------------------- elements


def _element(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """What a `select` or an element of an `unbind` is of, along which dim and which one; None if it is neither."""
    taker = node.args[0] if node.target is operator.getitem else node
    if not isinstance(taker, fx.Node) or taker.target not in (_aten.unbind.int, _aten.select.int):
        return None
    source = arguments(taker)["self"]
    dim = dim_of(taker, source.meta["val"].dim())
    index = node.args[1] if node.target is operator.getitem else arguments(taker)["index"]
    size = size_along(source, dim)
    if not isinstance(index, int) or (index < 0 and not isinstance(size, int)):
        return None
    if isinstance(size, int) and not -size <= index < size:  # fails when it runs, and shall go on failing
        return None
    return source, dim, index + size if index < 0 else index


def _stacked(stack: fx.Node) -> tuple[Part, int] | str:
    """The part whose elements a stack puts side by side, and its dim; or why not."""
    inputs, dim = _inputs(stack), dim_of(stack, stack.meta["val"].dim())
    if inputs is None:
        return _MIXED
    first, *others = [_element(value) for value in inputs]
    if first is None or first[1] != dim:
        return _NOT_ELEMENTS
    source, _, index = first
    if others != [(source, dim, index + step) for step in range(1, len(inputs))]:
        return _NOT_ELEMENTS
    return part_inside(source, index, index + len(inputs), dim), dim


def _reason_against_elements(match: Match) -> str | None:
    found = _stacked(match.root)
    return found if isinstance(found, str) else None


def _unstack(match: Match) -> fx.Node:
    found = _stacked(match.root)
    assert not isinstance(found, str)
    return _made(match, *found)


def _reason_against_one(match: Match) -> str | None:
    found = _picked(match.root)
    return found if isinstance(found, str) else None


def _picked(node: fx.Node) -> tuple[fx.Node, int | None, int] | str:
    """The input of a join that an element is (index None), or is an element of; and the dim."""
    element = _element(node)
    if element is None:
        return _UNPROVED
    join, dim, index = element
    inputs = _inputs(join)
    if inputs is None:
        return _MIXED
    if dim_of(join, join.meta["val"].dim()) != dim:
        return _OTHER_DIM
    if join.target is _aten.stack.default:
        return inputs[index], None, dim
    cut = _cut(Part(join, index, index + 1, None), dim)
    if not cut or not isinstance(cut[0].start, int):
        return _UNPROVED
    return cut[0].source, cut[0].start, dim


def _pick(match: Match) -> fx.Node:
    found = _picked(match.root)
    assert not isinstance(found, str)
    source, index, dim = found
    return source if index is None else match.splice(lambda value: _aten.select.int(value, dim, index), source)
