"""Where the channels that a projection puts out go: which dims hold them, through views, transposes and attention.

Channels are split between ranks in contiguous pieces. As long as an operator keeps the outermost factor of the channels
apart (heads, usually), each rank can go on with its piece alone. `follow` says where the channels are after a node, or
that a rank would need the pieces of others.

Those of images are in `plan_channels_images`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from crossfade.graph.operators import arguments
from crossfade.graph.private import schema_of
from crossfade.shard.tensor.equations import read_equation
from crossfade.shard.tensor.plan_channel_factors import ChannelFactor, Channels, keep, number, sizes_of
from crossfade.shard.tensor.plan_channels_images import BY_CHANNEL, by_channel, convolved, normed_in_groups, rolled
from crossfade.shard.tensor.plan_moves import moved_dims
from crossfade.shard.tensor.plan_products import CONVOLUTIONS

aten = torch.ops.aten


def is_summed(node: fx.Node, source: fx.Node, channels: Channels) -> bool:
    """Whether a sum or mean runs over the channels: the statistics of a norm, usually.

    Ranks add up such results, which are small beside what they are made of.
    """
    sizes, dim = sizes_of(source), channels.first.dim
    return node.target in _SUMS and dim in (_dims_taken(node, len(sizes)) or ()) and sizes[dim] >= _WIDE


def is_normed(node: fx.Node, source: fx.Node, channels: Channels) -> bool:
    """Whether a norm runs over the channels: they stay where they are, and ranks add up its statistics."""
    if node.target not in _NORMS or node.args[0] is not source:
        return False
    dim, sizes = channels.first.dim, sizes_of(source)
    return dim in (_dims_taken(node, len(sizes)) or ()) and sizes[dim] >= _WIDE


def follow_all(node: fx.Node, source: fx.Node, channels: Channels) -> tuple[Channels, ...]:
    """The channels in `node`'s result: several where halves of them meet; none where ranks would need each other."""
    if node.target is aten.glu.default and channels.first.dim == arguments(node)["dim"] % len(sizes_of(source)):
        return _halves(channels)
    now = follow(node, source, channels)
    return () if now is None else (now,)


def _halves(channels: Channels) -> tuple[Channels, ...]:
    """The first half of a dim is multiplied by what the second says: each half is a block of channels."""
    first = channels.first
    half = first.size // 2
    parts = [_part_of_dim(channels, first.dim, start, half) for start in (0, half)] if first.size % 2 == 0 else []
    return tuple(part for part in parts if part is not None)


def follow(node: fx.Node, source: fx.Node, channels: Channels) -> Channels | None:
    """The channels in `node`'s result, given those in its argument `source`; None where ranks would need each other."""
    schema = schema_of(node.target)
    if schema is not None and schema.is_mutable and arguments(node).get("self") is not source:
        return None  # what is written into may be read elsewhere
    for applies, rule in _RULES:
        if applies(node):
            return rule(node, source, channels)
    return None


def _same_shape(node: fx.Node, source: fx.Node, channels: Channels) -> Channels | None:
    return channels if sizes_of(node) == sizes_of(source) else None


def _broadcast(node: fx.Node, source: fx.Node, channels: Channels) -> Channels | None:
    """Dims are aligned at the end; a dim with channels in it is never one that grows."""
    shift = node.meta["val"].ndim - source.meta["val"].ndim
    sizes, before = sizes_of(node), sizes_of(source)
    if any(sizes[factor.dim + shift] != before[factor.dim] for factor in channels.factors[:1]):
        return None
    return keep(channels, lambda factor: replace(factor, dim=factor.dim + shift))


def _transposed(node: fx.Node, source: fx.Node, channels: Channels) -> Channels | None:
    order = moved_dims(node, source.meta["val"].ndim) or ()
    return keep(channels, lambda factor: replace(factor, dim=order.index(factor.dim)))


