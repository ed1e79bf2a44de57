"""Stragglers: ranks that wait for each other go at the pace of the slowest."""

from __future__ import annotations

import functools
import math


@functools.lru_cache(maxsize=1024)
def largest_of(ranks: int) -> float:
    """The expected largest of so many draws of a normal distribution, in standard deviations.

    >>> [round(largest_of(ranks), 2) for ranks in (1, 2, 8, 1024)]
    [0.0, 0.56, 1.42, 3.25]
    """
    if ranks < 2:
        return 0.0
    steps, reach = 4000, 9.0
    width = 2 * reach / steps
    total = 0.0
    for index in range(steps):
        at = -reach + (index + 0.5) * width
        below = 0.5 * math.erfc(-at / math.sqrt(2))
        density = math.exp(-at * at / 2) / math.sqrt(2 * math.pi)
        total += at * ranks * below ** (ranks - 1) * density * width
    return total
