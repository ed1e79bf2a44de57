"""Channels that a projection puts out, as the factors of them that a tensor's dims hold.

Sizes are numbers here: an open size is replaced by a large prime, so that reshapes of it can be distinguished.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import sympy
from torch import fx

from crossfade.graph.private import size_expression


@dataclass(frozen=True)
class ChannelFactor:
    """A factor of the channels in dim `dim` of a tensor, whose size is `outer * size * inner`."""

    dim: int
    size: int
    outer: int = 1
    inner: int = 1


@dataclass(frozen=True)
class Channels:
    """`length` channels from `start` on, held by these factors, the outermost first; inner ones may be unknown."""

    start: int
    length: int
    factors: tuple[ChannelFactor, ...]

    @property
    def first(self) -> ChannelFactor:
        return self.factors[0]

    @property
    def unit(self) -> int:
        """How many channels one step along the outermost factor is."""
        return self.length // self.first.size


def sizes_of(node: fx.Node) -> tuple[int, ...]:
    """The sizes of a node's tensor, with primes for symbols; none where it is several tensors."""
    return tuple(map(number, getattr(node.meta["val"], "shape", ())))


def number(size: Any) -> int:
    return size if isinstance(size, int) else _evaluated(size_expression(size))


@functools.lru_cache(maxsize=4096)
def _evaluated(expression: Any) -> int:
    return int(expression.subs({symbol: _prime(str(symbol)) for symbol in expression.free_symbols}))


def _prime(name: str) -> int:
    """A prime for a symbol's name, larger than head counts and widths; other names have others.

    >>> _prime("s0"), _prime("s1"), _prime("u0")
    (1150027, 1151021, 1170007)
    """
    digits = "".join(mark for mark in name if mark.isdigit())
    return int(sympy.nextprime(1_000_000 + 10_000 * (ord(name[0]) - ord("d")) + 1_000 * int(digits or 0)))


def keep(channels: Channels, moved: Callable[[ChannelFactor], ChannelFactor | None]) -> Channels | None:
    """Each factor where it is now. The outermost must be somewhere; the first lost one takes the inner ones along."""
    factors: list[ChannelFactor] = []
    for factor in channels.factors:
        now = moved(factor)
        if now is None:
            break
        factors.append(now)
    return replace(channels, factors=tuple(factors)) if factors else None
