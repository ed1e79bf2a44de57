"""Where channels go in what is made of convolutions; the other operators are in `plan_channels`."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from crossfade.graph.operators import arguments
from crossfade.shard.tensor.plan_channel_factors import ChannelFactor, Channels, keep, sizes_of

BY_CHANNEL = {
    "aten::batch_norm",
    *(
        f"aten::{kind}{size}d"
        for kind in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "upsample_nearest")
        for size in (1, 2, 3)
    ),
    "aten::upsample_linear1d",
    "aten::upsample_bilinear2d",
    "aten::upsample_bicubic2d",
}
"""Operators of images, `[batch, channels, ...]`, that compute each channel by itself."""


def convolved(node: fx.Node, source: fx.Node, channels: Channels) -> Channels | None:
    """Each channel by itself, or each group of channels; nothing else is split of a convolution."""
    given, dim = arguments(node), node.meta["val"].ndim - len(sizes_of(arguments(node)["weight"])) + 1
    before, after, groups, first = sizes_of(source)[dim], sizes_of(node)[dim], given["groups"], channels.first
    if source is not given["input"] or groups == 1:
        return None
    if groups == before == after:
        return keep(channels, lambda factor: factor if factor.dim <= dim else None)
    each = before // groups
    if first.dim != dim or first.outer != 1 or (first.size * first.inner) != before:
        return None
    if first.inner % each == 0:  # a step is several groups
        return replace(channels, factors=(replace(first, inner=first.inner * after // before),))
    if each % first.inner or first.size * first.inner % each:
        return None
    return replace(channels, factors=(ChannelFactor(dim, groups, inner=after // groups),))


def normed_in_groups(node: fx.Node, source: fx.Node, channels: Channels) -> Channels | None:
    """As many groups as a step along the channels is made of stay apart, or as many steps as a group is made of."""
    groups, size, first = arguments(node)["num_groups"], sizes_of(source)[1], channels.first
    if first.dim != 1 or first.outer != 1 or groups == 1 or source is not arguments(node)["input"]:
        return None
    each = size // groups
    if first.inner % each == 0:
        return replace(channels, factors=(first,))
    return None if each % first.inner else replace(channels, factors=(ChannelFactor(1, groups, inner=each),))


def by_channel(node: fx.Node, source: fx.Node, channels: Channels) -> Channels | None:
    """Computed for each channel by itself, and over positions."""
    return replace(channels, factors=(channels.first,)) if channels.first.dim == 1 else None


def rolled(node: fx.Node, source: fx.Node, channels: Channels) -> Channels | None:
    """Fine along dims that hold no channels."""
    dims = {dim % len(sizes_of(node)) for dim in arguments(node)["dims"]}
    return keep(channels, lambda factor: None if not dims or factor.dim in dims else factor)
