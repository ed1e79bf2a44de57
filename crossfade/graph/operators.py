"""What operators say about themselves, remembered: their arguments by name, and the defaults."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import fx

from crossfade.graph.private import schema_of

_aten = torch.ops.aten

Answer = TypeVar("Answer")


def remembered(question: Callable[[Any], Answer]) -> Callable[[Any], Answer]:
    """Ask once for each operator. Like `functools.cache`, but by identity: torch's operators hash in Python, slowly.

    A target that ends is forgotten: what runs a compiled region or replays a CUDA graph is called by a node too, and
    holds all the memory that it works on.

    >>> @remembered
    ... def name_of(target):
    ...     return str(target)
    >>> name_of(torch.ops.aten.add.Tensor)
    'aten.add.Tensor'
    """
    known: dict[int, tuple[Any, Answer]] = {}

    @functools.wraps(question)
    def answer(target: Any) -> Answer:
        key = id(target)  # its own for as long as the entry is there
        entry = known.get(key)
        if entry is None:
            try:
                kept: Any = weakref.ref(target, lambda _: known.pop(key, None))
            except TypeError:  # a name
                kept = target
            entry = known[key] = kept, question(target)
        return entry[1]

    return answer


def by_name(target: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[Any, Any]:
    """Arguments by their names in the operator's schema; by position where there is none."""
    names = argument_names(target)
    return {(names[i] if i < len(names) else i): item for i, item in enumerate(args)} | dict(kwargs)


@remembered
def argument_names(target: Any) -> list[str]:
    """The names of an operator's arguments in order; none where it has no schema."""
    schema = schema_of(target)
    return [item.name for item in schema.arguments] if schema is not None else []


@remembered
def defaults_of(target: Any) -> dict[str, Any]:
    """The defaults of an operator's arguments, where they have one."""
    schema = schema_of(target)
    items = schema.arguments if schema is not None else []
    return {item.name: item.default_value for item in items if item.has_default_value()}


def arguments(node: fx.Node) -> dict[Any, Any]:
    """All arguments of a call by name, those left out by their defaults.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> arguments(graph.call_function(torch.ops.aten.sum.dim_IntList, (x, [0])))
    {'keepdim': False, 'dtype': None, 'self': x, 'dim': [0]}
    """
    return {**defaults_of(node.target), **by_name(node.target, node.args, node.kwargs)}


REORDERING = frozenset(
    {
        _aten.permute.default, _aten.transpose.int, _aten.swapaxes.default, _aten.t.default, _aten.mT.default,
        _aten.numpy_T.default,
    }
)  # fmt: skip
"""Operators that only put dims in another order."""

RENAMING = frozenset({_aten.detach.default, _aten.alias.default})
"""Operators that only give a value another name."""


def permutation_of(node: fx.Node) -> list[int]:
    """The order of dims that an operator makes which does nothing else: one of `REORDERING`.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> x.meta["val"] = torch.empty(2, 3, 4)
    >>> permutation_of(graph.call_function(torch.ops.aten.transpose.int, (x, 0, -1)))
    [2, 1, 0]
    """
    given = arguments(node)
    rank = given.pop("self").meta["val"].dim()
    if node.target is _aten.permute.default:
        return [dim % rank for dim in given["dims"]]
    order = list(range(rank))
    if node.target is _aten.numpy_T.default:
        return order[::-1]
    if rank > 1:
        first, other = given.values() or (-2, -1)
        order[first], order[other] = order[other], order[first]
    return order
