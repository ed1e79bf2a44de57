"""Sharding rules of views, lists and indexing: where a split dim goes, and which size arguments become local."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, fx

from crossfade.graph.private import statically_equal
from crossfade.shard.factors import Decision, Factors
from crossfade.shard.placements import (
    REPLICATE,
    Placement,
    Replicate,
    Shard,
    block_sizes,
    divides,
    in_blocks,
    reshaped,
)
from crossfade.shard.rules import Call, rule

_FIRST = frozenset({0})


def _through(call: Call, dims: dict[int, int], why: str = "it needs that dim whole") -> Decision:
    """A view that moves the first operand's dims; partial sums pass."""
    placement = call.placements[0]
    if not isinstance(placement, Shard):
        return Decision(call.placements, (placement,) * len(call.results))
    if placement.dim not in dims:
        return call.replicated(why)
    return Decision(call.placements, (placement.on(dims[placement.dim]),) * len(call.results))


@rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "_reshape_copy", "view_copy")
def reshape(call: Call) -> Decision:
    """Whatever keeps the elements' order; refused where a rank's part would not be one of the result's dims."""
    placement = call.placements[0]
    if not isinstance(placement, Shard):
        return Decision(call.placements, (placement,))
    after = reshaped(placement, call.shapes[0], call.results[0].shape, call.ranks)
    if after is None:
        return call.replicated("no dim of the reshaped value is split alike")
    name = call.node.target._schema.name
    if name == "aten::unflatten":
        first = call.dim()
        inside = first <= after.dim < first + len(call.args["sizes"])
        divide = ((("sizes", after.dim - first),) if inside else ())  # fmt: skip
    else:
        named = next((name for name in ("size", "shape") if name in call.args), None)
        divide = ((named, after.dim),) if named is not None else ()
    return Decision(call.placements, (after,), divide)


@rule("expand", "expand_copy", "broadcast_to")
def expand(call: Call) -> Decision:
    """New dims come in front, dims of size 1 grow; a split dim stays as it is."""
    ahead = call.results[0].dim() - len(call.shapes[0])
    decision = _through(call, {dim: dim + ahead for dim in range(len(call.shapes[0]))})
    split = decision.results[0]
    return Decision(decision.wants, decision.results, (("size", split.dim),) if isinstance(split, Shard) else ())


@rule("expand_as")
def expand_as(call: Call) -> Decision:
    """Like adding zeros of the other's shape."""
    ahead = len(call.shapes[1]) - len(call.shapes[0])
    names = tuple(f"d{dim}" for dim in range(len(call.shapes[1])))
    return call.decide(Factors((names[ahead:], names), (names,)))


@rule("repeat")
def repeat(call: Call) -> Decision:
    """A dim repeated so often has so many times its blocks."""
    ahead = call.results[0].dim() - len(call.shapes[0])
    placement = call.placements[0]
    if not isinstance(placement, Shard):
        return Decision(call.placements, (placement,))
    times = call.args["repeats"][placement.dim + ahead]
    if not isinstance(times, int):
        return call.replicated("it is repeated a number of times known only when it runs")
    after = Shard(placement.dim + ahead, placement.outer * times, placement.sizes * times)
    return Decision(call.placements, (after,))


@rule("repeat_interleave.self_int")
def repeat_interleave(call: Call) -> Decision:
    """Elements stay where they are, several times."""
    if call.args.get("dim") is None:
        return call.replicated("it flattens the value")
    placement = call.placements[0]
    on_it = isinstance(placement, Shard) and placement.dim == call.dim()
    if on_it and isinstance(placement, Shard) and placement.sizes:
        return call.replicated("its blocks are uneven")
    divide = (("output_size", None),) if on_it and call.args.get("output_size") is not None else ()
    return Decision(call.placements, (placement,), divide)


@rule("permute", "permute_copy")
def permute(call: Call) -> Decision:
    """Dims in another order."""
    order = [int(dim) % len(call.shapes[0]) for dim in call.args["dims"]]
    return _through(call, {old: new for new, old in enumerate(order)})


