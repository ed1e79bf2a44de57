"""How a value lies over the ranks of one axis, and how a placement goes through a reshape.

DTensor's three words, `Replicate`, `Shard` and `Partial`. A shard may also be cut in blocks: the dim is `outer` blocks
(or blocks of the given `sizes`), and each block is split over all ranks. That is how fused weights are laid out, and
what a split dim becomes when a reshape merges it with one before it.

Where blocks do not divide by the ranks, a shard says in how many `units` (heads, words, channels) each comes: every
rank holds as many units as the first, and what the last ranks have too much is padding. All ranks run one program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    >>> str(Shard(1, units=9))
    'split on dim 1, padded (9 units)'
    """

    dim: int
    outer: Any = 1
    sizes: tuple[int, ...] = ()
    units: int = 0
    """In how many units each block comes, if they do not divide by the ranks; 0 if every block is split evenly."""

    def __str__(self) -> str:
        padded = f", padded ({self.units} units)" if self.units else ""
        if self.sizes:
            return f"split on dim {self.dim} in blocks of {', '.join(map(str, self.sizes))}{padded}"
        return f"split on dim {self.dim}" + (f" in {self.outer} blocks" if self.outer != 1 else "") + padded

    def on(self, dim: int) -> Shard:
        """The same split of another dim."""
        return replace(self, dim=dim)


@dataclass(frozen=True)
class Partial:
    """Every rank holds an addend; the value is their sum."""

    def __str__(self) -> str:
        return "a partial sum"


Placement = Replicate | Shard | Partial
REPLICATE, PARTIAL = Replicate(), Partial()


def in_blocks(dim: int, sizes: Sequence[int], units: int = 0) -> Shard:
    """A split in blocks of these sizes, in its plainest form.

    >>> str(in_blocks(0, (4, 4, 4))), str(in_blocks(0, (8,)))
    ('split on dim 0 in 3 blocks', 'split on dim 0')
    """
    if len(set(sizes)) == 1:
        return Shard(dim, outer=len(sizes), units=units)
    return Shard(dim, sizes=tuple(sizes), units=units)


def block_sizes(shard: Shard, size: int) -> tuple[int, ...]:
    """The sizes of a shard's blocks along a dim of known size."""
    return shard.sizes or (size // int(shard.outer),) * int(shard.outer)


def divides(shard: Shard, size: Any, ranks: int) -> bool:
    """Whether every block can be split over the ranks, evenly or in its units, whatever the symbols stand for.

    >>> divides(Shard(0), 8, 4), divides(Shard(0, outer=2), 12, 4), divides(Shard(0, units=9), 9 * 64, 4)
    (True, False, True)
    """
    by = shard.units or ranks
    if shard.sizes:
        return sum(shard.sizes) == size_expression(size) and all(block % by == 0 for block in shard.sizes)
    return _is_whole(size_expression(size) / size_expression(shard.outer) / by)


def local_size(shard: Shard, size: Any, ranks: int) -> Any:
    """What a rank holds along a dim of this size, padding included.

    >>> local_size(Shard(0), 8, 2), local_size(Shard(0, units=9), 9 * 64, 2), local_size(Shard(0, 2, units=3), 18, 2)
    (4, 320, 12)
    """
    return size // shard.units * units_each(shard.units, ranks) if shard.units else size // ranks


def whole_size(shard: Shard, part: int, ranks: int) -> int:
    """The size of a dim of which a rank holds so much.

    >>> whole_size(Shard(0), 4, 2), whole_size(Shard(0, units=9), 320, 2)
    (8, 576)
    """
    return part // units_each(shard.units, ranks) * shard.units if shard.units else part * ranks


def units_each(units: int, ranks: int) -> int:
    """How many units of a block a rank holds, the last ranks' padding included."""
    return -(-units // ranks)


def reshaped(shard: Shard, before: Sequence[Any], after: Sequence[Any], ranks: int) -> Shard | None:
    """The placement of a reshaped value, such that reshaping the parts is all there is to do; None if there is none.

    Blocks follow each other through the whole value, each split over all ranks. The dim of the result in which every
    block is a multiple of the ranks, and in which the blocks recur a whole number of times, is the one that is
    split.

    >>> reshaped(Shard(2), (2, 12, 64), (2, 12, 4, 16), 2)  # heads apart
    Shard(dim=2, outer=1, sizes=(), units=0)
    >>> reshaped(Shard(1), (2, 4, 12, 16), (8, 12, 16), 2)  # heads merged into the batch
    Shard(dim=0, outer=2, sizes=(), units=0)
    >>> reshaped(Shard(0, sizes=(64, 32)), (96,), (6, 16), 2)  # heads of queries and of keys
    Shard(dim=0, outer=1, sizes=(4, 2), units=0)
    >>> reshaped(Shard(1, units=9), (12, 9 * 64), (12, 9, 64), 2)
    Shard(dim=1, outer=1, sizes=(), units=9)
    >>> reshaped(Shard(2), (2, 12, 64), (2, 12, 2, 32), 4)  # half a head each: not without communication
    """
    old, new = [[size_expression(size) for size in sizes] for sizes in (before, after)]
    cycle = _cycle(shard.sizes) or (old[shard.dim] / size_expression(shard.outer),)
    blocks = [sympy.sympify(block) * math.prod(old[shard.dim + 1 :]) for block in cycle]
    by = shard.units or ranks
    for dim, size in enumerate(new):
        below = math.prod(new[dim + 1 :])
        parts = [block / below for block in blocks] if below != 0 else []
        if parts and all(_is_whole(part / by) for part in parts) and _is_whole(size / sum(parts)):
            split = _in_cycles(dim, parts, size / sum(parts))
            return replace(split, units=shard.units) if split is not None else None
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
