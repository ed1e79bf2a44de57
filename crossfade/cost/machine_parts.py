"""What a machine is put together of: a link between ranks, by latency and bandwidth."""

from __future__ import annotations

import math
from collections.abc import Sequence
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


@dataclass(frozen=True)
class HostLink:
    """What a copy between a device and its host's memory costs: seconds before the first byte, and bytes a second each
    way. `apart` says whether copies travel beside computation, as on a GPU, or the computing thread makes them itself.
    """

    latency: float
    bandwidth: float
    apart: bool = True

    def seconds(self, size: int) -> float:
        """Seconds that a copy takes alone.

        >>> HostLink(latency=1e-5, bandwidth=50e9).seconds(10**9)
        0.02001
        """
        return self.latency + size / self.bandwidth


def bytes_sent(kind: Kind, size: int, ranks: int) -> float:
    """Bytes that each rank must send for a collective whose larger side has `size` bytes.

    >>> bytes_sent(Kind.ALL_REDUCE, 800, ranks=4), bytes_sent(Kind.ALL_GATHER, 800, ranks=4)
    (1200.0, 600.0)
    """
    if kind is Kind.BROADCAST:
        return float(size)
    others = size * (ranks - 1) / ranks
    return 2 * others if kind is Kind.ALL_REDUCE else others


def fitted(points: Sequence[tuple[float, float, float]]) -> Link:
    """The link that explains points of (latencies, bytes sent, seconds).

    The bandwidth has the least squared error in seconds, which large sizes decide: a link that lets small bursts pass
    faster counts with what it sustains. Given that, the latency has the least relative error, which small sizes decide.
    Neither can be negative, and no latency is longer than what took the least; where more bytes took less time, the
    bandwidth is that of the most bytes.

    >>> fitted([(1, 1000, 0.002), (1, 10_000, 0.011), (4, 400_000, 0.404)])
    Link(latency=0.001, bandwidth=1000000.0, piece=None)
    """
    aa, ab, bb = (sum(x[i] * x[j] for x in points) for i, j in ((0, 0), (0, 1), (1, 1)))
    at, bt = sum(x[0] * x[2] for x in points), sum(x[1] * x[2] for x in points)
    determinant = aa * bb - ab * ab
    inverse = (bt * aa - at * ab) / determinant if determinant else bt / bb
    longest = min(seconds / count for count, _, seconds in points)
    if at - inverse * ab > longest * aa:  # large sizes, of many pieces each, would be all latency
        inverse = (bt - longest * ab) / bb
    if inverse <= 0:
        _, sent, seconds = max(points, key=lambda point: point[1])
        inverse = seconds / sent
    shares = [(count / seconds, 1 - sent * inverse / seconds) for count, sent, seconds in points]
    latency = sum(count * left for count, left in shares) / sum(count * count for count, _ in shares)
    return Link(rounded(max(0.0, latency)), rounded(1 / inverse))


def rounded(value: float) -> float:
    """Five digits of a measurement: more are noise.

    >>> rounded(123456.7)
    123460.0
    """
    return float(f"{value:.5g}")