@rule("transpose", "swapaxes", "t", "adjoint", "numpy_T", "mT")
def transpose(call: Call) -> Decision:
    """Two dims swapped."""
    rank = len(call.shapes[0])
    names = [name for name in ("dim0", "dim1", "axis0", "axis1") if name in call.args]
    first, second = (int(call.args[name]) % rank for name in names) if names else (max(rank - 2, 0), rank - 1)
    moved = {first: second, second: first}
    return _through(call, {dim: moved.get(dim, dim) for dim in range(rank)})


@rule("movedim")
def movedim(call: Call) -> Decision:
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


@rule("select", "select_copy")
def select(call: Call) -> Decision:
    """One index of a dim: that dim goes."""
    taken = call.dim()
    return _through(call, {dim: dim - (dim > taken) for dim in range(len(call.shapes[0])) if dim != taken})


@rule("unbind")
def unbind(call: Call) -> Decision:
    """Every index of a dim: that dim goes."""
    return select(call)


@rule("slice", "narrow", "slice_copy")
def slice_(call: Call) -> Decision:
    """A range of a dim: of a split one all of it, or whole blocks of it."""
    placement = call.placements[0]
    if not isinstance(placement, Shard) or placement.dim != call.dim():
        return Decision(call.placements, (placement,))
    size = call.shapes[0][placement.dim]
    if statically_equal(call.results[0].shape[placement.dim], size):
        return Decision(call.placements, (placement,), (("length", None),) if "length" in call.args else ())
    start = call.args.get("start") or 0
    if not isinstance(start, int) or not isinstance(size, int) or call.args.get("step", 1) != 1:
        return call.replicated("it takes a part of the split dim")
    start = start + size if start < 0 else start
    taken = _blocks_between(placement, size, start, start + int(call.results[0].shape[placement.dim]))
    if taken is None or not divides(in_blocks(0, taken), sum(taken), call.ranks):
        return call.replicated("it takes a part of the split dim")
    ends = ("start", "length") if "length" in call.args else ("start", "end")
    given = [name for name in ends if call.args.get(name) not in (None, sys.maxsize)]
    return Decision(call.placements, (in_blocks(placement.dim, taken),), tuple((name, None) for name in given))


def _blocks_between(shard: Shard, size: int, start: int, end: int) -> tuple[int, ...] | None:
    """The blocks of a split dim between two positions, if both are ends of blocks."""
    position, found, ends = 0, [], {0}
    for block in block_sizes(shard, size):
        if start <= position and position + block <= end:
            found.append(block)
        position += block
        ends.add(position)
    return tuple(found) if {start, end} <= ends and found else None


@rule("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk", "split_copy",
      "split_with_sizes_copy", "unsafe_split_with_sizes")  # fmt: skip
def split(call: Call) -> Decision:
    """Pieces along a dim: of a split one, each piece must be whole blocks of it."""
    placement = call.placements[0]
    pieces = len(call.results)
    if not isinstance(placement, Shard) or placement.dim != call.dim():
        return Decision(call.placements, (placement,) * pieces)
    size = call.shapes[0][placement.dim]
    sizes = [piece.shape[placement.dim] for piece in call.results]
    if not isinstance(size, int) or not isinstance(placement.outer, int):
        return call.replicated("it cuts the split dim")
    position, results = 0, []
    for piece in sizes:
        taken = _blocks_between(placement, size, position, position + piece)
        if taken is None or not divides(in_blocks(0, taken), sum(taken), call.ranks):
            return call.replicated("it cuts the split dim")
        results.append(in_blocks(placement.dim, taken))
        position += piece
    named = [name for name in ("split_size", "split_sizes", "split_size_or_sections") if name in call.args]
    return Decision(call.placements, tuple(results), tuple((name, None) for name in named))


@rule("cat", "concat")
def cat(call: Call) -> Decision:
    """All dims pass but the one joined; where all are split along that, the result has the blocks of all."""
    rank = call.results[0].dim()
    dim = call.dim(rank=rank)
    along = [isinstance(place, Shard) and place.dim == dim for place in call.placements]
    if all(along) and all(isinstance(shape[dim], int) for shape in call.shapes):
        blocks: list[int] = []
        for place, shape in zip(call.placements, call.shapes, strict=True):
            assert isinstance(place, Shard)
            blocks += block_sizes(place, shape[dim])
        return Decision(call.placements, (in_blocks(dim, blocks),))
    names = tuple(f"d{index}" for index in range(rank))
    inputs = tuple(names if len(shape) == rank else (None,) * len(shape) for shape in call.shapes)
    every = frozenset(range(len(call.operands)))
    return call.decide(Factors(inputs, (names,), frozenset({f"d{dim}"}), linear=(every,)))


