"""Calibrate: a Machine measured on the ranks that will run the program, the same on all of them.

What is measured, each time on all ranks at once and counted by the slowest:

- Collectives, as programs run them: started by the asynchronous functional operators and waited for. Of a GPU's tensors
  each is one; of a CPU's one alone up to the size of a piece (1 MB), larger ones as pieces of that size started
  together, which wait for one latency. Bandwidth and latency are fitted to the medians, see `fitted`. A reduce-scatter
  is the backend's own.
- Pieces, on CPUs: 8 MB all-reduced, gathered and exchanged in one, in two, four and eight: the largest piece that is
  nearly as fast as any, see `best_piece`.
- Launch: the time in which a start of a small collective returns; on a GPU, that its computing stream loses by it.
- Arithmetic: the three products of a layer with a square weight, of growing size until one takes a few milliseconds; on
  a GPU the rate is that of full waves of tiles, see `Products`. Before the collectives and after them, and again until
  two rounds in a row agree, see `steady`; so are convolutions, memory and overhead.
- Attention, on a GPU: causal, in bfloat16, and its gradient, as shares of that rate.
- Convolutions: one with both of its gradients, as a share of that rate, in the precisions that models have there.
- Memory: additions of two tensors of 4 MB into a third, rotating through 64 MB and more.
- Overhead: an addition of eight elements, with fresh memory for its result; on a GPU, behind other work.
- Host: copies of many bytes and of few to the host's memory (pinned, for a GPU) and back, the slower way.
- What travelling costs computation: matrix products, alone and while collectives travel.

A link on which the same collective takes now this long and now that, see `varied`, and products whose rounds never
agree are reported in a warning and in the machine's `source`: predictions can be no better than a machine keeps its
pace.

Nothing here can hang: a rank that stays away lets the others' collectives fail at the timeout of their group.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from crossfade.cost.computing_rates import RatesClock, steady
from crossfade.cost.machine import Fabric, Link, Machine
from crossfade.cost.machine_parts import HostLink, bytes_sent, fitted, rounded
from crossfade.cost.products import Products
from crossfade.cost.ranks_clock import CalibratingRanks, Clock, clocked, repeats_for
from crossfade.errors import MachineError
from crossfade.graph import collectives
from crossfade.graph.collectives import Kind

MB = 2**20
SIZES = {
    "cpu": (2**12, 2**16, 2**18, MB, 4 * MB, 16 * MB),
    "cuda": (2**16, MB, 8 * MB, 32 * MB, 128 * MB, 512 * MB),
}
"""Bytes of the larger side of the collectives that are timed, by the device whose tensors travel."""

_PIECE_BYTES = MB
_PIECES = (MB, 2 * MB, 4 * MB, 8 * MB)
_CUT = (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.ALL_TO_ALL)
"""Kinds that programs start in pieces, or in buckets as large as a piece."""
_NEARLY = 1.08
_MOST_IN_FLIGHT = 256 * MB
_LEAST_ROUNDS = 7
_UNSTEADY = 1.5
"""By which factor the middle half of the times of one collective may vary before users are warned."""

log = logging.getLogger("crossfade")


def calibrate(
    name: str,
    axes: Mapping[str, Any],
    *,
    device: str = "cpu",
    sizes: Sequence[int] | None = None,
    seconds: float = 10.0,
    world: Any = None,
) -> Machine:
    """Measure a machine; every rank of the world calls this with its own group of each axis, and gets the same answer.

    Args:
        name: what the machine is to be called.
        axes: the process group of this rank along each mesh axis; `"*"` stands for every axis not named.
        device: type of device that computes and holds what travels.
        sizes: bytes of the collectives to time, at least two different ones; by default `SIZES` of the device.
        seconds: about how long to take; noisy machines deserve more.
        world: the group of all ranks that call, by default torch's world.

    Raises:
        MachineError: there are no ranks, an axis has only one, its backend cannot carry the device's tensors, or the
            device is of another type than `cpu` and `cuda`.
    """
    if not dist.is_initialized():
        raise MachineError(
            "there is no process group",
            expected="every rank to be in one",
            remedy="call torch.distributed.init_process_group first, or run crossfade calibrate",
        )
    if device not in SIZES:
        raise MachineError(f"device={device!r}", expected=f"one of {', '.join(SIZES)}", remedy="pass one of them")
    sizes = SIZES[device] if sizes is None else sizes
    for axis, group in axes.items():
        _check(axis, group, device, sizes)
    share = seconds / (len(axes) + 1)
    return _Calibration(device, CalibratingRanks.of(world), name, tuple(sorted(sizes)), share).machine(axes)


def rows(machine: Machine) -> list[tuple[str, str, str, str]]:
    """What a machine says, as rows for a table: what, of which axis or dtype, and two figures.

    >>> from crossfade.cost.presets import preset
    >>> rows(preset("ethernet-1gbit"))[0]
    ('all_reduce', '*', '300 us', '113.6 MB/s')
    """
    lines = []
    for axis, fabric in machine.fabrics.items():
        for kind, link in fabric.links.items():
            pieces = "" if link.piece is None else f", in pieces of {link.piece / MB:g} MB"
            lines.append((str(kind), axis, _microseconds(link.latency), _rate(link.bandwidth, "B/s") + pieces))
        slower = f"computation {fabric.slows_compute:.0%} slower meanwhile"
        lines.append(("launch", axis, _microseconds(fabric.launch), slower))
    lines += [("matrix product", dtype, "", _rate(rate, "FLOP/s")) for dtype, rate in machine.flops.items()]
    lines += [("convolution", dtype, "", f"{share:.0%} of the products' rate")
              for dtype, share in machine.convolutions.items()]  # fmt: skip
    if machine.host is not None:
        rate = _rate(machine.host.bandwidth, "B/s")
        lines.append(("copy to the host", machine.device, _microseconds(machine.host.latency), rate))
    lines.append(("memory", machine.device, "", _rate(machine.memory_bandwidth, "B/s")))
    lines.append(("operator", machine.device, _microseconds(machine.overhead), ""))
    return lines


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us"


def _rate(value: float, unit: str) -> str:
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= scale:
            return f"{value / scale:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"


def _check(axis: str, group: Any, device: str, sizes: Sequence[int]) -> None:
    if dist.get_world_size(group) < 2:
        raise MachineError(
            f"axis {axis!r} has one rank",
            expected="at least 2 to communicate",
            remedy="leave it out, or start more ranks",
        )
    backend = dist.get_backend(group)
    if device == "cuda" and backend == "gloo":
        raise MachineError(
            f"axis {axis!r} would carry cuda tensors over gloo",
            expected="nccl (gloo's all-gather of cuda tensors crashes the process)",
            remedy='init_process_group("nccl"), or calibrate with device="cpu"',
        )
    if len({size for size in sizes if size > 0}) < 2:
        raise MachineError(
            f"the sizes are {list(sizes)}", expected="at least two different ones", remedy="leave them at their default"
        )


@dataclass
class _Calibration(Clock):
    name: str
    sizes: tuple[int, ...]
    seconds: float
    unsteady: list[str] = field(default_factory=list)
    """What did not keep its pace, and how far it varied."""

    def machine(self, axes: Mapping[str, Any]) -> Machine:
        timed = RatesClock(self.device, self.ranks, self.seconds)
        rounds = [timed.round()]
        fabrics = {axis: self._fabric(axis, group) for axis, group in axes.items()}
        rates, varied_by = steady(rounds, timed.round)
        if varied_by is not None:
            self.unsteady.append(f"matrix products by {varied_by:.1f}x")
        found = Machine(
            self.name,
            fabrics,
            flops=rates.flops,
            memory_bandwidth=rates.memory_bandwidth,
            overhead=rates.overhead,
            device=self.device,
            memory=torch.cuda.get_device_properties(self.device).total_memory if self.device == "cuda" else None,
            source=self._source(axes),
            host=self._host_link(),
            convolutions=rates.convolutions,
        )
        if self.device == "cuda":
            found = dataclasses.replace(found, products=self._products(timed.tiles, found.flops["bfloat16"]))
        if self.unsteady and self.ranks.is_first:
            log.warning(
                "times that vary while calibrating: %s; predictions for this machine may "
                "be as far off. Remedy: calibrate again when nothing else runs, or for longer.",
                ", ".join(self.unsteady),
            )
        return Machine.from_json(self.ranks.word_of_the_first(found.to_json()))

    def _source(self, axes: Mapping[str, Any]) -> str:
        groups = [
            f"{axis}: {dist.get_world_size(group)} ranks on {dist.get_backend(group)}" for axis, group in axes.items()
        ]
        threads = [f"{torch.get_num_threads()} threads a rank"] if self.device == "cpu" else []
        when = f"measured by crossfade calibrate on {time.strftime('%Y-%m-%d')}, torch {torch.__version__}"
        unsteady = [f"times varied: {', '.join(self.unsteady)}"] if self.unsteady else []
        return "; ".join([when, *groups, *threads, *unsteady])

    def _products(self, tiles: Products, rate: float) -> Products:
        """What tiles there are, and the shares of a rate that attention and its gradient reach."""
        samples, heads, length, width = 4, 16, 2048, 128
        query, key, value, gradient = (
            self.numbers(samples, heads, length, width, seed=seed).to(torch.bfloat16).requires_grad_()
            for seed in range(4)
        )

        def forward() -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

        with torch.enable_grad():
            attended = forward()
            backward = functools.partial(
                torch.autograd.grad, attended, (query, key, value), gradient, retain_graph=True
            )
            there, back = (self.agreed(way, self.seconds / 16) for way in (forward, backward))
        scores = 2 * samples * heads * length**2 * width / 2  # half of them are masked
        attention, behind = (products * scores / seconds / rate for products, seconds in ((2, there), (5, back)))
        return dataclasses.replace(tiles, attention=rounded(attention), attention_backward=rounded(behind / attention))

    def _host_link(self) -> HostLink:
        few, many = self._to_host_and_back(8), self._to_host_and_back(16 * MB)
        return HostLink(rounded(few), rounded(64 * MB / max(many - few, 1e-9)), apart=self.device == "cuda")

    def _to_host_and_back(self, elements: int) -> float:
        """Seconds of the slower way."""
        there = torch.full((elements,), 0.5, device=self.device)
        host = torch.empty(elements, pin_memory=self.device == "cuda")
        ways = (lambda: host.copy_(there), lambda: there.copy_(host))
        return max(self.agreed(way, self.seconds / 32) for way in ways)

    def _fabric(self, name: str, group: Any) -> Fabric:
        axis = _Axis(self, name, group)
        links = {kind: axis.link(kind) for kind in Kind}
        slows = axis.slows_compute(links[Kind.ALL_REDUCE])
        return Fabric(links, launch=axis.launch(), slows_compute=slows)


@dataclass(frozen=True)
class _Axis:
    """The collectives of one group, timed."""

    calibration: _Calibration
    name: str
    group: Any

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self.group)

    def link(self, kind: Kind) -> Link:
        share = self.calibration.seconds / len(Kind) / len(self.calibration.sizes)
        points = []
        for wanted in self.calibration.sizes:
            inputs = self._inputs(kind, wanted)
            size = sum(self._larger_side(kind, value) for value in inputs)
            took = self._travel(kind, inputs, share)
            points.append((bytes_sent(kind, size, self.ranks), statistics.median(took)))
        if (factor := varied(took)) > _UNSTEADY:  # by the last size, on which bandwidth rests
            self.calibration.unsteady.append(f"{kind} on {self.name} by {factor:.1f}x")
        hops = (self.ranks - 1).bit_length()  # the steps that Link counts a latency for
        found = fitted([(hops, sent, seconds) for sent, seconds in points])  # pieces are on their way together
        cut = kind in _CUT and self.calibration.device == "cpu"  # NCCL cuts what it sends itself
        return dataclasses.replace(found, piece=self._piece(kind)) if cut else found

    def _piece(self, kind: Kind) -> int | None:
        """The best piece for much data; None if that is all of it in one."""
        choices = [self._inputs(kind, _PIECES[-1], piece) for piece in _PIECES]

        def one_round() -> list[float]:  # all once: what disturbs a while disturbs them all
            return self.calibration.ranks.slowest(self._once(kind, inputs) for inputs in choices)

        repeats = max(_LEAST_ROUNDS, repeats_for(self.calibration.seconds / 10, sum(one_round())))
        found = best_piece(dict(zip(_PIECES, zip(*(one_round() for _ in range(repeats)), strict=True), strict=True)))
        return None if found == _PIECES[-1] else found

    def _inputs(self, kind: Kind, size: int, piece: int = 0) -> list[Tensor]:
        """Tensors for a collective whose larger side has about `size` bytes, one for each piece."""
        whole = _PIECE_BYTES if self.calibration.device == "cpu" else size
        count = max(1, size // (piece or whole))
        rows = max(1, size // count // 4 // self.ranks)
        shape = (rows,) if kind is Kind.ALL_GATHER else (rows * self.ranks,)
        return [torch.ones(shape, device=self.calibration.device) for _ in range(count)]

    def _larger_side(self, kind: Kind, value: Tensor) -> int:
        return value.nbytes * (self.ranks if kind is Kind.ALL_GATHER else 1)

    def _travel(self, kind: Kind, inputs: list[Tensor], seconds: float) -> list[float]:
        """Seconds until all pieces have arrived, on the slowest rank, in each of some rounds."""
        once = min(self.calibration.ranks.slowest(self._once(kind, inputs) for _ in range(2)))  # a stall is not usual
        repeats = repeats_for(seconds, once)
        return self.calibration.ranks.slowest(self._once(kind, inputs) for _ in range(repeats))

    def _once(self, kind: Kind, inputs: list[Tensor]) -> float:
        dist.barrier(self.group)
        return self.calibration.timed(lambda: self._finish(self._start(kind, inputs)))

    def _start(self, kind: Kind, inputs: list[Tensor]) -> list[Tensor]:
        name, ranks = self.group.group_name, self.ranks
        start: dict[Kind, Callable[[Tensor], Tensor]] = {
            Kind.ALL_REDUCE: lambda value: collectives.all_reduce(value, "sum", name),
            Kind.ALL_GATHER: lambda value: collectives.all_gather_into(
                value.new_empty(ranks * len(value), *value.shape[1:]), value, ranks, name
            ),
            Kind.REDUCE_SCATTER: lambda value: collectives.reduce_scatter(value, "sum", ranks, name),
            Kind.ALL_TO_ALL: lambda value: collectives.all_to_all(value, ranks, name),
            Kind.BROADCAST: lambda value: collectives.broadcast(value, 0, name),
        }
        return [start[kind](value) for value in inputs]

    def _finish(self, started: list[Tensor]) -> None:
        for value in started:
            collectives.wait(value)

    def launch(self) -> float:
        """Median seconds in which starting a small collective returns, or for which it keeps a GPU from computing."""
        inputs = self._inputs(Kind.ALL_REDUCE, 2**12) * 8
        samples = []
        for _ in range(8):
            dist.barrier(self.group)
            started: list[Tensor] = []
            start_all = functools.partial(self._start_into, started, inputs)
            seconds = self.calibration.behind(start_all) if self.calibration.device == "cuda" else clocked(start_all)
            samples.append(seconds / len(inputs))
            self._finish(started)
        return rounded(self.calibration.ranks.slowest([statistics.median(samples)])[0])

    def _start_into(self, started: list[Tensor], inputs: list[Tensor]) -> None:
        started += self._start(Kind.ALL_REDUCE, inputs)

    def slows_compute(self, link: Link) -> float:
        """By which share matrix products take longer while all-reduces travel."""
        size = 256 if self.calibration.device == "cpu" else 2048
        left = self.calibration.numbers(size, size)
        product = functools.partial(torch.mm, left, left)
        alone = self.calibration.agreed(product, self.calibration.seconds / 8)
        window = max(0.05, 20 * alone)
        size = min(_MOST_IN_FLIGHT, max(MB, int(window * link.bandwidth)))
        window = min(window, bytes_sent(Kind.ALL_REDUCE, size, self.ranks) / link.bandwidth)
        inputs = self._inputs(Kind.ALL_REDUCE, size)
        shares = []
        for _ in range(5):
            dist.barrier(self.group)
            started = self._start(Kind.ALL_REDUCE, inputs)
            shares.append(self._during(product, window / 2) / alone - 1)
            self._finish(started)
        return rounded(max(0.0, self.calibration.ranks.slowest([statistics.median(shares)])[0]))

    def _during(self, product: Callable[[], Any], window: float) -> float:
        """Mean seconds of a product for half of the time that the collectives take alone: they travel all the while."""
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < window or not count:
            product()
            self.calibration.synchronize()
            count += 1
        return (time.perf_counter() - start) / count


def varied(seconds: Sequence[float]) -> float:
    """By which factor the middle half of some times varies: a stall now and then is nothing, every other round is.

    >>> varied([1.0, 1.1, 1.0, 1.2, 9.0]), varied([1.0, 2.0, 1.0, 2.0, 2.0])
    (1.2, 2.0)
    """
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return high / low


def best_piece(seconds: Mapping[int, Sequence[float]]) -> int:
    """The largest piece that is nearly as fast as any, by the seconds that each took in several rounds.

    Large pieces are fast at times and slow at others: over 1 Gbit/s, gloo exchanges 8 MB in 35 ms or in 68, seldom in
    between. So a piece is as good as its slower rounds, the slowest few left out: its upper quartile.

    >>> best_piece({1: [36, 37, 36, 38, 36], 8: [35, 35, 35, 68, 68]})
    1
    """
    usually = {piece: statistics.quantiles(rounds, n=4, method="inclusive")[2] for piece, rounds in seconds.items()}
    return max(piece for piece, took in usually.items() if took <= min(usually.values()) * _NEARLY)
