"""Sharding rules of views, lists and indexing: where a split dim goes, and which size arguments become local."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph.private import statically_equal
from crossfade.shard.tensor.factors import Decision, Factors
from crossfade.shard.tensor.placements import REPLICATE, Placement, Shard, block_sizes, in_blocks, local_size, reshaped
from crossfade.shard.tensor.rules import PlacedCall, rule

aten = torch.ops.aten

_FIRST = frozenset({0})


def _through(call: PlacedCall, dims: dict[int, int], why: str = "it needs that dim whole") -> Decision:
    """A view that moves the first operand's dims; partial sums pass."""
    placement = call.placements[0]
    if not isinstance(placement, Shard):
        return Decision(call.placements, (placement,) * len(call.results))
    if placement.dim not in dims:
        return call.replicated(why)
    return Decision(call.placements, (placement.on(dims[placement.dim]),) * len(call.results))


@rule("view", "reshape", "_unsafe_view", "flatten", "ravel", "unsqueeze")
def reshape(call: PlacedCall) -> Decision:
    """Whatever keeps the elements' order; refused where a rank's part would not be one of the result's dims."""
    if "dtype" in call.args:
        return call.replicated("it reinterprets the bytes")
    after = _reshaped(call)
    named = [name for name in ("size", "shape") if name in call.args]
    return _viewed(call, after, divide=tuple((name, after.dim) for name in named if isinstance(after, Shard)))


@rule("view_as", "reshape_as")
def reshape_as(call: PlacedCall) -> Decision:
    """A reshape to the sizes of another value, of which nothing else matters: it stays as it lies if they are known."""
    after, whole = _reshaped(call), call.results[0].shape
    known = all(isinstance(size, int) for size in whole)
    lent = call.placements[1] if known else REPLICATE
    if isinstance(after, Shard) and not isinstance(whole[after.dim], int):
        return call.replicated("the split dim of what it becomes has an open size")
    why = "no dim of the reshaped value is split alike" if after is None else ""
    placed = REPLICATE if after is None else after
    wants = (REPLICATE if after is None else call.placements[0], lent)
    if not known and not isinstance(placed, Shard):
        return Decision(wants, (placed,), why=why)

    def emit(builder: Any, node: Any, args: dict[str, Any]) -> Any:
        sizes = list(whole)
        if isinstance(placed, Shard):
            sizes = [builder.whole_size(args["other"], call.results[0], placed, dim) for dim in range(len(whole))]
            sizes[placed.dim] = local_size(placed, whole[placed.dim], builder.ranks)
        return builder.call(aten.reshape.default, args["self"], sizes)

    return Decision(wants, (placed,), emit=emit, why=why)


@rule("unflatten")
def unflatten(call: PlacedCall) -> Decision:
    """One dim becomes several; their sizes are given without the others'."""
    after, first = _reshaped(call), call.dim()
    inside = isinstance(after, Shard) and first <= after.dim < first + len(call.args["sizes"])
    return _viewed(call, after, divide=(("sizes", after.dim - first),) if isinstance(after, Shard) and inside else ())


@rule("squeeze")
def squeeze(call: PlacedCall) -> Decision:
    """Dims of size 1 go: those of the whole value, not one of which a rank has a part of that size."""
    asked = call.args.get("dim", list(range(len(call.shapes[0]))))
    dims = [int(dim) % max(len(call.shapes[0]), 1) for dim in (asked if isinstance(asked, (list, tuple)) else [asked])]
    gone = [dim for dim in dims if call.shapes[0] and statically_equal(call.shapes[0][dim], 1)]
    after = _reshaped(call)
    return _viewed(call, after, emit=_emit(aten.squeeze.dims, gone) if isinstance(after, Shard) else None)


def _reshaped(call: PlacedCall) -> Placement | None:
    """The placement of the only result, if the elements keep their order; None if it has none."""
    placement = call.placements[0]
    if not isinstance(placement, Shard):
        return placement
    return reshaped(placement, call.shapes[0], call.results[0].shape, call.ranks)


def _viewed(call: PlacedCall, after: Placement | None, **more: Any) -> Decision:
    if after is None:
        return call.replicated("no dim of the reshaped value is split alike")
    return Decision(call.placements, (after,), **more)


@rule("expand", "broadcast_to")
def expand(call: PlacedCall) -> Decision:
    """New dims come in front, dims of size 1 grow; a split dim stays as it is."""
    ahead = call.results[0].dim() - len(call.shapes[0])
    decision = _through(call, {dim: dim + ahead for dim in range(len(call.shapes[0]))})
    split = decision.results[0]
    return Decision(decision.wants, decision.results, (("size", split.dim),) if isinstance(split, Shard) else ())


