"""Parts of values along a dim: what slices and the pieces of splits are."""

from __future__ import annotations

import operator
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from crossfade.graph.operators import arguments
from crossfade.graph.private import statically_equal

_aten = torch.ops.aten
_EVEN = (_aten.split.Tensor, _aten.chunk.default)
SPLITS = (*_EVEN, _aten.split_with_sizes.default)
"""Operators that cut a value into a list of parts."""


@dataclass(frozen=True)
class Part:
    """What lies from `start` to `stop` of a value along the dim in question; `node` is that already, if there is one.

    Where `start` is not `proved`, it may lie beyond the value's end: then the part is empty, and its bounds are wrong.
    """

    source: fx.Node
    start: Any
    stop: Any
    node: fx.Node | None
    proved: bool = True

    def is_expressible(self, dim: int) -> bool:
        """Whether it is there, or can be cut with bounds that are known numbers."""
        known = isinstance(self.start, int) and (isinstance(self.stop, int) or self.is_last(dim))
        return self.node is not None or (self.proved and known)

    def is_last(self, dim: int) -> bool:
        """Whether it provably ends where its source does."""
        return statically_equal(self.stop, size_along(self.source, dim))

    def bounds(self) -> tuple[int, int]:
        """What to slice the source by, once that is known to be expressible."""
        return self.start, self.stop if isinstance(self.stop, int) else sys.maxsize


def part_inside(source: fx.Node, start: Any, stop: Any, dim: int) -> Part:
    """A part that is provably inside its source; all of it is the source itself."""
    part = Part(source, start, stop, None)
    whole = statically_equal(start, 0) and part.is_last(dim)
    return Part(source, start, stop, source) if whole else part


def size_along(node: fx.Node, dim: int) -> Any:
    """A value's size along a dim."""
    return node.meta["val"].shape[dim]


def dim_of(node: fx.Node, rank: int) -> int:
    """The dim that an operator is given, counted from the first of `rank`."""
    return arguments(node)["dim"] % rank if rank else 0


def as_part(node: fx.Node, dim: int) -> Part | None:
    """A slice by steps of one or a piece of a split, along this dim; None if it is neither."""
    if node.target is _aten.slice.Tensor:
        return _as_slice(node, dim)
    if node.target is operator.getitem:
        return _as_piece(node, dim)
    return None


def _as_slice(node: fx.Node, dim: int) -> Part | None:
    given = arguments(node)
    source, step, start = given["self"], given["step"], given["start"]
    if dim_of(node, source.meta["val"].dim()) != dim or type(step) is not int or step != 1:
        return None
    if isinstance(start, fx.Node):
        start = start.meta["val"]
        if isinstance(start, int):  # an example of a number that is given when the program runs
            return None
    start = 0 if start is None else start
    size = size_along(source, dim)
    if isinstance(start, int) and isinstance(size, int):
        start = min(max(start + size if start < 0 else start, 0), size)
    elif isinstance(start, int) and start < 0:
        return None
    proved = isinstance(start, int) and (start == 0 or isinstance(size, int))
    return Part(source, start, start + size_along(node, dim), node, proved)


def _as_piece(node: fx.Node, dim: int) -> Part | None:
    split, index = node.args
    if not isinstance(split, fx.Node) or split.target not in SPLITS or not isinstance(index, int):
        return None
    source, pieces = arguments(split)["self"], split.meta["val"]
    if dim_of(split, source.meta["val"].dim()) != dim:
        return None
    index += len(pieces) if index < 0 else 0
    even = split.target in _EVEN
    start = index * pieces[0].shape[dim] if even else sum(piece.shape[dim] for piece in pieces[:index])
    return Part(source, start, start + pieces[index].shape[dim], node)
