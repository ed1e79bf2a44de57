"""How a value lies over the ranks of one axis, and how a placement goes through a reshape.

DTensor's three words, `Replicate`, `Shard` and `Partial`. A shard may also be cut in blocks: the dim is `outer` blocks
(or blocks of the given `sizes`), and each block is split over all ranks. That is how fused weights are laid out, and
what a split dim becomes when a reshape merges it with one before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from crossfade.graph.private import size_expression


@dataclass(frozen=True)
class Replicate:
    """Whole and alike on every rank."""

    def __str__(self) -> str:
        return "replicated"


@dataclass(frozen=True)
class Shard:
    """Split along `dim`, which is `outer` equal blocks, or blocks of `sizes`, each split over all ranks.

    >>> str(Shard(1)), str(Shard(0, outer=3)), str(Shard(0, sizes=(4, 2, 2)))
    ('split on dim 1', 'split on dim 0 in 3 blocks', 'split on dim 0 in blocks of 4, 2, 2')
    """

    dim: int
    outer: Any = 1
    sizes: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.sizes:
            return f"split on dim {self.dim} in blocks of {', '.join(map(str, self.sizes))}"
        return f"split on dim {self.dim}" + (f" in {self.outer} blocks" if self.outer != 1 else "")

    def on(self, dim: int) -> Shard:
        """The same split of another dim."""
        return Shard(dim, self.outer, self.sizes)


@dataclass(frozen=True)
class Partial:
    """Every rank holds an addend; the value is their sum."""

    def __str__(self) -> str:
        return "a partial sum"


Placement = Replicate | Shard | Partial
REPLICATE, PARTIAL = Replicate(), Partial()


def in_blocks(dim: int, sizes: Sequence[int]) -> Shard:
    """A split in blocks of these sizes, in its plainest form.

    >>> in_blocks(0, (4, 4, 4)), in_blocks(0, (8,))
    (Shard(dim=0, outer=3, sizes=()), Shard(dim=0, outer=1, sizes=()))
    """
    if len(set(sizes)) == 1:
        return Shard(dim, outer=len(sizes))
    return Shard(dim, sizes=tuple(sizes))


def block_sizes(shard: Shard, size: int) -> tuple[int, ...]:
    """The sizes of a shard's blocks along a dim of known size."""
    return shard.sizes or (size // int(shard.outer),) * int(shard.outer)


def divides(shard: Shard, size: Any, ranks: int) -> bool:
    """Whether every block can be split evenly over the ranks, whatever the symbols stand for.

    >>> divides(Shard(0), 8, 4), divides(Shard(0, outer=2), 12, 4)
    (True, False)
    """
    if shard.sizes:
        return sum(shard.sizes) == size_expression(size) and all(block % ranks == 0 for block in shard.sizes)
    return _is_whole(size_expression(size) / size_expression(shard.outer) / ranks)


def reshaped(shard: Shard, before: Sequence[Any], after: Sequence[Any], ranks: int) -> Shard | None:
    """The placement of a reshaped value, such that reshaping the parts is all there is to do; None if there is none.

    Blocks follow each other through the whole value, each split over all ranks. The dim of the result in which every
    block is a multiple of the ranks, and in which the blocks recur a whole number of times, is the one that is
    split.

    >>> reshaped(Shard(2), (2, 12, 64), (2, 12, 4, 16), 2)  # heads apart
    Shard(dim=2, outer=1, sizes=())
    >>> reshaped(Shard(1), (2, 4, 12, 16), (8, 12, 16), 2)  # heads merged into the batch
    Shard(dim=0, outer=2, sizes=())
    >>> reshaped(Shard(0, sizes=(64, 32)), (96,), (6, 16), 2)  # heads of queries and of keys
    Shard(dim=0, outer=1, sizes=(4, 2))
    >>> reshaped(Shard(2), (2, 12, 64), (2, 12, 2, 32), 4)  # half a head each: not without communication
    """
    old, new = [[size_expression(size) for size in sizes] for sizes in (before, after)]
    cycle = _cycle(shard.sizes) or (old[shard.dim] / size_expression(shard.outer),)
    blocks = [sympy.sympify(block) * math.prod(old[shard.dim + 1 :]) for block in cycle]
    for dim, size in enumerate(new):
        below = math.prod(new[dim + 1 :])
        parts = [block / below for block in blocks] if below != 0 else []
        if parts and all(_is_whole(part / ranks) for part in parts) and _is_whole(size / sum(parts)):
            return _in_cycles(dim, parts, size / sum(parts))
    return None


def _cycle(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The blocks that recur, once.

    >>> _cycle((4, 2, 4, 2)), _cycle((4, 2, 2))
    ((4, 2), (4, 2, 2))
    """
    lengths = [length for length in range(1, len(sizes)) if sizes == sizes[:length] * (len(sizes) // length)]
    return sizes[: lengths[0]] if lengths else sizes


def _in_cycles(dim: int, parts: list[Any], times: Any) -> Shard | None:
    """A split in blocks that recur so often; None if that cannot be written, as the number is not known."""
    times = times if times.is_Integer else sympy.cancel(times)
    if len(parts) == 1:
        return Shard(dim, int(times) if times.is_Integer else times)
    known = all(number.is_Integer for number in (*parts, times))
    return in_blocks(dim, [int(part) for part in parts] * int(times)) if known else None


def is_multiple(size: Any, of: Any) -> bool:
    """Whether one size is a multiple of another, for all values of their symbols.

    >>> is_multiple(12, 4), is_multiple(12, 5), is_multiple(4, 12)
    (True, False, False)
    """
    return _is_whole(size_expression(size) / size_expression(of))


def _is_whole(ratio: Any) -> bool:
    """Whether an expression is an integer for all values of its symbols."""
    ratio = sympy.sympify(ratio)
    if ratio.is_Integer:
        return bool(ratio > 0)
    if ratio.is_Rational:
        return False
    return bool(sympy.fraction(sympy.cancel(ratio))[1] == 1)
