"""Projections in a graph: multiplications of activations by a parameter, and what their results meet."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from crossfade.graph.operators import arguments
from crossfade.shard.tensor.plan_channel_factors import sizes_of
from crossfade.shard.tensor.plan_names import CONVOLUTIONS, Use

aten = torch.ops.aten

INPUTS: dict[Any, str] = {
    aten.linear.default: "input",
    aten.addmm.default: "mat1",
    aten.mm.default: "self",
    aten.matmul.default: "self",
    aten.bmm.default: "self",
    **dict.fromkeys(CONVOLUTIONS, "input"),
}
"""The activations of operators that multiply by a matrix."""

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


def multiplies(use: Use) -> bool:
    """Whether a use of a parameter is a projection."""
    if use.role == "expert":
        return True
    return use.role == "linear" and use.in_dim is not None and use.node is not None and use.node.target in INPUTS


def in_groups(use: Use) -> bool:
    """Whether a use of a parameter is a convolution of which each channel sees only those of its group."""
    return use.role == "linear" and use.in_dim is None


def back_of(use: Use) -> int:
    """How far from the last the dim is that a projection puts out, and the one of the activations contracted over."""
    if use.node is not None and use.node.target in CONVOLUTIONS:
        return len(sizes_of(arguments(use.node)["weight"])) - 1
    return 2 if use.left else 1


def activations_of(use: Use) -> fx.Node:
    """What a projection multiplies by its parameter."""
    assert use.node is not None
    given = arguments(use.node)
    if use.role != "expert":
        found = given[INPUTS[use.node.target]]
    else:
        found = given["mat2"] if use.left else use.node.args[0]
    assert isinstance(found, fx.Node)
    return found


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