@rule("expand_as")
def expand_as(call: PlacedCall) -> Decision:
    """Like adding zeros of the other's shape."""
    ahead = len(call.shapes[1]) - len(call.shapes[0])
    names = tuple(f"d{dim}" for dim in range(len(call.shapes[1])))
    return call.decide(Factors((names[ahead:], names), (names,)))


@rule("repeat")
def repeat(call: PlacedCall) -> Decision:
    """A dim repeated so often has so many times its blocks."""
    ahead = call.results[0].dim() - len(call.shapes[0])
    placement = call.placements[0]
    if not isinstance(placement, Shard):
        return Decision(call.placements, (placement,))
    times = call.args["repeats"][placement.dim + ahead]
    if not isinstance(times, int) or times < 1:
        return call.replicated("it is repeated a number of times known only when it runs, or never")
    outer = placement.outer if placement.sizes else placement.outer * times
    repeated = replace(placement, dim=placement.dim + ahead, outer=outer, sizes=placement.sizes * times)
    return Decision(call.placements, (repeated,))


@rule("repeat_interleave.self_int")
def repeat_interleave(call: PlacedCall) -> Decision:
    """Elements stay where they are, several times."""
    if call.args.get("dim") is None:
        return call.replicated("it flattens the value")
    placement = call.placements[0]
    if not isinstance(placement, Shard) or placement.dim != call.dim():
        return Decision(call.placements, (placement,))
    if placement.sizes:
        return call.replicated("its blocks are uneven")
    divide = (("output_size", None),) if call.args.get("output_size") is not None else ()
    return Decision(call.placements, (placement,), divide)


@rule("permute")
def permute(call: PlacedCall) -> Decision:
    """Dims in another order."""
    order = [int(dim) % len(call.shapes[0]) for dim in call.args["dims"]]
    return _through(call, {old: new for new, old in enumerate(order)})


@rule("transpose", "swapdims", "swapaxes", "t", "mT", "adjoint")
def transpose(call: PlacedCall) -> Decision:
    """Two dims swapped, the last two if none are named."""
    rank = len(call.shapes[0])
    named = [call.args[name] for name in ("dim0", "dim1", "axis0", "axis1") if name in call.args]
    first, second = (int(dim) % max(rank, 1) for dim in named or (-2, -1))
    moved = {first: second, second: first} if rank > 1 else {}
    return _through(call, {dim: moved.get(dim, dim) for dim in range(rank)})


@rule("numpy_T")
def reversed_dims(call: PlacedCall) -> Decision:
    """All dims in reverse."""
    rank = len(call.shapes[0])
    return _through(call, {dim: rank - 1 - dim for dim in range(rank)})


@rule("movedim", "moveaxis")
def movedim(call: PlacedCall) -> Decision:
    """Some dims moved, the others in their order."""
    rank = len(call.shapes[0])
    listed = [
        [value] if isinstance(value, int) else list(value) for value in (call.args["source"], call.args["destination"])
    ]
    moved = {int(old) % rank: int(new) % rank for old, new in zip(*listed, strict=True)}
    free = iter([dim for dim in range(rank) if dim not in moved])
    order = [next((old for old, new in moved.items() if new == dim), None) for dim in range(rank)]
    filled = [old if old is not None else next(free) for old in order]
    return _through(call, {old: new for new, old in enumerate(filled)})


@rule("select", "unbind")
def select(call: PlacedCall) -> Decision:
    """One index of a dim, or each: that dim goes."""
    taken = call.dim()
    return _through(call, {dim: dim - (dim > taken) for dim in range(len(call.shapes[0])) if dim != taken})


@rule("slice", "narrow")
def slice_(call: PlacedCall) -> Decision:
    """A range of a dim: of a split one all of it, whole blocks of it, or every so many from the first few on."""
    placement = call.placements[0]
    if not isinstance(placement, Shard) or placement.dim != call.dim():
        return Decision(call.placements, (placement,))
    size, length = call.shapes[0][placement.dim], call.results[0].shape[placement.dim]
    if statically_equal(length, size):
        return Decision(call.placements, (placement,), emit=_emit(aten.alias.default))
    start, step = call.args["start"] or 0, call.args.get("step", 1)
    if any(not isinstance(number, int) for number in (start, size, length)):
        return call.replicated("it takes a part of the split dim")
    start = max(0, start + size) if start < 0 else start
    if step > 1:
        return _every_so_many(call, placement, start, step)
    taken = _blocks_between(call, start, start + length)
    if taken is None:
        return call.replicated("it takes a part of the split dim")
    ends = [local_size(placement, end, call.ranks) for end in (start, start + length)]
    return Decision(call.placements, (taken,), emit=_emit(aten.slice.Tensor, placement.dim, *ends))


