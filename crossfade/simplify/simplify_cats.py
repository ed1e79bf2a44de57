"""What is cut and joined again, or joined and cut again."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph.operators import arguments
from crossfade.graph.passes import Numerics
from crossfade.graph.private import statically_equal
from crossfade.graph.rewrite import WRITTEN, Match, Rule
from crossfade.graph.rule_pass import RulePass
from crossfade.simplify.blocks import Block, element_of, runs_of
from crossfade.simplify.canonicalize_views import spelled_sizes
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
_COPIED = "its neighbouring inputs cannot be seen in its shape without a copy of their own"
_READ_ELSEWHERE = "its inputs are few or read elsewhere, so that nothing would be saved"


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
        joins = "(aten.cat | aten.stack)"
        split = "(aten.split.Tensor | aten.split_with_sizes | aten.chunk)"
        of_slice, slice_of = "aten.slice.Tensor(_, _, _, _, _)", "aten.slice.Tensor({}, _, _, _, _)"
        return (
            _rule("join-parts", "aten.cat(_, _)", _join, _reason_against_join),
            _rule("slice-of-cat", slice_of.format("aten.cat(_, _)"), _take, _reason_against_part),
            _rule("slice-of-slice", slice_of.format(of_slice), _take, _reason_against_part),
            _rule("slice-of-piece", slice_of.format(f"{split}(_, _, _)[_]"), _take, _reason_against_part),
            _rule("piece-of-cat", f"{split}(aten.cat(_, _), _, _)[_]", _take, _reason_against_part),
            _rule("join-elements", f"{joins}(_, _)", _join_runs, _reason_against_runs),
            _rule("join-moved", "aten.stack(_, _)", _move, _reason_against_moving),
            _rule("join-moved", f"{joins}(_, _)", _move_copied, _reason_against_copying),
            _rule("element-of-join", f"aten.select.int({joins}(_, _), _, _)", _pick, _reason_against_one),
            _rule("unbind-of-join", f"aten.unbind.int({joins}(_, _), _)[_]", _pick, _reason_against_one),
        )


_rule = functools.partial(Rule, other_strides=True)
"""Parts of values lie with gaps between their rows where joins of them had none."""


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


def _reason_against_runs(match: Match) -> str | None:
    found = _runs(match)
    return found if isinstance(found, str) else None


def _runs(match: Match) -> list[Block] | str:
    """The blocks of values that a cat or stack puts side by side again, in whatever shape they come; or why not."""
    join = match.root
    inputs, shape = _inputs(join), join.meta["val"].shape
    if inputs is None:
        return _MIXED
    dim = dim_of(join, len(shape))
    runs = runs_of(join, inputs, dim)
    if runs is None:
        return _NOT_ELEMENTS
    if len(runs) == 1:
        return runs if spelled_sizes(join.meta["val"]) is not None else _UNPROVED
    if not all(isinstance(size, int) for size in shape):
        return _UNPROVED
    sizes = zip(runs, _shapes(runs, shape, dim), strict=True)
    return runs if all(run.is_seen_as(match.program, size) for run, size in sizes if run.taken) else _COPIED


def _shapes(runs: list[Block], shape: Sequence[int], dim: int) -> list[list[int]]:
    """The shape in which each run is joined with the others."""
    inner = math.prod(shape[dim + 1 :])
    before = math.prod(shape[:dim])
    sizes = [run.elements for run in runs]
    return [[*shape[:dim], size // max(1, before * inner), *shape[dim + 1 :]] for size in sizes]


def _join_runs(match: Match) -> fx.Node:
    join, runs = match.root, _runs(match)
    assert not isinstance(runs, str)
    dim = dim_of(join, join.meta["val"].dim())
    if len(runs) == 1:
        return _seen_as(match, runs[0].cut, runs[0].source, spelled_sizes(join.meta["val"]))
    shapes = _shapes(runs, join.meta["val"].shape, dim)

    def joined(values: list[Tensor]) -> Tensor:
        pieces = [
            _viewed(run.cut(value), shape) if run.taken or len(shape) == value.dim() else value.unsqueeze(dim)
            for run, value, shape in zip(runs, values, shapes, strict=True)
        ]
        return _aten.cat.default(pieces, *([dim] if dim else []))

    return match.splice(joined, [run.source for run in runs])


def _viewed(value: Tensor, shape: list[int]) -> Tensor:
    return value if list(value.shape) == shape else value.view(shape)


def _seen_as(match: Match, cut: Callable[[Tensor], Tensor], source: fx.Node, shape: Any) -> fx.Node:
    """A part of a value in another shape, copied where it has to be."""

    def seen(value: Tensor) -> Tensor:
        part = cut(value)
        same = len(part.shape) == len(shape) and all(map(statically_equal, part.shape, match.root.meta["val"].shape))
        return part if same else part.reshape(shape)

    return match.splice(seen, source)


def _moved(match: Match) -> tuple[Block, int] | str:
    """The run of elements that a join puts along another dim than they were taken along, and that dim; or why not."""
    join = match.root
    inputs, rank = _inputs(join), join.meta["val"].dim()
    if inputs is None:
        return _MIXED
    first, *others = [element_of(value) for value in inputs]
    if first is None:
        return _NOT_ELEMENTS
    source, dim, index = first
    if others != [(source, dim, index + step) for step in range(1, len(inputs))]:
        return _NOT_ELEMENTS
    return Block(source, dim, index, index + len(inputs), True), dim_of(join, rank)


def _reason_against_moving(match: Match) -> str | None:
    found = _moved(match)
    return found if isinstance(found, str) else None


def _reason_against_copying(match: Match) -> str | None:
    found = _moved(match)
    if isinstance(found, str):
        return found
    read_elsewhere = any(len(value.users) > 1 for value in _inputs(match.root) or [])
    return _READ_ELSEWHERE if read_elsewhere or len(_inputs(match.root) or []) < 3 else None


def _move(match: Match) -> fx.Node:
    """A view: what was cut along one dim lies along another."""
    block, order = _reordered(match)
    return match.splice(lambda value: _aten.permute.default(block.cut(value), order), block.source)


def _move_copied(match: Match) -> fx.Node:
    """One copy, in the order of the join; a cat has the elements of two dims in one."""
    block, order = _reordered(match)
    shape = match.root.meta["val"].shape

    def copied(value: Tensor) -> Tensor:
        part = _aten.permute.default(block.cut(value), order).clone(memory_format=torch.contiguous_format)
        return part if match.root.target is _aten.stack.default else part.view(shape)

    return match.splice(copied, block.source)


def _reordered(match: Match) -> tuple[Block, list[int]]:
    """What is joined along another dim, and the order of dims that puts it there."""
    found = _moved(match)
    assert not isinstance(found, str)
    block, dim = found
    order = [other for other in range(block.source.meta["val"].dim()) if other != block.dim]
    order.insert(dim, block.dim)
    return block, order


def _reason_against_one(match: Match) -> str | None:
    found = _picked(match.root)
    return found if isinstance(found, str) else None


def _picked(node: fx.Node) -> tuple[fx.Node, int | None, int] | str:
    """The input of a join that an element is (index None), or is an element of; and the dim."""
    element = element_of(node)
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
