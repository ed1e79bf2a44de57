"""Parts of values whatever shape they are seen in: elements and slices that a join puts side by side again."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph.operators import arguments
from crossfade.graph.private import statically_equal
from crossfade.graph.program import Program
from crossfade.simplify.canonicalize_views import is_view
from crossfade.simplify.parts import as_part, dim_of, size_along

_aten = torch.ops.aten
_SHAPES_ONLY = frozenset(
    {
        _aten.view.default, _aten._unsafe_view.default, _aten.reshape.default, _aten.unsqueeze.default,
        _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.flatten.using_ints, _aten.unflatten.int,
    }
)  # fmt: skip
"""Operators that keep the elements in their order and only change the shape."""


@dataclass(frozen=True)
class Block:
    """What lies from `start` to `stop` of a value along `dim`, in any shape; `taken` if something had to be cut out."""

    source: fx.Node
    dim: int
    start: int
    stop: int
    taken: bool

    @property
    def length(self) -> int:
        """How many elements of its dim it has."""
        return self.stop - self.start

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        if not self.taken:
            return math.prod(self.source.meta["val"].shape)
        return math.prod(self.source.meta["val"].shape) // size_along(self.source, self.dim) * self.length

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its value."""
        return not self.taken or statically_equal(self.length, size_along(self.source, self.dim))

    def cut(self, value: Tensor) -> Tensor:
        """The block of the value that its source has."""
        return value if self.is_whole else _aten.slice.Tensor(value, self.dim, self.start, self.stop)

    def is_seen_as(self, program: Program, shape: Sequence[int]) -> bool:
        """Whether it takes no copy to see the block in a shape."""
        with torch.no_grad(), program.fake_mode:
            return is_view(self.cut(self.source.meta["val"]), shape)


def element_of(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """What a `select` or an element of an `unbind` is of, along which dim and which one; None if it is neither.

    >>> from crossfade.graph.text import parse
    >>> x, a, _ = parse('''
    ... x: f32[4, 2] = input("x")
    ... a: f32[4] = aten.select.int(x, -1, 1)
    ... return output("a", a)
    ... ''').graph.nodes
    >>> element_of(a)
    (x, 1, 1)
    """
    taker = node.args[0] if node.target is operator.getitem else node
    if not isinstance(taker, fx.Node) or taker.target not in (_aten.unbind.int, _aten.select.int):
        return None
    source = arguments(taker)["self"]
    dim = dim_of(taker, source.meta["val"].dim())
    index = node.args[1] if node.target is operator.getitem else arguments(taker)["index"]
    size = size_along(source, dim)
    if not isinstance(index, int) or (index < 0 and not isinstance(size, int)):
        return None
    if isinstance(size, int) and not -size <= index < size:  # fails when it runs, and shall go on failing
        return None
    return source, dim, index + size if index < 0 else index


def runs_of(join: fx.Node, inputs: Sequence[fx.Node], dim: int) -> list[Block] | None:
    """The fewer blocks that a cat or stack along a dim is made of, in order; None if its inputs are no neighbours.

    An input is a block of a value if the elements before it, and those inside of it, lie together in both shapes: then
    blocks side by side in the value are side by side in the join, however many dims the value has.
    """
    shape = join.meta["val"].shape
    if any(isinstance(size, int) and not size for size in shape):  # nothing is anywhere in it
        return None
    before = math.prod(shape[:dim])
    length = 1 if join.target is _aten.stack.default else None
    runs: list[list[Block | None]] = []
    for value in inputs:
        block = _block_before(value, before)
        last = runs[-1][-1] if runs else None
        if last and block and last.stop == block.start and (last.source, last.dim) == (block.source, block.dim):
            runs[-1].append(block)
        else:
            runs.append([block])
    if len(runs) == len(inputs) and (len(runs) > 1 or runs[0][0] is None):
        return None
    found, firsts = [], itertools.accumulate(map(len, runs), initial=0)
    for run, place in zip(runs, firsts, strict=False):
        first, last = run[0], run[-1]
        if first is None or last is None or len(run) == 1 < len(runs):
            value = inputs[place]
            found.append(Block(value, dim, 0, size_along(value, dim) if length is None else length, False))
        else:
            found.append(Block(first.source, first.dim, first.start, last.stop, True))
    return found


def _block_before(value: fx.Node, before: Any) -> Block | None:
    """The block that a value is of another one, whose dims before the cut hold so many elements."""
    while value.target in _SHAPES_ONLY:
        value = value.all_input_nodes[0]
    element = element_of(value)
    if element is not None:
        source, dim, start = element
        stop = start + 1
    else:
        taker = _taker_of(value)
        rank = arguments(taker)["self"].meta["val"].dim() if taker is not None else 0
        part = as_part(value, dim_of(taker, rank)) if taker is not None and rank else None
        if part is None or not part.proved or not isinstance(part.start, int) or not isinstance(part.stop, int):
            return None
        source, dim, start, stop = part.source, dim_of(taker, rank), part.start, part.stop  # type: ignore[arg-type]
    shape = source.meta["val"].shape
    return Block(source, dim, start, stop, True) if statically_equal(math.prod(shape[:dim]), before) else None


def _taker_of(value: fx.Node) -> fx.Node | None:
    """The operator that cuts a slice or a piece, whose dim is that of the cut."""
    taker: Any = value.args[0] if value.target is operator.getitem else value
    cuts = (_aten.slice.Tensor, _aten.split.Tensor, _aten.split_with_sizes.default, _aten.chunk.default)
    return taker if isinstance(taker, fx.Node) and taker.target in cuts else None
