"""What a machine is put together of: a link between ranks, by latency and bandwidth."""

from __future__ import annotations

import math
from dataclasses import dataclass

from crossfade.graph.collectives import Kind


@dataclass(frozen=True)
class Link:
    """What one kind of collective costs: seconds before the first byte between two ranks, and bytes a second.

    `bandwidth` counts what one rank sends, as a perfect algorithm would: a collective among many ranks has the same
    number as one between two, and a backend that sends more than it need not shows as a lower bandwidth. `piece` is the
    number of bytes beyond which one collective is slower than several of that size in flight together; None if
    it never is, or was not measured.
    """

    latency: float
    bandwidth: float
    piece: int | None = None

    def seconds(self, kind: Kind, size: int, ranks: int) -> float:
        """Seconds that a collective takes alone, for the bytes of its larger side.

        >>> Link(latency=1e-3, bandwidth=1e9).seconds(Kind.ALL_REDUCE, 10**9, ranks=2)
        1.001
        """
        if ranks < 2:
            return 0.0
        return self.latency * math.ceil(math.log2(ranks)) + bytes_sent(kind, size, ranks) / self.bandwidth


def bytes_sent(kind: Kind, size: int, ranks: int) -> float:
    """Bytes that each rank must send for a collective whose larger side has `size` bytes.

    >>> bytes_sent(Kind.ALL_REDUCE, 800, ranks=4), bytes_sent(Kind.ALL_GATHER, 800, ranks=4)
    (1200.0, 600.0)
    """
    if kind is Kind.BROADCAST:
        return float(size)
    others = size * (ranks - 1) / ranks
    return 2 * others if kind is Kind.ALL_REDUCE else others
