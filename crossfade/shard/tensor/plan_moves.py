"""Casts and transposes: where they move a value's dims."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from crossfade.graph.operators import arguments

aten = torch.ops.aten

_PASS_ON = {
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten.alias.default,
    aten.detach.default,
    aten.detach_.default,
    aten.clone.default,
    aten.contiguous.default,
    aten._to_copy.default,
}


def moved_dims(node: fx.Node, rank: int) -> tuple[int, ...] | None:
    """Which dim of its input each dim of a cast or transpose is; None for other nodes."""
    order = list(range(rank))
    if node.target in _PASS_ON:
        return tuple(order)
    given = arguments(node) if node.op == "call_function" else {}
    if node.target in (aten.t.default, aten.numpy_T.default):
        return tuple(reversed(order))
    if node.target in _SWAPS and rank > 1:
        first, other = (given[name] for name in _SWAPS[node.target]) if _SWAPS[node.target] else (-2, -1)
        order[first], order[other] = order[other], order[first]
        return tuple(order)
    if node.target is aten.permute.default:
        return tuple(order[dim] for dim in given["dims"])
    return None


_SWAPS: dict[Any, tuple[str, ...]] = {
    aten.transpose.int: ("dim0", "dim1"),
    aten.swapdims.default: ("dim0", "dim1"),
    aten.swapaxes.default: ("axis0", "axis1"),
    aten.mT.default: (),
}
"""Operators that swap two dims, and how they name them; the last two if they do not."""
