"""Samples named by their places: a part of a batch counts them from its own first one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph.operators import arguments
from crossfade.graph.program import Program
from crossfade.shard.mixed_samples import operator_name

_COUNTING = frozenset({"arange", "linspace", "logspace"})
_LISTED = frozenset({"index", "_unsafe_index", "index_put", "_unsafe_index_put"})
"""Operators that take a list of indices, one for each of the first dims."""

_ALONG_DIM = frozenset({"index_select", "gather", "scatter", "scatter_add", "scatter_reduce"})
_ALONG_DIM |= {"index_add", "index_copy", "index_fill", "index_reduce"}
"""Operators that take an index along one dim."""

_WRITE = frozenset({"index_put", "_unsafe_index_put", "put", "scatter", "scatter_add", "scatter_reduce"})
_WRITE |= {"index_add", "index_copy", "index_fill", "index_reduce"}
"""Operators that write where an index says."""

# fmt: off
_CARRY = frozenset({
    "view", "_unsafe_view", "reshape", "expand", "unsqueeze", "squeeze", "permute", "transpose", "t", "clone", "detach",
    "alias", "slice", "select", "repeat", "cat", "stack", "_to_copy", "lift_fresh", "lift_fresh_copy", "copy",
    "add", "sub", "mul", "div", "floor_divide", "clamp", "where", "index", "gather",
    "index_put", "_unsafe_index_put", "scatter", "index_copy",
})
# fmt: on
"""Operators whose result still names places, if it is one of whole numbers."""


class Places:
    """Which values of a walk name samples of one part by their places, and which name those of the whole batch.

    `torch.arange(len(x))` names those of a part, and is right as an index along a dim that holds the part's samples.
    Numbers that come with the batch name samples of the whole batch, and are wrong there.
    """

    def __init__(self, program: Program, grown: Mapping[fx.Node, tuple[int, ...]], inputs: Set[fx.Node]) -> None:
        self._program, self._grown = program, grown
        self._of_part, self._with_batch = set[fx.Node](), set(inputs)
        self._fixed = set[fx.Node]()
        """What is made of nothing but constants."""

    def reason_against(self, node: fx.Node) -> str:
        """Note what a node names, its operands being known; returns why a part of the batch computes otherwise."""
        self._of_part.discard(node)
        self._with_batch.discard(node)
        if node.op == "get_attr" or operator_name(node.target) in _COUNTING:
            return self._counted(node)
        grown = self._grown.get(_indexed(node), ())
        if grown and self._writes_some(node, grown):
            return "writes samples of one part by their places"
        indices = list(_indices(node))
        along = {index for index, dim in indices if dim in grown}
        if not self._with_batch.isdisjoint(along):
            return "takes samples of one part by their places"
        if operator_name(node.target) in _WRITE and not self._fixed.isdisjoint(along):
            return "writes samples of one part by their places"
        if node.op == "call_function" and self._fixed.issuperset(node.all_input_nodes):
            self._fixed.add(node)
        if not self._of_part.isdisjoint(index for index, dim in indices if dim not in grown):
            return "numbers the samples of one part"
        named = [value for value in node.all_input_nodes if value not in along]
        if not self._of_part.isdisjoint(named):
            if not _carries(node):
                return "numbers the samples of one part"
            self._of_part.add(node)
        elif _carries(node) and not self._with_batch.isdisjoint(named):
            self._with_batch.add(node)
        return ""

    def _writes_some(self, node: fx.Node, samples: tuple[int, ...]) -> bool:
        """Whether a node writes over some samples that its arguments name, or what belongs to none into one by one."""
        name, given = operator_name(node.target), arguments(node)
        if name == "masked_scatter":
            return not self._grown.get(given["source"])
        if name not in ("select_scatter", "slice_scatter"):
            return False
        value, written = given["self"].meta["val"], given["src"].meta["val"]
        dim = given["dim"] % value.dim()
        return dim in samples and (name == "select_scatter" or written.shape[dim] != value.shape[dim])

    def _counted(self, node: fx.Node) -> str:
        """What is made without the batch, and has a number for each sample."""
        grown = self._grown.get(node, ())
        if not grown:
            self._fixed.add(node)
        if not grown or (node.op == "get_attr" and _is_uniform(self._program.constants.get(str(node.target)), grown)):
            return ""
        if not _is_whole(node):
            return "numbers the samples of one part"
        self._of_part.add(node)
        return ""


def _indexed(node: fx.Node) -> Any:
    return node.args[0] if node.args else None


def _indices(node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    """The indices that an operator takes, each with the dim of its first argument that it is along."""
    name = operator_name(node.target)
    if name in _LISTED:
        for dim, index in enumerate(arguments(node)["indices"]):
            if isinstance(index, fx.Node) and _is_whole(index):
                yield index, dim
    elif name in _ALONG_DIM:
        given = arguments(node)
        yield given["index"], given["dim"] % max(1, given["self"].meta["val"].dim())
    elif name == "put":  # as if all dims were one
        given = arguments(node)
        yield from ((given["index"], dim) for dim in range(given["self"].meta["val"].dim()))


def _carries(node: fx.Node) -> bool:
    return operator_name(node.target) in _CARRY and _is_whole(node)


def _is_whole(node: fx.Node) -> bool:
    """Whether a value has whole numbers that may be places; masks are none."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32)


def _is_uniform(constant: Any, dims: tuple[int, ...]) -> bool:
    """Whether a constant has the same numbers for every sample."""
    return isinstance(constant, Tensor) and all(bool((constant == constant.narrow(dim, 0, 1)).all()) for dim in dims)