def _every_so_many(call: PlacedCall, shard: Shard, start: int, step: int) -> Decision:
    """Neighbours lie interleaved: each rank takes its own, if none are cut apart."""
    size, length = call.shapes[0][shard.dim], call.results[0].shape[shard.dim]
    blocks = block_sizes(shard, size)
    by = shard.units or call.ranks
    if start >= step or length * step != size or any(block % (by * step) for block in blocks):
        return call.replicated("it takes a part of the split dim")
    taken = in_blocks(shard.dim, [block // step for block in blocks], shard.units)
    end = local_size(shard, size, call.ranks)
    return Decision(call.placements, (taken,), emit=_emit(aten.slice.Tensor, shard.dim, start, end, step))


def _emit(target: Any, *rest: Any) -> Any:
    """Something else than the operator itself, of its first operand and these arguments."""
    return lambda builder, node, args: builder.call(target, args["self"], *rest)


def _blocks_between(call: PlacedCall, start: int, end: int) -> Shard | None:
    """The first operand's split between two positions along it, if both are ends of blocks."""
    shard: Any = call.placements[0]
    position, found, ends = 0, [], {0}
    for block in block_sizes(shard, call.shapes[0][shard.dim]):
        if start <= position and position + block <= end:
            found.append(block)
        position += block
        ends.add(position)
    return in_blocks(shard.dim, found, shard.units) if {start, end} <= ends and found else None


@rule("split", "split_with_sizes", "chunk", "tensor_split")
def split(call: PlacedCall) -> Decision:
    """Pieces along a dim: of a split one, each piece must be whole blocks of it."""
    placement = call.placements[0]
    if not isinstance(placement, Shard) or placement.dim != call.dim():
        return Decision(call.placements, (placement,) * len(call.results))
    sizes = [piece.shape[placement.dim] for piece in call.results]
    if not all(isinstance(size, int) for size in (*sizes, call.shapes[0][placement.dim])):
        return call.replicated("it cuts the split dim")
    ends = [0, *accumulate(sizes)]
    pieces = [_blocks_between(call, *between) for between in pairwise(ends)]
    results = tuple(piece for piece in pieces if piece is not None)
    if len(results) < len(pieces):
        return call.replicated("it cuts the split dim")
    local = [local_size(placement, size, call.ranks) for size in sizes]
    return Decision(call.placements, results, emit=_emit(aten.split_with_sizes.default, local, placement.dim))


@rule("cat", "concat", "concatenate")
def cat(call: PlacedCall) -> Decision:
    """All dims pass but the one joined; where all are split along that, the result has the blocks of all."""
    rank = call.results[0].dim()
    dim = call.dim(rank=rank)
    along = [isinstance(place, Shard) and place.dim == dim for place in call.placements]
    units = {place.units for place in call.placements if isinstance(place, Shard)}
    if all(along) and len(units) == 1 and all(isinstance(shape[dim], int) for shape in call.shapes):
        blocks: list[int] = []
        for place, shape in zip(call.placements, call.shapes, strict=True):
            assert isinstance(place, Shard)
            blocks += block_sizes(place, shape[dim])
        return Decision(call.placements, (in_blocks(dim, blocks, units.pop()),))
    names = tuple(f"d{index}" for index in range(rank))
    inputs = tuple(names if len(shape) == rank else (None,) * len(shape) for shape in call.shapes)
    every = frozenset(range(len(call.operands)))
    return call.decide(Factors(inputs, (names,), frozenset({f"d{dim}"}), linear=(every,)))


@rule("stack")
def stack(call: PlacedCall) -> Decision:
    """A new dim; the others pass."""
    rank = call.results[0].dim()
    dim = call.dim(rank=rank)
    names = tuple(f"d{index}" for index in range(rank - 1))
    every = frozenset(range(len(call.operands)))
    return call.decide(Factors((names,) * len(call.operands), ((*names[:dim], None, *names[dim:]),), linear=(every,)))


@rule("constant_pad_nd", "pad")
def pad(call: PlacedCall) -> Decision:
    """Dims that are not padded pass."""
    padding, rank = call.args["pad"], len(call.shapes[0])
    padded = {f"d{rank - 1 - index // 2}" for index, width in enumerate(padding) if not statically_equal(width, 0)}
    names = tuple(f"d{dim}" for dim in range(rank))
    return call.decide(Factors((names,), (names,), frozenset(padded)))


@rule("tril", "triu")
def triangle(call: PlacedCall) -> Decision:
    """Leading dims pass; the triangle's two do not."""
    rank = len(call.shapes[0])
    names = tuple(f"d{dim}" for dim in range(rank))
    return call.decide(Factors((names,), (names,), frozenset(names[-2:]), linear=(_FIRST,)))


@rule("select_scatter")
def select_scatter(call: PlacedCall) -> Decision:
    """One index of a dim replaced: the others pass."""
    names = tuple(f"d{dim}" for dim in range(len(call.shapes[0])))
    dim = call.dim()
    alike = call.sources[0].meta["val"].dtype is call.sources[1].meta["val"].dtype  # else it rounds
    linear = (frozenset({0, 1}),) if alike else ()
    return call.decide(
        Factors((names, names[:dim] + names[dim + 1 :]), (names,), frozenset({names[dim]}), linear=linear)
    )


@rule("slice_scatter")
def slice_scatter(call: PlacedCall) -> Decision:
    """A range of a dim replaced: the others pass."""
    names = tuple(f"d{dim}" for dim in range(len(call.shapes[0])))
    fixed = frozenset({f"d{call.dim()}"})
    alike = call.sources[0].meta["val"].dtype is call.sources[1].meta["val"].dtype  # else it rounds
    return call.decide(Factors((names, names), (names,), fixed, linear=(frozenset({0, 1}),) if alike else ()))


@rule("index_select", "gather")
def picked(call: PlacedCall) -> Decision:
    """All dims pass but the indexed one, of which positions are counted; what is picked may be split."""
    names, pieces, fixed = _indexed(call)
    index = pieces if len(call.shapes[1]) == len(names) else ("picked",) * len(call.shapes[1])
    return call.decide(Factors((names, index), (pieces,), fixed, linear=(_FIRST,)))


@rule("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_fill")
def placed(call: PlacedCall) -> Decision:
    """All dims pass but the indexed one; so do partial sums that are added or put in place."""
    names, pieces, fixed = _indexed(call)
    rest = tuple(pieces if len(shape) == len(names) else ("picked",) * len(shape) for shape in call.shapes[1:])
    linear = () if "reduce" in call.args else (frozenset({0, 2}),)
    return call.decide(Factors((names, *rest), (names,), fixed | {"picked"}, linear=linear))


def _indexed(call: PlacedCall) -> tuple[tuple[str, ...], tuple[str, ...], frozenset[str]]:
    """The dims of the value, those of what is picked of it or put in it, and those that may not be split.

    The others need not be as large as the value's: then its first ones are meant, wherever they lie.
    """
    value, dim = call.shapes[0], call.dim()
    names = tuple(f"d{index}" for index in range(len(value)))
    pieces = tuple("picked" if index == dim else name for index, name in enumerate(names))
    alike = [shape for shape in call.shapes if len(shape) == len(value)]
    shorter = [
        name for index, name in enumerate(names) if any(not statically_equal(s[index], value[index]) for s in alike)
    ]
    return names, pieces, frozenset({f"d{dim}", *shorter})


@rule("index")
def index(call: PlacedCall) -> Decision:
    """Dims that are not indexed pass; indices and indexed dims are whole."""
    indices = list(call.args["indices"])
    rank = len(call.shapes[0])
    used = [dim for dim, index in enumerate(indices) if index is not None]
    if not used or used != list(range(used[0], used[-1] + 1)) or any(_is_mask(index) for index in indices):
        return call.replicated("its indices are apart, or masks")
    names = tuple(f"d{dim}" for dim in range(rank))
    wide = call.results[0].dim() - (rank - len(used))
    result = (*names[: used[0]], *((None,) * wide), *names[used[-1] + 1 :])
    inputs = (names, *((None,) * len(shape) for shape in call.shapes[1:]))
    fixed = frozenset(names[dim] for dim in used)
    return call.decide(Factors(inputs, (result,), fixed, linear=(_FIRST,)))


def _is_mask(index: Any) -> bool:
    value = index.meta.get("val") if isinstance(index, fx.Node) else None
    return isinstance(value, Tensor) and not value.dtype.is_floating_point and value.dtype.itemsize == 1


@rule("unfold")
def unfold(call: PlacedCall) -> Decision:
    """All dims pass but the one windows are taken of."""
    taken = call.dim("dimension")
    return _through(call, {dim: dim for dim in range(len(call.shapes[0])) if dim != taken})
