"""How large buckets should be on a machine: few enough that latency is small, small enough to start early and end soon.

Of `size` bytes that become ready evenly during `hides` seconds of computation, in buckets of `cap` bytes, the first
starts when it is full, each takes the link for its latency and its bytes, and the last travels when nothing is left to
hide it under:

    number  = size / cap
    queued  = hides / number + number * latency + size * seconds_a_byte - hides
    tail    = latency + cap * seconds_a_byte
    exposed = max(queued, tail) + number * launch

`choose_sizes` takes the cap of the least `exposed`, among those whose latency is at most a fifth of their travel, and
within the piece beyond which the backend becomes slower. What is large enough by itself, and takes longer to copy than
to launch, shares no bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from crossfade.cost.estimate import estimate
from crossfade.cost.machine import Machine, bytes_worth_latency
from crossfade.cost.timeline import Costs
from crossfade.graph import collectives
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.program import Program

MB = 2**20
LEAST_GATHERS = 8
"""Into how many buckets gathers go at least, latency allowing: one alone would hold all parameters at once."""
SWEEP_LIMIT = 20_000
"""Nodes up to which building a program for each cap takes seconds, not minutes."""
_STEPS_PER_DOUBLING = 4


@dataclass(frozen=True)
class BucketSize:
    """How large buckets of one kind of collective are, in MB: at most `cap_mb`, of members smaller than `alone_mb`.

    Those are the sizes for the group that travels longest; `along` has those of the others, each with its name first.
    """

    cap_mb: float
    alone_mb: float
    along: tuple[tuple[str, float, float], ...] = ()

    def scaled(self, by: float) -> BucketSize:
        """Buckets so many times as large, of the same members."""
        others = tuple((group, cap_mb * by, alone_mb) for group, cap_mb, alone_mb in self.along)
        return replace(self, cap_mb=self.cap_mb * by, along=others)


@dataclass(frozen=True)
class Load:
    """All collectives of one kind on one group: their bytes, what each takes beside its bytes, and what hides them.

    `latency` and `launch` are the seconds of one collective on the link and on the computing lane, `seconds_a_byte`
    those of a byte of its larger side, and `hides` the seconds of computation that they can travel under.
    """

    kind: Kind
    group: str
    number: int
    bytes: int
    latency: float
    seconds_a_byte: float
    launch: float
    hides: float
    ranks: int

    def exposed(self, cap: float) -> float:
        """Predicted seconds of exposed communication in buckets of `cap` bytes.

        >>> load = Load(Kind.ALL_REDUCE, "dp", 100, 10**6, 1e-3, 1e-6, 0.0, hides=2.0, ranks=2)
        >>> [round(load.exposed(cap), 3) for cap in (10**3, 10**4, 10**5, 10**6)]
        [0.002, 0.011, 0.101, 1.001]
        """
        buckets = self.bytes / cap
        queued = self.hides / buckets + buckets * self.latency + self.bytes * self.seconds_a_byte - self.hides
        return max(queued, self.latency + cap * self.seconds_a_byte) + buckets * self.launch

    def best_cap(self) -> float:
        """The bytes of a bucket that leave the least exposed; the larger of equals."""
        least = min(float(self.bytes), bytes_worth_latency(self.latency, self.seconds_a_byte))
        caps = [max(least, self.bytes / LEAST_GATHERS) if self.kind is Kind.ALL_GATHER else float(self.bytes)]
        while caps[-1] > max(least, 1.0):
            caps.append(max(least, caps[-1] * 2 ** (-1 / _STEPS_PER_DOUBLING)))
        return min(caps, key=self.exposed)

    def alone(self, memory_bandwidth: float) -> float:
        """From how many bytes on one shares no bucket: latency is a small share of its travel, and to copy it, reading
        and writing each byte, takes longer than a launch.

        A gather is copied on its way in, where it is this rank's part only, and out; others are given out as views.

        >>> load = Load(Kind.ALL_GATHER, "dp", 100, 10**6, 1e-5, 1e-8, launch=1e-3, hides=2.0, ranks=2)
        >>> loads = load, replace(load, kind=Kind.ALL_REDUCE), replace(load, latency=1e-2)
        >>> [round(load.alone(3e9)) for load in loads]
        [1000000, 1500000, 4000000]
        """
        copies = 1 + 1 / self.ranks if self.kind is Kind.ALL_GATHER else 1
        not_worth_copying = self.launch * memory_bandwidth / (2 * copies)
        return max(not_worth_copying, bytes_worth_latency(self.latency, self.seconds_a_byte))


def choose_sizes(
    program: Program, machine: Machine, measured: Mapping[str, float] | None = None
) -> dict[Kind, BucketSize]:
    """How large buckets should be for each kind of collective in a program, along each of its groups.

    A link inside a node is full sooner than one between nodes, so that what fits one axis is too little or too much
    for another.

    It follows from the program's collectives, their order and costs: the same on all ranks.

        >>> from crossfade.cost.presets import preset
        >>> from crossfade.graph.text import parse
        >>> lines = ['x: f32[65536] = input("x")']
        >>> for i in range(40):
        ...     lines.append(f"g{i}: f32[65536] = aten.exp(x)")
        ...     lines.append(f's{i}: f32[65536] = c10d.all_reduce(g{i}, "sum", "dp")')
        ...     lines.append(f"w{i}: f32[65536] = c10d.wait_tensor(s{i})")
        >>> lines.append("return " + ", ".join(f'output("{i}", w{i})' for i in range(40)))
        >>> program = parse("\\n".join(lines), groups={"dp": 2})
        >>> choose_sizes(program, preset("ethernet-1gbit"))
        {<Kind.ALL_REDUCE: 'all_reduce'>: BucketSize(cap_mb=..., alone_mb=..., along=())}
    """
    loads: dict[Kind, list[Load]] = {}
    for load in loads_of(program, machine, estimate(program, machine, measured)):
        loads.setdefault(load.kind, []).append(load)
    return {kind: _sizes(found, machine) for kind, found in loads.items()}


def _sizes(loads: Sequence[Load], machine: Machine) -> BucketSize:
    """The sizes for the group that travels longest, and beside them those for the others."""
    longest = max(loads, key=_travel)
    others = sorted((load for load in loads if load is not longest), key=lambda load: load.group)
    return BucketSize(*_megabytes(longest, machine), tuple((load.group, *_megabytes(load, machine)) for load in others))


def _megabytes(load: Load, machine: Machine) -> tuple[float, float]:
    return _within_a_piece(load, machine) / MB, load.alone(machine.memory_bandwidth) / MB


def _within_a_piece(load: Load, machine: Machine) -> float:
    piece = machine.piece(load.kind, load.ranks, load.group)
    return min(load.best_cap(), piece) if piece is not None else load.best_cap()


def loads_of(program: Program, machine: Machine, costs: Costs) -> list[Load]:
    """The collectives of a program by kind and group, in the order of their first."""
    found: dict[tuple[Kind, str], list[Collective]] = {}
    for collective in collectives.find(program.graph):
        found.setdefault((collective.kind, collective.group), []).append(collective)
    progress = _progress(program, costs)
    return [_load(program, machine, costs, members, progress) for members in found.values()]


def _load(
    program: Program, machine: Machine, costs: Costs, members: Sequence[Collective], progress: Mapping[str, float]
) -> Load:
    first = members[0]
    ranks = program.groups.get(first.group) or first.group_size or 0
    latency = machine.collective_seconds(first.kind, 0, ranks, first.group)
    size = sum(member.bytes for member in members)
    travel = sum(costs.travel[member.node] for member in members) - latency * len(members)
    end = max(progress.values(), default=0.0)
    if first.kind is Kind.ALL_GATHER:  # gathered from the beginning, until the last is needed
        hides = max(progress[wait.name] for member in members for wait in member.waits or (member.node,))
    else:
        hides = end - min(progress[member.node.name] for member in members)
    launch = costs.compute.get(first.node, 0.0)
    a_byte = max(0.0, travel) / max(1, size)
    return Load(first.kind, first.group, len(members), size, latency, a_byte, launch, hides, ranks)


def _progress(program: Program, costs: Costs) -> dict[str, float]:
    """Seconds of computation before each node."""
    done, progress = 0.0, {}
    for node in program.graph.nodes:
        progress[node.name] = done
        done += costs.compute.get(node, 0.0)
    return progress


def _travel(load: Load) -> float:
    return load.number * load.latency + load.bytes * load.seconds_a_byte
