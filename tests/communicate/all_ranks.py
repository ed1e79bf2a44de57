"""All ranks of a program with collectives in one process: node by node for every rank, collectives done by hand.

An oracle beside real ranks, for thousands of small programs of one group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph import collectives
from crossfade.graph.collectives import Kind
from crossfade.graph.own_part import OPERATOR
from crossfade.graph.program import Program


def run_all(program: Program, ranks: int, value_of: Callable[[int, str, Any], Any]) -> list[list[Any]]:
    """The results of every rank; `value_of(rank, name, like)` gives each rank its inputs."""
    values: list[dict[fx.Node, Any]] = [
        {node: value_of(rank, item.name, node.meta["val"]) for item, node in program.named_inputs()}
        for rank in range(ranks)
    ]
    for node in program.graph.nodes:
        if node.op == "get_attr":
            made: list[Any] = [program.constants[str(node.target)]] * ranks
        elif node.op == "call_function":
            made = _made(node, values)
        else:
            continue
        for known, rank in zip(values, made, strict=True):
            known[node] = rank
    return [list(fx.map_arg(tuple(program.results), known.__getitem__)) for known in values]


def _made(node: fx.Node, values: list[dict[fx.Node, Any]]) -> list[Any]:
    ranks = len(values)
    collective = collectives.view(node)
    if collectives.is_wait(node):
        return [known[collectives.waited_value(node)] for known in values]
    if collective is not None:
        sent = [known[collective.inputs[0]] for known in values]
        if collective.kind is Kind.ALL_GATHER:
            return [torch.cat(sent)] * ranks
        total: Tensor = torch.stack(sent).sum(0)
        total = total / ranks if collective.reduce_op == "avg" else total
        return [total] * ranks if collective.kind is Kind.ALL_REDUCE else list(total.chunk(ranks))
    calls = [fx.map_arg((node.args, node.kwargs), known.__getitem__) for known in values]
    if node.target is OPERATOR:
        return [args[0].chunk(ranks, args[1])[rank].contiguous() for rank, (args, _) in enumerate(calls)]
    return [node.target(*args, **kwargs) for args, kwargs in calls]  # type: ignore[operator]


def drawn(alike: Callable[[str], bool], dtype: torch.dtype | None = None) -> Callable[[int, str, Any], Any]:
    """Inputs that are the same at every call, and on all ranks where they are alike."""

    def value_of(rank: int, name: str, like: Any) -> Any:
        seed = sum(map(ord, name)) * 64 + (0 if alike(name) else rank + 1)
        generator = torch.Generator().manual_seed(seed)
        if not isinstance(like, Tensor):
            return 0.5
        if not like.is_floating_point():
            return torch.randint(0, 4, tuple(like.shape), generator=generator)
        return torch.randn(tuple(like.shape), generator=generator, dtype=torch.float64).to(dtype or like.dtype)

    return value_of


def largest_difference(results: list[list[Any]], other: list[list[Any]]) -> float:
    """Over all ranks and results."""
    pairs = [pair for ours, theirs in zip(results, other, strict=True) for pair in zip(ours, theirs, strict=True)]
    assert all(a.shape == b.shape and a.dtype is b.dtype for a, b in pairs)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)
