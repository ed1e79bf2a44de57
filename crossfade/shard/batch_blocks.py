"""Where samples lie within a dim that was made of several: `[time, batch]` flattened is not `[batch, time]` flattened.

A dim that holds samples is so many blocks, each with a run of elements of every sample in turn: one block if samples
are its outermost part, as many as there are time steps if these are.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph.effects import is_random
from crossfade.graph.operators import arguments

BLOCKS = "batch_blocks"

_aten = torch.ops.aten
_VIEWS = {_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default}
_PIECES = {_aten.slice.Tensor, _aten.split.Tensor, _aten.split_with_sizes.default}

GrowingDims = Callable[[fx.Node], tuple[int, ...]]
KnownBlocks = Callable[[fx.Node], int | None]


def mark_blocks(graph: fx.Graph, samples: int, growing: GrowingDims) -> None:
    """Note on every node with one dim of samples how many blocks that dim is; None where that is not known."""
    for node in graph.nodes:
        if len(growing(node)) == 1:
            node.meta[BLOCKS] = find_blocks(node, samples, growing)
    for node in graph.nodes:
        if node.op == "call_function" and is_random(node) and blocks_of(node) is None:
            node.meta[BLOCKS] = _as_used(node, growing)


def blocks_of(node: fx.Node) -> int | None:
    """The blocks of a node's dim of samples: 1 by default, None if it is not known."""
    return node.meta.get(BLOCKS, 1)


def find_blocks(node: fx.Node, samples: int, growing: GrowingDims, known: KnownBlocks = blocks_of) -> int | None:
    """The blocks of the one dim of samples of a node, from those of its operands; None where they do not tell."""
    size = _size(node, growing)
    if size == samples or node.op == "placeholder":
        return 1
    source: Any = node.args[0] if node.target is operator.getitem else node
    operands = [
        operand for operand in source.all_input_nodes if len(growing(operand)) == 1 and known(operand) is not None
    ]
    if source.target is _aten.cat.default and all(_size(operand, growing) < size for operand in operands):
        return _joined(source, samples, growing, known)
    for operand in operands:
        if source.target in _VIEWS:
            return _whole_number(_cycles(operand, growing, known), _before(node, growing))
        if _size(operand, growing) == size:
            return known(operand)
        if source.target in _PIECES or source.target is _aten.repeat.default:
            return _whole_number((known(operand) or 0) * size, _size(operand, growing))
    return None


def takes_some_samples(node: fx.Node, growing: GrowingDims, known: KnownBlocks) -> bool:
    """Whether a node cuts a dim of samples, or reshapes it, otherwise than between its blocks or within every sample.

    Half of the samples of each part of a batch are others than half of the whole batch's.
    """
    if node.target in _VIEWS and len(growing(node)) == 1:
        source: Any = node.args[0]
        cycles = _cycles(source, growing, known) if len(growing(source)) == 1 else 0
        return bool(cycles % _before(node, growing))
    if node.target not in _PIECES:
        return False
    given = arguments(node)
    source, dim = given["self"], given["dim"]
    value = source.meta["val"]
    if growing(source) != (dim % value.dim(),):
        return False
    whole, blocks = value.shape[dim], known(source)
    pieces = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else [node.meta["val"]]
    sizes = [piece.shape[dim] for piece in pieces]
    if sizes == [whole]:
        return False
    if (step := given.get("step", 1)) > 1:
        return bool(sizes[0] * step != whole)
    start = given.get("start") or 0
    start = start if start >= 0 else start + whole
    return blocks is not None and any(blocks * size % whole for size in (start, *sizes))


def _joined(node: fx.Node, samples: int, growing: GrowingDims, known: KnownBlocks) -> int | None:
    """The blocks of concatenated values, if each block has as many elements of every sample."""
    parts: Any = node.args[0]
    blocks = [known(part) if len(growing(part)) == 1 else None for part in parts]
    if any(count is None for count in blocks):
        return None
    runs = {_size(part, growing) / (count or 1) / samples for part, count in zip(parts, blocks, strict=True)}
    return sum(count or 0 for count in blocks) if len(runs) == 1 else None


def _as_used(node: fx.Node, growing: GrowingDims) -> int | None:
    """The blocks of a value drawn for given sizes, from what it is used for."""
    for user in node.users:
        known = blocks_of(user) if len(growing(user)) == 1 else None
        if known is not None and user.target in _VIEWS:
            return _whole_number(_cycles(user, growing, blocks_of), _before(node, growing))
        if known is not None and _size(user, growing) == _size(node, growing):
            return known
    return None


def _cycles(node: fx.Node, growing: GrowingDims, known: KnownBlocks) -> int:
    """How often the samples recur when all elements are counted: what a reshape does not change."""
    return (known(node) or 0) * _before(node, growing)


def _before(node: fx.Node, growing: GrowingDims) -> int:
    """The number of elements along the dims ahead of the samples'."""
    return math.prod(_value(node).shape[: growing(node)[0]])


def _size(node: fx.Node, growing: GrowingDims) -> int:
    return _value(node).shape[growing(node)[0]]


def _value(node: fx.Node) -> Tensor:
    value = node.meta["val"]
    return value[0] if isinstance(value, (tuple, list)) else value


def _whole_number(number: int, divisor: int) -> int | None:
    return number // divisor if divisor and number % divisor == 0 and number else None