@rule("stack")
def stack(call: Call) -> Decision:
    """A new dim; the others pass."""
    rank = call.results[0].dim()
    dim = call.dim(rank=rank)
    names = tuple(f"d{index}" for index in range(rank - 1))
    every = frozenset(range(len(call.operands)))
    return call.decide(Factors((names,) * len(call.operands), ((*names[:dim], None, *names[dim:]),), linear=(every,)))


@rule("constant_pad_nd", "pad")
def pad(call: Call) -> Decision:
    """Dims that are not padded pass."""
    padding, rank = call.args["pad"], len(call.shapes[0])
    padded = {f"d{rank - 1 - index // 2}" for index, width in enumerate(padding) if not statically_equal(width, 0)}
    names = tuple(f"d{dim}" for dim in range(rank))
    return call.decide(Factors((names,), (names,), frozenset(padded)))


@rule("tril", "triu")
def triangle(call: Call) -> Decision:
    """Leading dims pass; the triangle's two do not."""
    rank = len(call.shapes[0])
    names = tuple(f"d{dim}" for dim in range(rank))
    return call.decide(Factors((names,), (names,), frozenset(names[-2:]), linear=(_FIRST,)))


@rule("index_select", "gather", "scatter", "scatter_add", "index_add", "index_copy", "take_along_dim", "index_fill",
      "scatter_reduce", "index_add_", "scatter_", "scatter_add_")  # fmt: skip
def indexed_dim(call: Call) -> Decision:
    """All dims pass but the indexed one, whose positions are counted over the whole dim."""
    rank = len(call.shapes[0])
    dim = call.dim()
    names = tuple(f"d{index}" for index in range(rank))
    pieces = tuple("picked" if index == dim else name for index, name in enumerate(names))
    inputs = tuple(
        names if index == 0 else pieces if len(shape) == rank else ("picked",) * len(shape)
        for index, shape in enumerate(call.shapes)
    )
    name = call.node.target._schema.name.removeprefix("aten::").rstrip("_")
    result = pieces if name in ("index_select", "gather", "take_along_dim") else names
    linear: tuple[frozenset[int], ...] = ()
    if name in ("index_select", "gather", "take_along_dim"):
        linear = (_FIRST,)
    elif name in ("scatter_add", "index_add", "index_copy", "scatter") and len(call.operands) == 3:
        linear = (frozenset({0, 2}),)
    return call.decide(Factors(inputs, (result,), frozenset({f"d{dim}", "picked"}), linear=linear))


@rule("index", "_unsafe_index")
def index(call: Call) -> Decision:
    """Dims that are not indexed pass; indices and indexed dims are whole."""
    indices = list(call.args["indices"])
    rank = len(call.shapes[0])
    used = [dim for dim, one in enumerate(indices) if one is not None]
    if not used or used != list(range(used[0], used[-1] + 1)) or any(_is_mask(one) for one in indices):
        return call.replicated("its indices are apart, or masks")
    names = tuple(f"d{dim}" for dim in range(rank))
    wide = call.results[0].dim() - (rank - len(used))
    result = (*names[: used[0]], *((None,) * wide), *names[used[-1] + 1 :])
    inputs = (names, *((None,) * len(shape) for shape in call.shapes[1:]))
    fixed = frozenset(names[dim] for dim in used)
    wants = call.decide(Factors(inputs, (result,), fixed, linear=(_FIRST,)))
    whole: tuple[Placement, ...] = tuple(REPLICATE for _ in call.operands[1:])
    return Decision((wants.wants[0], *whole), wants.results, why=wants.why)


def _is_mask(one: Any) -> bool:
    value = one.meta.get("val") if isinstance(one, fx.Node) else None
    return isinstance(value, Tensor) and not value.dtype.is_floating_point and value.dtype.itemsize == 1


@rule("unfold")
def unfold(call: Call) -> Decision:
    """All dims pass but the one windows are taken of."""
    taken = call.dim("dimension")
    return _through(call, {dim: dim for dim in range(len(call.shapes[0])) if dim != taken})
