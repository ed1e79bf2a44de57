"""All ranks of a program in one process, as in `all_ranks`, also of one whose matmuls travel: these by definition.

What is written in place stays each rank's own.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph import collectives
from crossfade.graph.collective_matmul import GATHER_OPERATOR, MEANWHILE_OPERATOR, SCATTER_OPERATOR
from crossfade.graph.collectives import Kind
from crossfade.graph.own_part import OPERATOR as OWN_PART
from crossfade.graph.program import Program

Values = dict[fx.Node, Any]


def run_ranks(program: Program, inputs: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The results of every rank, node by node: collectives, and matmuls that travel, done by their definitions."""
    ranks: list[Values] = [dict(zip(program.placeholders, given, strict=True)) for given in inputs]
    for node in program.graph.nodes:
        if node.op == "get_attr":
            made = [program.constants[str(node.target)]] * len(ranks)
        elif node.op == "call_function":
            made = _made(node, ranks)
        else:
            continue
        for values, rank in zip(ranks, made, strict=True):
            values[node] = rank
    return [list(fx.map_arg(tuple(program.results), values.__getitem__)) for values in ranks]


def _made(node: fx.Node, ranks: Sequence[Values]) -> list[Any]:
    calls = [fx.map_arg((node.args, node.kwargs), values.__getitem__) for values in ranks]
    if collectives.is_wait(node):
        return [args[0] for args, _ in calls]
    by_hand = _BY_HAND.get(node.target)
    if by_hand is not None:
        return by_hand([args for args, _ in calls])
    collective = collectives.view(node)
    if collective is None:
        return [node.target(*args, **kwargs) for args, kwargs in calls]  # type: ignore[operator]
    sent = [values[collective.inputs[0]] for values in ranks]
    if collective.kind is Kind.ALL_GATHER:
        return [torch.cat(sent) for _ in ranks]
    total = _reduced(sent, collective.reduce_op)
    if collective.kind is Kind.ALL_REDUCE:
        return [total.clone() for _ in ranks]
    assert collective.kind is Kind.REDUCE_SCATTER
    return [part.clone() for part in total.chunk(len(ranks))]


def _reduced(parts: Sequence[Tensor], reduce_op: str | None) -> Tensor:
    total: Tensor = functools.reduce(operator.add, parts)
    return total / len(parts) if reduce_op == "avg" else total + 0


def _gather_matmul(calls: Sequence[Sequence[Any]]) -> list[list[Tensor]]:
    *_, dim, _, _, _, keep, _ = calls[0]
    whole = torch.cat([part for part, *_ in calls], dim)
    made = []
    for _, others, biases, _, products, *_ in calls:
        given = zip(products, others, biases, strict=True)
        results = [_multiplied(product, whole, other, bias) for product, other, bias in given]
        made.append([*results, whole.clone()] if keep else results)
    return made


def _matmul_scatter(calls: Sequence[Sequence[Any]]) -> list[Tensor]:
    dim, reduce_op = calls[0][5:7]
    total = _reduced([_multiplied(call[4], call[0], call[1], call[2]) for call in calls], reduce_op)
    return [part.clone(memory_format=torch.contiguous_format) for part in total.chunk(len(calls), dim)]


def _matmul_scatter_meanwhile(calls: Sequence[Sequence[Any]]) -> list[list[Tensor]]:
    scattered = _matmul_scatter(calls)
    return [
        [part, *(left @ other for left, other in zip(call[-1][::2], call[-1][1::2], strict=True))]
        for part, call in zip(scattered, calls, strict=True)
    ]


def _multiplied(product: str, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    made = torch.einsum(product, left, right)
    return (made if bias is None else made + bias).contiguous()


def _own_part(calls: Sequence[Sequence[Any]]) -> list[Tensor]:
    return [args[0].chunk(len(calls), args[1])[rank].contiguous() for rank, args in enumerate(calls)]


_BY_HAND: dict[Any, Callable[[Sequence[Sequence[Any]]], list[Any]]] = {
    GATHER_OPERATOR: _gather_matmul,
    SCATTER_OPERATOR: _matmul_scatter,
    MEANWHILE_OPERATOR: _matmul_scatter_meanwhile,
    OWN_PART: _own_part,
}
