"""Equations of einsum: a name for every dim of every operand and of the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from crossfade.shard.tensor.factors import Dims


def read_equation(equation: str, ranks_of: Sequence[int]) -> tuple[tuple[Dims, ...], Dims]:
    """The names of the operands' dims and of the result's; those of an ellipsis are counted from the right.

    Without an arrow the result has the letters that occur once, in order of the alphabet, as torch has it.

    >>> read_equation("bij, bjk -> bik", (3, 3))
    ((('b', 'i', 'j'), ('b', 'j', 'k')), ('b', 'i', 'k'))
    >>> read_equation("...i,oi", (3, 2))
    ((('...1', '...0', 'i'), ('o', 'i')), ('...1', '...0', 'o'))
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    parts = left.split(",")
    leading = [rank - len(part.replace("...", "")) for part, rank in zip(parts, ranks_of, strict=True)]
    if not arrow:
        counts = Counter(letter for part in parts for letter in part if letter != ".")
        once = sorted(letter for letter, count in counts.items() if count == 1)
        right = "".join(["..." if "..." in left else "", *once])
    operands = tuple(_named(part, count) for part, count in zip(parts, leading, strict=True))
    widest = max((count for part, count in zip(parts, leading, strict=True) if "..." in part), default=0)
    return operands, _named(right, widest)


def _named(part: str, leading: int) -> Dims:
    """One name a dim, so many of them for an ellipsis."""
    before, dots, after = part.partition("...")
    return (*before, *(f"...{index}" for index in reversed(range(leading if dots else 0))), *after)
