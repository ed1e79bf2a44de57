"""Parameters that an optimizer updates alike: its step is traced for one of them, and repeated for the others.

Only for optimizers of torch that are known to update each parameter by itself: code of others may look at several at
once, count them, or know some by their identity.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, optim
from torch.optim import Optimizer

_EACH_BY_ITSELF = (
    optim.Adadelta,
    optim.Adafactor,
    optim.Adagrad,
    optim.Adam,
    optim.Adamax,
    optim.AdamW,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)
"""Their code for one parameter at a time is a loop over the parameters of a group, and passes nothing on in it."""


def updates_each_by_itself(optimizer: Optimizer) -> bool:
    """Whether an optimizer is one of torch's, with torch's own step, that updates every parameter by itself.

    >>> class Own(torch.optim.SGD):
    ...     pass
    >>> weights = [torch.zeros(1)]
    >>> [updates_each_by_itself(kind(weights, lr=0.1)) for kind in (torch.optim.SGD, Own)]
    [True, False]
    """
    step = inspect.unwrap(type(optimizer).step)
    return type(optimizer) in _EACH_BY_ITSELF and step.__module__.startswith("torch.optim.")


def alike(
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
    values: Mapping[str, Sequence[Tensor]],
    states: Mapping[str, Mapping[str, Any]],
) -> dict[str, str]:
    """For each parameter, in the order in which a step comes to them, the first one that is updated as it is.

    `values` has what a parameter's update computes with, beside its state: itself and its gradient. Empty where
    something is not known from the outside: sizes that are symbols, numbers in a state.
    """
    group_of = {member: index for index, group in enumerate(optimizer.param_groups) for member in group["params"]}
    first: dict[Hashable, str] = {}
    found: dict[str, str] = {}
    for name in sorted(values, key=lambda name: group_of[parameters[name]]):
        tensors = [*values[name], *states[name].values()]
        if not all(_is_known(tensor) for tensor in tensors):
            return {}
        described = tuple(
            (tuple(t.shape), t.stride(), t.storage_offset(), t.dtype, t.device, type(t), t.requires_grad)
            for t in tensors
        )
        key = group_of[parameters[name]], tuple(states[name]), described
        found[name] = first.setdefault(key, name)
    return found


def _is_known(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    return all(type(size) is int for size in (*value.shape, *value.stride(), value.storage_offset()))


def may_repeat(graph: fx.Graph, numbers: Collection[fx.Node]) -> bool:
    """Whether a traced update may be repeated for other tensors: it has no tensors of its own, and whatever it asks a
    tensor for is a float. Sizes and conditions are told apart by their expressions, which would be the same again."""
    return not any(
        node.op == "get_attr"
        or (node not in numbers and isinstance(node.meta.get("val"), torch.SymInt | torch.SymBool))
        for node in graph.nodes
    )
