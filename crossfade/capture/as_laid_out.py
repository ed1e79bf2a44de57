"""Capture of operators whose traced form would lay out memory, or draw random numbers, in another order than eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from crossfade.graph.private import TorchDispatchMode, suggest_memory_format

_aten = torch.ops.aten


class AsLaidOut(TorchDispatchMode):
    """Draws numbers in the order of memory, and describes layouts, as eager torch does; to be entered while tracing.

    `bernoulli_` fills memory from its beginning, but the functional operator that tracing makes of it numbers
    elements in the order of their indices. What fake tensors say of a few operators' strides is not what the CPU's
    kernels do; a copy states it.

        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> def draw(x):
        ...     with AsLaidOut():
        ...         return torch.empty_like(x).bernoulli_(0.5)
        >>> graph = make_fx(draw)(torch.ones(2, 3).t()).graph
        >>> [node.name for node in graph.nodes if node.op == "call_function"]
        ['empty_like', 'permute', 'bernoulli_']
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        special = _SPECIAL.get(func)
        return special(func, *args, **(kwargs or {})) if special is not None else func(*args, **(kwargs or {}))


def _in_memory_order(draw: Any, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Draw in place into a view of a tensor whose dims come in the order in which they lie in memory."""
    order = sorted(range(value.dim()), key=lambda dim: -value.stride()[dim])
    draw(value if order == list(range(value.dim())) else value.permute(order), *args, **kwargs)
    return value


def _first_in_its_format(operator: Any, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Results of which the first is laid out plainly, or with channels last where the operand is."""
    result = operator(value, *args, **kwargs)
    several = isinstance(result, (tuple, list))
    first = (result[0] if several else result).contiguous(memory_format=suggest_memory_format(value))
    return (first, *result[1:]) if several else first


_SPECIAL: dict[Any, Callable[..., Any]] = {
    _aten.bernoulli_.float: _in_memory_order,
    _aten.native_batch_norm.default: _first_in_its_format,
    _aten._native_batch_norm_legit.default: _first_in_its_format,
    _aten._native_batch_norm_legit.no_stats: _first_in_its_format,
    _aten._native_batch_norm_legit_functional.default: _first_in_its_format,
    _aten.native_channel_shuffle.default: _first_in_its_format,
    _aten.channel_shuffle.default: _first_in_its_format,
}
