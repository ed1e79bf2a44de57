"""What a value meets in a graph: what it is added to, and who only asks for its sizes or its dtype."""

from __future__ import annotations

import torch
from torch import fx

from crossfade.shard.tensor.plan_channel_factors import sizes_of

aten = torch.ops.aten

NO_VALUES = {
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
}
"""Operators that look at a tensor's shape and not at what is in it."""


def adds_earlier(node: fx.Node, projection: fx.Node) -> bool:
    """Whether a node adds a value of the same size that was there before the projection."""
    if node.target is not aten.add.Tensor:
        return False
    others = [source for source in node.all_input_nodes if source < projection]
    return any(sizes_of(source) == sizes_of(node) for source in others)


def is_value(node: fx.Node) -> bool:
    """Whether a node computes tensors: assertions and sizes do not."""
    value = node.meta.get("val") if node.target not in NO_VALUES else None
    return isinstance(value, torch.Tensor) or (isinstance(value, list | tuple) and bool(value))


_LENT = {
    aten.type_as.default,
    aten.to.other,
    aten.expand_as.default,
    aten.view_as.default,
    aten.reshape_as.default,
}
"""Operators of which another operand than the first only lends its sizes or its dtype."""


def lends(node: fx.Node, source: fx.Node) -> bool:
    """Whether a node asks a value for nothing but its sizes or dtype."""
    return node.target in _LENT and node.args[0] is not source
