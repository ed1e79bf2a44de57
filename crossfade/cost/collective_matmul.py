"""What a collective and the matmul beside it take in pieces, each computed on while the next travels.

Arithmetic on a `Machine`, for the executions of `crossfade.gather_matmul` and `crossfade.matmul_scatter`. One lane
computes and one link carries, a piece at a time; computation is slowed down by the fabric's share while anything
travels, and stands still for what has not arrived. The forms:

- **plain**: the collective, then the matmul (or the other way round), nothing at the same time.
- **chunked**: each rank's block in pieces. A gather starts the collectives of all pieces, computes on the rank's own
  block, then on every piece as it arrives. A scatter computes what the other ranks get piece by piece and exchanges
  each while it computes the next, then its own block, then adds up what came.
- **ring**: blocks go from neighbour to neighbour, one hop after another, in pieces too. Hops have the latency and
  bandwidth of an all-gather, what one rank sends to another; and on a CPU the launch of each.
- **symmetric**: torch's kernels on symmetric memory. One block a rank, copied one-sidedly, two copies ahead at most.

**What cutting a matmul costs.** A machine says how fast whole matmuls are; pieces are slower, see `call_seconds`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from crossfade.cost.lanes import Lanes
from crossfade.cost.machine import Machine
from crossfade.errors import MachineError
from crossfade.graph.collective_matmul import ANYWHERE, FORMS
from crossfade.graph.collectives import Kind
from crossfade.graph.program import size_hint

CHUNKS = (1, 2, 4, 8, 16)
"""Numbers of pieces that are tried."""

LEAST_ROWS = {"cpu": 16, "cuda": 128}
"""Rows of a rank's block that a piece must have at least, by device: a GPU computes 128 at once."""