def _reshaped(node: fx.Node, source: fx.Node, channels: Channels) -> Channels | None:
    before, after = sizes_of(source), sizes_of(node)
    factors: list[ChannelFactor] = []
    for factor in channels.factors:
        step = factor.inner * math.prod(before[factor.dim + 1 :])
        parts = _parts(step, factor.size, after)
        if math.prod(part.size for part in parts) != factor.size:
            break
        factors += parts
    return replace(channels, factors=tuple(factors)) if factors else None


def _parts(step: int, size: int, sizes: Sequence[int]) -> list[ChannelFactor]:
    """What dims of these sizes hold of a factor that is `size` steps of so many elements; outermost first."""
    parts = []
    for dim, extent in enumerate(sizes):
        below = math.prod(sizes[dim + 1 :])
        low, high = max(step, below), min(step * size, below * extent)
        if high > low and high % low == 0 and low % below == 0 and (below * extent) % high == 0:
            parts.append(ChannelFactor(dim, high // low, below * extent // high, low // below))
    return parts


def _sliced(node: fx.Node, source: fx.Node, channels: Channels) -> Channels | None:
    given, sizes = arguments(node), sizes_of(source)
    dim = given["dim"] % len(sizes)
    start, stop, step = slice(*(_plain(given[name]) for name in ("start", "end", "step"))).indices(sizes[dim])
    if step != 1 and dim == channels.first.dim:
        return _every_nth(channels, start, stop == sizes[dim], step)
    return _part_of_dim(channels, dim, start, stop - start)


def _every_nth(channels: Channels, start: int, to_the_end: bool, step: int) -> Channels | None:
    """Interleaved blocks: neighbours belong together, so steps of so many channels stay apart."""
    first = channels.first
    if (first.outer, first.inner) != (1, 1) or first.size % step or start >= step or not to_the_end:
        return None
    return replace(channels, factors=(replace(first, size=first.size // step),))


def _plain(size: Any) -> int | None:
    if isinstance(size, fx.Node):
        size = size.meta["val"]
    return None if size is None else number(size)


def _selected(node: fx.Node, source: fx.Node, channels: Channels) -> Channels | None:
    given, sizes = arguments(node), sizes_of(source)
    dim = given["dim"] % len(sizes)
    index = (_plain(given["index"]) or 0) % sizes[dim]
    part = _part_of_dim(channels, dim, index, 1)
    return _without(part, dim) if part else None


def _without(channels: Channels, dim: int) -> Channels | None:
    """After a dim has gone that only one channel step, or none, was in."""
    if channels.first.dim == dim:
        channels = replace(channels, factors=channels.factors[1:])
    if not channels.factors:
        return None
    return keep(channels, lambda factor: None if factor.dim == dim else _lowered(factor, dim))


def _lowered(factor: ChannelFactor, gone: int) -> ChannelFactor:
    return replace(factor, dim=factor.dim - (factor.dim > gone))


def _part_of_dim(channels: Channels, dim: int, start: int, length: int) -> Channels | None:
    """A part of one dim: of the outermost factor it is a block of channels, of others it leaves the outer ones."""
    first = channels.first
    if dim != first.dim:
        return keep(channels, lambda factor: None if factor.dim == dim else factor)
    if (first.outer, first.inner) != (1, 1) or length < 1:
        return None
    begin = channels.start + start * channels.unit
    rest = channels.factors[1:]
    return Channels(begin, length * channels.unit, (replace(first, size=length), *rest))


def _item(node: fx.Node, source: fx.Node, channels: Channels) -> Channels | None:
    """A piece of a split tensor: `source` is the split itself, whose channels are those of its input."""
    given, index = arguments(source), int(node.args[1])  # type: ignore[arg-type]
    sizes = sizes_of(given["self"])
    dim = given["dim"] % len(sizes)
    if source.target is aten.unbind.int:
        part = _part_of_dim(channels, dim, index, 1)
        return _without(part, dim) if part else None
    pieces = [number(value.shape[dim]) for value in source.meta["val"]]
    return _part_of_dim(channels, dim, sum(pieces[:index]), pieces[index])


def _written_into(node: fx.Node, source: fx.Node, channels: Channels) -> Channels | None:
    """A range of one dim replaced: fine where it holds no channels."""
    dim = arguments(node)["dim"] % node.meta["val"].ndim
    if source.meta["val"].ndim < node.meta["val"].ndim:  # what is written is one index of that dim
        return keep(channels, lambda factor: replace(factor, dim=factor.dim + (factor.dim >= dim)))
    return keep(channels, lambda factor: None if factor.dim == dim else factor)


def _best_of(node: fx.Node, source: fx.Node, channels: Channels) -> Channels | None:
    """The values or the places of a maximum along one dim."""
    given = arguments(source)
    dim = given["dim"] % len(sizes_of(given["self"]))
    if channels.first.dim == dim:
        return None
    gone = dim if not given["keepdim"] else len(sizes_of(given["self"]))
    return keep(channels, lambda factor: None if factor.dim == dim else _lowered(factor, gone))


def _gated(node: fx.Node, source: fx.Node, channels: Channels) -> Channels | None:
    """The halves of a dim meet, which is not the one that the channels begin in."""
    dim = arguments(node)["dim"] % node.meta["val"].ndim
    return keep(channels, lambda factor: None if factor.dim == dim else factor)


def _pass_through(node: fx.Node, source: fx.Node, channels: Channels) -> Channels | None:
    return channels


def _joined(node: fx.Node, source: fx.Node, channels: Channels) -> Channels | None:
    dim = arguments(node)["dim"] % node.meta["val"].ndim
    return keep(channels, lambda factor: None if factor.dim == dim else factor)


def _stacked(node: fx.Node, source: fx.Node, channels: Channels) -> Channels | None:
    dim = arguments(node)["dim"] % node.meta["val"].ndim
    return keep(channels, lambda factor: replace(factor, dim=factor.dim + (factor.dim >= dim)))


def _indexed(node: fx.Node, source: fx.Node, channels: Channels) -> Channels | None:
    """One dim indexed by a tensor: fine where it holds no channels."""
    indices = arguments(node)["indices"]
    used = [dim for dim, index in enumerate(indices) if index is not None]
    if source is not arguments(node)["self"] or len(used) != 1 or channels.first.dim == used[0]:
        return None
    grown = indices[used[0]].meta["val"].ndim - 1
    shifted = lambda dim: dim + grown if dim > used[0] else dim  # noqa: E731
    return keep(channels, lambda factor: None if factor.dim == used[0] else replace(factor, dim=shifted(factor.dim)))


def _across(node: fx.Node, source: fx.Node, channels: Channels) -> Channels | None:
    """Softmax, norms, sums: fine along dims that hold no channels."""
    taken = _dims_taken(node, source.meta["val"].ndim)
    if taken is None or channels.first.dim in taken:
        return None
    lost = source.meta["val"].ndim - node.meta["val"].ndim

    def moved(factor: ChannelFactor) -> ChannelFactor | None:
        below = sum(dim < factor.dim for dim in taken) if lost else 0
        return None if factor.dim in taken else replace(factor, dim=factor.dim - below)

    return keep(channels, moved)


def _dims_taken(node: fx.Node, rank: int) -> set[int] | None:
    given = arguments(node)
    if "normalized_shape" in given:
        return set(range(rank - len(given["normalized_shape"]), rank))
    dims = given.get("dim")
    if dims is None or dims == []:
        return None
    return {dim % rank for dim in (dims if isinstance(dims, list | tuple) else [dims])}


def _padded(node: fx.Node, source: fx.Node, channels: Channels) -> Channels | None:
    """Fine along dims that hold no channels."""
    rank = source.meta["val"].ndim
    grown = {rank - 1 - index // 2 for index, width in enumerate(arguments(node)["pad"]) if _plain(width) != 0}
    return keep(channels, lambda factor: None if factor.dim in grown else factor)


def _repeated(node: fx.Node, source: fx.Node, channels: Channels) -> Channels | None:
    """Each element of a dim several times in a row."""
    given = arguments(node)
    times, rank = _plain(given["repeats"]), source.meta["val"].ndim
    if given["dim"] is None or times is None:
        return None
    dim = given["dim"] % rank
    return keep(channels, lambda factor: replace(factor, inner=factor.inner * times) if factor.dim == dim else factor)


def _by_equation(node: fx.Node, source: fx.Node, channels: Channels) -> Channels | None:
    """An einsum: where the result has the dim of the same letter, in all places where the value is given."""
    given = arguments(node)
    tensors = given["tensors"]
    parts, result = read_equation(str(given["equation"]), [tensor.meta["val"].ndim for tensor in tensors])
    uses = [names for names, tensor in zip(parts, tensors, strict=True) if tensor is source]
    if any(len(set(names)) < len(names) for names in uses):
        return None

    def moved(factor: ChannelFactor) -> ChannelFactor | None:
        now = {result.index(names[factor.dim]) if names[factor.dim] in result else None for names in uses}
        dim = now.pop() if len(now) == 1 else None
        return None if dim is None else replace(factor, dim=dim)

    return keep(channels, moved)


def _multiplied(node: fx.Node, source: fx.Node, channels: Channels) -> Channels | None:
    """A product of activations: channels may be in a batch dim, in the rows of the left or the columns of the right."""
    given = arguments(node)
    left, right = (given[name] for name in _FACTORS[node.target])
    rank, result = source.meta["val"].ndim, node.meta["val"].ndim
    if node.target is aten.baddbmm.default and source is given["self"]:
        return _broadcast(node, source, channels)
    contracted = rank - 1 if source is left else rank - 2
    if left is right or rank < 2:
        return None
    return keep(
        channels, lambda factor: None if factor.dim == contracted else replace(factor, dim=factor.dim + result - rank)
    )


def _attended(node: fx.Node, source: fx.Node, channels: Channels) -> Channels | None:
    """Attention is one computation for each head; grouped keys and values serve several heads each."""
    given = arguments(node)
    head = source.meta["val"].ndim - 3
    if source not in (given[name] for name in ("query", "key", "value", "attn_mask")) or channels.first.dim != head:
        return None
    repeats = sizes_of(node)[node.meta["val"].ndim - 3] // sizes_of(source)[head]
    first = replace(channels.first, dim=node.meta["val"].ndim - 3, inner=channels.first.inner * repeats)
    return replace(channels, factors=(first,))


def _repeated_whole(node: fx.Node, source: fx.Node, channels: Channels) -> Channels | None:
    """Dims repeated so often: so many times their blocks."""
    times = [_plain(count) or 0 for count in arguments(node)["repeats"]]
    ahead = len(times) - source.meta["val"].ndim
    if times[channels.first.dim + ahead] != 1:
        return None

    def moved(factor: ChannelFactor) -> ChannelFactor:
        dim = factor.dim + ahead
        return replace(factor, dim=dim, outer=factor.outer * times[dim])

    return keep(channels, moved)


def _gathered(node: fx.Node, source: fx.Node, channels: Channels) -> Channels | None:
    """Elements picked along one dim: fine where it holds no channels, and all of the others are picked of."""
    given, before, after = arguments(node), sizes_of(source), sizes_of(node)
    dim = given["dim"] % len(before)
    if source is not given["self"] or before[channels.first.dim] != after[channels.first.dim]:
        return None
    return keep(channels, lambda factor: None if factor.dim == dim else factor)


def _triangle(node: fx.Node, source: fx.Node, channels: Channels) -> Channels | None:
    """Fine along dims that no triangle is in."""
    last = source.meta["val"].ndim - 2
    return keep(channels, lambda factor: None if factor.dim >= last else factor)


_RESHAPES = {
    aten.view_as.default,
    aten.reshape_as.default,
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}
_SPLITS: set[Any] = {
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.split.sizes,
    aten.chunk.default,
    aten.unbind.int,
}
_ALIASES: set[Any] = {
    *(getattr(aten, name).Tensor for name in ("multiply", "divide", "subtract")),
    *(getattr(aten, name).default for name in ("negative", "absolute", "log_sigmoid")),
}
"""Elementwise operators that torch does not mark as such."""

_BEST: set[Any] = {aten.max.dim, aten.min.dim}
_SAME_SHAPE = {
    aten.dropout.default,
    aten.dropout_.default,
    aten.to.other,
    aten.type_as.default,
    aten.masked_fill.Scalar,
    aten.copy.default,
}
_ACROSS = {
    aten.softmax.int,
    aten._softmax.default,
    aten.layer_norm.default,
    aten.rms_norm.default,
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.amax.default,
    aten.amin.default,
    aten.logsumexp.default,
    aten.std.correction,
    aten.var.correction,
    aten.std.dim,
    aten.var.dim,
    aten.norm.ScalarOpt_dim,
    aten.cumsum.default,
    aten.linalg_vector_norm.default,
}
_NORMS = {aten.layer_norm.default, aten.rms_norm.default}
_SUMS = {aten.sum.dim_IntList, aten.mean.dim}
_WIDE = 16
"""How many channels at least a sum runs over that ranks add up: its results are small then."""

_FACTORS: dict[Any, tuple[str, str]] = {
    aten.matmul.default: ("self", "other"),
    aten.bmm.default: ("self", "mat2"),
    aten.baddbmm.default: ("batch1", "batch2"),
}


def _item_of(node: fx.Node) -> Any:
    """The operator that a node takes one result of."""
    source = node.args[0] if node.target is operator.getitem else None
    return source.target if isinstance(source, fx.Node) else None


def _one_of(targets: Iterable[Any]) -> Callable[[fx.Node], bool]:
    known = set(targets)
    return lambda node: node.target in known


_RULES: tuple[tuple[Callable[[fx.Node], bool], Callable[[fx.Node, fx.Node, Channels], Channels | None]], ...] = (
    (lambda node: _item_of(node) in _SPLITS, _item),
    (lambda node: _item_of(node) in _BEST, _best_of),
    (_one_of(_SPLITS | _BEST), _pass_through),
    (_one_of(_RESHAPES), _reshaped),
    (_one_of({aten.slice.Tensor}), _sliced),
    (_one_of({aten.select.int}), _selected),
    (_one_of({aten.index.Tensor}), _indexed),
    (_one_of({aten.cat.default, aten.concat.default, aten.concatenate.default}), _joined),
    (_one_of({aten.repeat.default}), _repeated_whole),
    (_one_of({aten.gather.default}), _gathered),
    (_one_of({aten.tril.default, aten.triu.default}), _triangle),
    (_one_of({aten.stack.default}), _stacked),
    (_one_of({aten.expand.default, aten.broadcast_to.default, aten.expand_as.default, *_ALIASES}), _broadcast),
    (_one_of(_ACROSS), _across),
    (_one_of({aten.slice_scatter.default, aten.select_scatter.default}), _written_into),
    (_one_of({aten.pad.default, aten.constant_pad_nd.default}), _padded),
    (_one_of({aten.repeat_interleave.self_int}), _repeated),
    (_one_of(CONVOLUTIONS), convolved),
    (_one_of({aten.group_norm.default}), normed_in_groups),
    (_one_of({aten.roll.default}), rolled),
    (_one_of({aten.glu.default}), _gated),
    (lambda node: getattr(schema_of(node.target), "name", "") in BY_CHANNEL, by_channel),
    (_one_of({aten.einsum.default}), _by_equation),
    (_one_of(_FACTORS), _multiplied),
    (_one_of({aten.scaled_dot_product_attention.default}), _attended),
    (_one_of(_SAME_SHAPE), _same_shape),
    (lambda node: moved_dims(node, len(sizes_of(node))) is not None, _transposed),
    (lambda node: torch.Tag.pointwise in getattr(node.target, "tags", ()), _broadcast),
)
