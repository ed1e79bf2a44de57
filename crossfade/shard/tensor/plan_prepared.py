"""Weights that are computed from a parameter alone: cast, transposed, normalized, standardized, picked by row.

A parameter may be split along a dim if everything that prepares it keeps that dim apart, which `follow` tells. What
depends on an input of the user's is not preparation: there the weight is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import fx

from crossfade.graph.operators import arguments
from crossfade.shard.tensor.plan_channel_factors import ChannelFactor, Channels, number, sizes_of
from crossfade.shard.tensor.plan_channels import follow
from crossfade.shard.tensor.plan_meetings import is_value, lends
from crossfade.shard.tensor.plan_moves import moved_dims
from crossfade.shard.tensor.plan_products import is_product

aten = torch.ops.aten


@dataclass
class Prepared:
    """What is computed from a parameter: where its dims are in each value, and who uses these values."""

    held: dict[fx.Node, dict[int, Channels]] = field(default_factory=dict)
    users: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    """Dims of the parameter of which something on the way needs all."""
    scales: bool = False
    """Whether it only scales or shifts something larger."""

    def dims_of(self, value: fx.Node) -> tuple[int | None, ...]:
        """Which dim of the parameter each dim of a value is; None for one that is none, or may not be split."""
        sizes = sizes_of(value)
        found: list[int | None] = [None] * len(sizes)
        for dim, channels in self.held[value].items():
            at = channels.first.dim
            if dim not in self.lost and channels.factors == (ChannelFactor(at, sizes[at]),):
                found[at] = dim
        return tuple(found)


def prepare(reader: fx.Node, active: set[fx.Node]) -> Prepared:
    """Follow a parameter to its uses; `active` is what depends on inputs."""
    done = Prepared({reader: {dim: _all_of(dim, size) for dim, size in enumerate(sizes_of(reader))}})
    pending = [reader]
    while pending:
        value = min(pending)  # in order of the graph: all that it is made of is known by then
        pending.remove(value)
        if value is not reader:
            done.held[value] = _after(value, done)
        for user in value.users:
            if user.op != "call_function" or lends(user, value):
                continue
            if _prepares(user, value, active):
                if user not in pending:
                    pending.append(user)
            elif user in active or is_value(user):
                done.users.append((user, value))
    return done


def _all_of(dim: int, size: int) -> Channels:
    return Channels(0, size, (ChannelFactor(dim, size),))


def _prepares(node: fx.Node, value: fx.Node, active: set[fx.Node]) -> bool:
    """Whether a node makes a weight of a value; inputs say at most how often, in which dtype, or which rows."""
    if is_product(node) or node.target is aten.embedding.default:
        return False
    if node not in active:
        return is_value(node)
    own = node.args[0] is value
    return (
        (own and node.target in _ASKS_INPUTS)
        or moved_dims(node, len(sizes_of(value))) is not None
        or (picks_matrices(node) and own)
    )


_ASKS_INPUTS = {aten.expand.default, aten.type_as.default, aten.to.other, aten.view.default}


def picks_matrices(node: fx.Node) -> bool:
    """Whether a node takes for each row one matrix of a stack."""
    if node.target is not aten.index.Tensor:
        return False
    given = arguments(node)
    rows = [index for index in given["indices"] if index is not None]
    stack = len(sizes_of(given["self"])) == 3
    return stack and len(rows) == 1 and given["indices"][0] is rows[0] and rows[0].meta["val"].ndim == 1


def _after(node: fx.Node, done: Prepared) -> dict[int, Channels]:
    """Where the parameter's dims are in a node's result, if all that it is made of agrees."""
    sources = [source for source in node.all_input_nodes if source in done.held and not lends(node, source)]
    found: dict[int, Channels] = {}
    repeats = node.target is aten.expand.default or picks_matrices(node)
    done.scales |= not repeats and _elements(node) > max(map(_elements, sources))
    for dim in done.held[sources[0]]:
        ways = {_kept(node, source, done.held[source].get(dim)) for source in sources}
        now = ways.pop()
        if now is not None and not ways:
            found[dim] = now
    done.lost.update(dim for source in sources for dim in done.held[source] if dim not in found)
    return found


def _elements(node: fx.Node) -> int:
    """How many elements a value has, all that a list holds together."""
    value = node.meta["val"]
    return sum(math.prod(map(number, each.shape)) for each in (value if isinstance(value, list | tuple) else [value]))


def _kept(node: fx.Node, source: fx.Node, channels: Channels | None) -> Channels | None:
    """Where a whole dim is after a node; None if it is not all there, or not by itself."""
    if channels is None:
        return None
    if node.target is aten._weight_norm.default and node.args[0] is source:
        return channels  # ranks add up the squares of what they have
    now = follow(node, source, channels)
    return now if now is not None and (now.start, now.length) == (channels.start, channels.length) else None