_ROWS_OF_A_CALL = 8
_CUT_ON_CUDA, _CUT_SECONDS, _LEAST_SECONDS_ON_CUDA = 0.1, 4e-4, 2e-5


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one form with so many pieces takes: `seconds`, against `plain` ones.

    `exposed` of them computation stands still; `hidden` are the seconds for which it no longer does, of those in which
    the plain collective travels.
    """

    form: str
    chunks: int
    seconds: float
    plain: float
    hidden: float
    exposed: float

    @property
    def saved(self) -> float:
        """Seconds less than plain; negative if the collective matmul is slower."""
        return self.plain - self.seconds

    def __str__(self) -> str:
        pieces = f"{self.chunks} piece{'' if self.chunks == 1 else 's'}"
        return f"{self.form} in {pieces}: {self.seconds * 1e3:.3g} ms against {self.plain * 1e3:.3g} ms plain"


class Forecasts(NamedTuple):
    """All forms and numbers of pieces that were considered, the fastest first, and what plain takes."""

    plain: float
    considered: tuple[Forecast, ...]

    @property
    def best(self) -> Forecast | None:
        """The fastest; None if nothing is faster than plain."""
        return self.considered[0] if self.considered and self.considered[0].saved > 0 else None


@dataclass(frozen=True, slots=True)
class Exchange:
    """A gather before a matmul or a scatter after one, and how much there is of both.

    `bytes` are those of the whole tensor that is gathered or scattered, all ranks' blocks; `rows` those of one rank's
    block along the dim that is cut, `each` the rows of the matmul in each of them. `matmul_seconds` is what the whole
    matmul takes in one piece, or all of them if there are several `products`. `meanwhile_seconds` is what others take
    that a scatter computes while its pieces travel, which a plain one computes afterwards.
    """

    machine: Machine
    axis: str
    ranks: int
    bytes: int
    matmul_seconds: float
    rows: int
    products: int = 1
    each: int = 1
    meanwhile_seconds: float = 0.0

    def travel(self, kind: Kind, chunks: int = 1) -> float:
        """Seconds for which one of so many equal pieces travels as a collective."""
        return self.machine.collective_seconds(kind, round(self.bytes / chunks), self.ranks, self.axis)

    def hop(self, chunks: int = 1) -> float:
        """Seconds for which one of so many pieces of a block travels to one other rank.

        On a CPU the link stands still for a launch between two: who passes a piece on wakes up and starts it.
        """
        between = self.machine.fabric(self.axis).launch if self.machine.device == "cpu" else 0.0
        size = round(2 * self.block_bytes / chunks)
        return between + self.machine.collective_seconds(Kind.ALL_GATHER, size, 2, self.axis)

    @property
    def block_bytes(self) -> float:
        """Bytes of one rank's block."""
        return self.bytes / self.ranks

    def plain(self, kind: Kind) -> float:
        """Seconds of the collective and the matmul, one after the other."""
        return self.machine.fabric(self.axis).launch + self.travel(kind) + self.matmul_seconds + self.meanwhile_seconds

    def compute(self, share: float, rows: float, calls: int = 1) -> float:
        """Seconds of a share of the matmul in so many calls for each product, each of so many rows."""
        each = self.matmul_seconds * share / (calls * self.products)
        return calls * self.products * call_seconds(self.machine, each, rows * self.each)

    def moved(self, size: float) -> float:
        """Seconds in which so many bytes are read and written by one operator."""
        return size / self.machine.memory_bandwidth + self.machine.overhead

    def fits(self, kind: Kind, chunks: int) -> bool:
        """Whether a collective of one of so many pieces is one that its link carries at the speed that it has.

        All of them are all-to-alls on gloo, and gathers are gathers elsewhere: the smaller piece of the two counts.
        """
        links = self.machine.fabric(self.axis).links
        pieces = [links[Kind.ALL_TO_ALL].piece] + ([links[kind].piece] if kind is Kind.ALL_GATHER else [])
        return all(piece is None or self.bytes / chunks <= piece for piece in pieces)

    def most_chunks(self) -> int:
        """Into how many pieces a block may be cut."""
        least = LEAST_ROWS.get(self.machine.device, LEAST_ROWS["cuda"])
        return max(1, min(self.rows, self.rows * self.each // least))


def rows_of_each(shape: Sequence[Any], dim: int) -> int:
    """The rows of a matmul in each of a dim that is cut: the sizes of the dims beside it, the last one's left out.

    >>> rows_of_each((4, 256, 64), dim=1), rows_of_each((4, 256, 64), dim=2)
    (4, 1)
    """
    last = len(shape) - 1
    return math.prod(size_hint(size) for at, size in enumerate(shape) if at not in (dim, last)) if dim != last else 1


def call_seconds(machine: Machine, seconds: float, rows: float) -> float:
    """Seconds of one call that computes a piece of a matmul, whose share of the whole one's time is `seconds`.

    On a CPU every call lays out the other matrix again, as much work as 8 more rows. Measured single-threaded on an
    Intel Xeon at 2.5 GHz, torch 2.13, 2026-11-16, in times of one call, for pieces of 128, 64, 32, 16 and 8 rows:
    float32 of 512x2048x512 1.18, 1.20, 1.46, 1.82, 2.13; bfloat16 of 256x2048x512 1.04, 1.10, 1.13, 1.23, 1.41 (here
    1.06, 1.13, 1.25, 1.5, 2 for both).

    On a GPU the last of a call's tiles leave most of it idle, and starting a call takes the host some time. Measured on
    an H200, bfloat16, torch 2.11, 2026-11-16, 40 shapes of 2048 to 32768 rows in 2 to 32 pieces, in times of their
    share (median, and from least to most): shares over 400 us 0.99 (0.92 to 1.14), 100 to 400 us 1.04 (0.93 to 1.18),
    30 to 100 us 1.10 (0.98 to 1.24), 20 to 30 us 1.22 (1.04 to 1.77); shorter ones take the host 14 us or more, 22 us
    usually. Here: a tenth more of the first 400 us, and 20 us at least.

        >>> from crossfade.cost.presets import preset
        >>> f"{call_seconds(preset('loopback-gloo'), 1.0, rows=64):.3f}"
        '1.125'
        >>> f"{call_seconds(preset('h100-nvlink-node'), 1e-4, rows=1024) * 1e6:.0f} us"
        '110 us'
    """
    if machine.device == "cpu":
        return seconds * (1 + _ROWS_OF_A_CALL / max(rows, 1))
    return max(seconds + _CUT_ON_CUDA * min(seconds, _CUT_SECONDS), _LEAST_SECONDS_ON_CUDA)


def forecast_gather(
    machine: Machine,
    axis: str,
    ranks: int,
    gathered_bytes: int,
    matmul_seconds: float,
    rows: int,
    forms: Sequence[str] = ANYWHERE,
    chunks: Sequence[int] = CHUNKS,
    *,
    products: int = 1,
    each: int = 1,
) -> Forecasts:
    """What an all-gather and the matmuls of what it gathers take in every form and number of pieces that is possible.

    A gigabyte from two ranks over a link of 1 GB/s takes half a second, and so does the matmul here: its own half while
    the other half travels, so that a quarter of a second is left of either.

        >>> from crossfade.cost.machine import Fabric, Link
        >>> fabric = Fabric(dict.fromkeys(Kind, Link(latency=0.0, bandwidth=1e9)))
        >>> machine = Machine("two desktops", {"*": fabric}, {"float32": 5e10}, memory_bandwidth=1e10)
        >>> found = forecast_gather(machine, "tp", 2, 10**9, 0.5, rows=8000, forms=("chunked",), chunks=(1, 2))
        >>> print(f"{found.plain:.2f}", *(f"{way.chunks}: {way.seconds:.2f}" for way in found.considered))
        1.00 2: 0.63 1: 0.75
    """
    work = Exchange(machine, axis, ranks, gathered_bytes, matmul_seconds, rows, products, each)
    return _considered(work, Kind.ALL_GATHER, forms, chunks)


def forecast_scatter(
    machine: Machine,
    axis: str,
    ranks: int,
    scattered_bytes: int,
    matmul_seconds: float,
    rows: int,
    forms: Sequence[str] = ANYWHERE,
    chunks: Sequence[int] = CHUNKS,
    *,
    each: int = 1,
    meanwhile_seconds: float = 0.0,
) -> Forecasts:
    """What a matmul and the reduce-scatter of its result take in every form and number of pieces that is possible.

    `scattered_bytes` are those of the whole result of the matmul, `rows` those of each rank's part of it. What is
    computed meanwhile counts in all of them.

        >>> from crossfade.cost.machine import Fabric, Link
        >>> fabric = Fabric(dict.fromkeys(Kind, Link(latency=0.0, bandwidth=1e9)))
        >>> machine = Machine("two desktops", {"*": fabric}, {"float32": 5e10}, memory_bandwidth=1e11)
        >>> forecast_scatter(machine, "tp", 2, 10**9, 0.5, rows=8000).best.form
        'chunked'
        >>> print(forecast_scatter(machine, "tp", 2, 10**9, 1e-6, rows=8000).best)  # nothing to hide it under
        None
    """
    work = Exchange(machine, axis, ranks, scattered_bytes, matmul_seconds, rows, 1, each, meanwhile_seconds)
    return _considered(work, Kind.REDUCE_SCATTER, forms, chunks)


def forecast(work: Exchange, kind: Kind, form: str, chunks: int) -> Forecast:
    """What one form with one number of pieces takes: of a gather (`Kind.ALL_GATHER`) or of a scatter.

    More pieces than rows are as many as rows. A symmetric one has one piece a rank, whatever is asked for.
    """
    run = _RUNS.get((kind, form))
    if run is None:
        raise MachineError(
            f"no forecast for form {form!r} of a {kind}",
            expected=f"one of {', '.join(FORMS)} of an all-gather or a reduce-scatter",
            remedy="ask for one of them",
        )
    plain = work.plain(kind)
    if work.ranks < 2:
        return Forecast(form, chunks, plain, plain, 0.0, 0.0)
    lane = _Exchanging(work)
    run(work, lane, max(1, min(chunks, work.rows)))
    hidden = max(0.0, work.travel(kind) - lane.exposed)
    return Forecast(form, chunks, lane.now, plain, hidden, lane.exposed)


def _considered(work: Exchange, kind: Kind, forms: Sequence[str], chunks: Sequence[int]) -> Forecasts:
    """Every form with every number of pieces; those that would be too small are not considered, nor collectives that
    would be larger than the pieces in which the machine's links were measured, if there are smaller ones."""
    most = work.most_chunks()
    fitting = [count for count in chunks if count <= most]
    small = [count for count in fitting if work.fits(kind, count)] or fitting
    counts = {"symmetric": [1], "chunked": small}
    found = [forecast(work, kind, form, count) for form in forms for count in counts.get(form, fitting)]
    return Forecasts(work.plain(kind), tuple(sorted(found, key=lambda forecast: forecast.seconds)))


class _Exchanging(Lanes):
    """The computing lane and the link of one exchange; `exposed` are the seconds that the lane stood still."""

    def __init__(self, work: Exchange) -> None:
        fabric = work.machine.fabric(work.axis)
        super().__init__([fabric.slows_compute])
        self._launch, self.exposed = fabric.launch, 0.0

    def launch(self, travel: float) -> float:
        """Start a piece on the link; when it arrives."""
        self.compute(self._launch)
        return self.carry(travel)

    def wait(self, arrival: float) -> float:
        """Stand still until a piece has arrived; for how long."""
        still = super().wait(arrival)
        self.exposed += still
        return still


def _gather_chunked(work: Exchange, lane: _Exchanging, chunks: int) -> None:
    ranks, rows, overhead = work.ranks, work.rows / chunks, work.machine.overhead * work.products
    arrivals = [lane.launch(work.travel(Kind.ALL_GATHER, chunks)) for _ in range(chunks)]
    lane.compute(work.compute(1 / ranks, work.rows))
    calls = min(2, ranks - 1)  # blocks before this rank's own, and behind it
    for arrival in arrivals:
        lane.wait(arrival)
        lane.compute(work.compute((ranks - 1) / ranks / chunks, rows, calls) + calls * overhead)


def _gather_ring(work: Exchange, lane: _Exchanging, chunks: int) -> None:
    """A thread or stream of its own passes pieces on as they arrive."""
    ranks, rows, overhead = work.ranks, work.rows / chunks, work.machine.overhead * work.products
    hop = work.hop(chunks)
    arrivals = [lane.launch(hop) for _ in range(chunks)]
    for piece in range((ranks - 2) * chunks):
        arrivals.append(lane.carry(hop, ready=arrivals[piece]))
    lane.compute(work.compute(1 / ranks, work.rows))
    for arrival in arrivals:
        lane.wait(arrival)
        lane.compute(work.compute(1 / ranks / chunks, rows) + overhead)


def _gather_symmetric(work: Exchange, lane: _Exchanging, _: int) -> None:
    """The own block is copied where the others can read it; two streams take turns to copy a block and compute on it,
    so that two copies are under way at most."""
    ranks, overhead, block = work.ranks, work.machine.overhead, work.compute(1 / work.ranks, work.rows)
    lane.compute(work.moved(2 * work.block_bytes))
    arrivals = [lane.carry(work.hop()) for _ in range(min(2, ranks - 1))]
    lane.compute(block)
    for step in range(ranks - 1):
        lane.wait(arrivals[step])
        lane.compute(block + work.products * overhead)
        if len(arrivals) < ranks - 1:
            arrivals.append(lane.carry(work.hop()))


def _scatter_chunked(work: Exchange, lane: _Exchanging, chunks: int) -> None:
    ranks, rows, overhead = work.ranks, work.rows / chunks, work.machine.overhead
    calls, arrivals = min(2, ranks - 1), []
    for _ in range(chunks):
        lane.compute(work.compute((ranks - 1) / ranks / chunks, rows, calls) + calls * overhead)
        arrivals.append(lane.launch(work.travel(Kind.ALL_TO_ALL, chunks)))
    lane.compute(work.compute(1 / ranks, work.rows) + work.meanwhile_seconds)
    for arrival in arrivals:
        lane.wait(arrival)
        for _ in range(ranks - 1):
            lane.compute(work.moved(3 * work.block_bytes / chunks))


def _scatter_ring(work: Exchange, lane: _Exchanging, chunks: int) -> None:
    ranks, rows = work.ranks, work.rows / chunks
    hop, add = work.hop(chunks), work.moved(3 * work.block_bytes / chunks)
    arrivals: list[float] = []
    for _ in range(ranks - 1):
        before, arrivals = arrivals, []
        for index in range(chunks):
            lane.compute(work.compute(1 / ranks / chunks, rows) + work.machine.overhead)
            if before:
                lane.compute(work.meanwhile_seconds / (ranks - 1) if index == 0 else 0.0)
                lane.wait(before[index])
                lane.compute(add)
            arrivals.append(lane.launch(hop))
    lane.compute(work.compute(1 / ranks, work.rows) + work.meanwhile_seconds / (ranks - 1))
    for arrival in arrivals:
        lane.wait(arrival)
        lane.compute(add)


def _scatter_symmetric(work: Exchange, lane: _Exchanging, _: int) -> None:
    """Each other rank's block is computed, then copied to it; in the end all blocks that came are added at once."""
    ranks, block = work.ranks, work.compute(1 / work.ranks, work.rows)
    arrival = 0.0
    for _ in range(ranks - 1):
        lane.compute(block + work.machine.overhead)
        arrival = lane.carry(work.hop())
    lane.compute(block)
    lane.wait(arrival)
    lane.compute(work.moved((ranks + 1) * work.block_bytes) + work.meanwhile_seconds)


_RUNS: dict[tuple[Kind, str], Callable[[Exchange, _Exchanging, int], None]] = {
    (Kind.ALL_GATHER, "chunked"): _gather_chunked,
    (Kind.ALL_GATHER, "ring"): _gather_ring,
    (Kind.ALL_GATHER, "symmetric"): _gather_symmetric,
    (Kind.REDUCE_SCATTER, "chunked"): _scatter_chunked,
    (Kind.REDUCE_SCATTER, "ring"): _scatter_ring,
    (Kind.REDUCE_SCATTER, "symmetric"): _scatter_symmetric,
}
