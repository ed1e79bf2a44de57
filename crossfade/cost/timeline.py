"""Timeline: what a program does when, on a machine (predicted here) or as it was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from crossfade.cost.lanes import Lanes
from crossfade.graph import collectives, offload
from crossfade.graph.program import Program


@dataclass(frozen=True, slots=True)
class Within:
    """A collective inside one node that computes on its pieces: how long it travels, and what it holds up there."""

    kind: str
    group: str
    bytes: int
    travel: float
    exposed: float


@dataclass(frozen=True)
class Costs:
    """Seconds of every node of one program.

    Copies to the host's memory and back travel as well, each way on a link of its own.
    `compute` is how long each node keeps the computing thread or stream busy, launching included; nodes without an
    entry cost nothing. `travel` is how long each started collective takes on its link when it has the link to itself.
    `slows_compute` says, by group, by which share computation slows down while a collective of that group travels.
    `within` has the nodes that are a collective and its computation in one, whose seconds in `compute` are all that
    they take, standing still included.
    """

    compute: Mapping[fx.Node, float]
    travel: Mapping[fx.Node, float]
    slows_compute: Mapping[str, float]
    within: Mapping[fx.Node, Within] = field(default_factory=dict)
    launches: Mapping[fx.Node, float] = field(default_factory=dict)
    """Seconds of the host before each node may begin: it launches one after another, ahead of the device."""


@dataclass(frozen=True, slots=True)
class Computed:
    """One node on the computing lane: its name, and the seconds from the start at which it began and ended.

    `on_core` is for how many of these seconds the computing thread had a processor, where that was measured.
    """

    name: str
    start: float
    finish: float
    on_core: float | None = None


@dataclass(frozen=True, slots=True)
class Travelled:
    """One collective: when it was launched, began to travel and arrived; `exposed` is how long computation stood still
    for it, `needed` when computation first asked for it (None: never)."""

    name: str
    kind: str
    group: str
    bytes: int
    launch: float
    start: float
    finish: float
    needed: float | None
    exposed: float


@dataclass(frozen=True)
class Timeline:
    """A run in two lanes. `seconds` is its whole length, `source` says who made it (a machine's name, or a run's)."""

    computation: tuple[Computed, ...]
    communication: tuple[Travelled, ...]
    seconds: float
    source: str = ""
    launching: float = 0.0
    """Seconds in which the device stood still for the host, which had not launched yet."""

    @cached_property
    def exposed(self) -> float:
        """Seconds in which computation stood still for communication."""
        return sum(span.exposed for span in self.communication)

    @cached_property
    def busy(self) -> float:
        """Seconds of computation."""
        return sum(span.finish - span.start for span in self.computation)

    @cached_property
    def on_core(self) -> float | None:
        """Seconds of computation for which the computing thread had a processor; None where nobody measured it.

        >>> Timeline((Computed("mm", 0.0, 3.0, on_core=2.0),), (), 3.0).on_core
        2.0
        """
        if not self.computation or any(span.on_core is None for span in self.computation):
            return None
        return sum(span.on_core or 0.0 for span in self.computation)

    @cached_property
    def stretched(self) -> float | None:
        """Seconds by which computation took longer because others had its processor; None where nobody measured it.

        >>> Timeline((Computed("mm", 0.0, 3.0, on_core=2.0),), (), 3.0).stretched
        1.0
        """
        return None if self.on_core is None else max(0.0, self.busy - self.on_core)

    @cached_property
    def travelling(self) -> float:
        """Seconds of communication, summed over collectives."""
        return sum(span.finish - span.start for span in self.communication)


def simulate(program: Program, costs: Costs, source: str = "predicted") -> Timeline:
    """Run a program's nodes in their order on one computing lane and one link a group.

    Nodes compute one after another. A collective travels when it has been launched and its group's link is free; a
    wait stands still until it has arrived; so does the end of the program for what nobody waited for. Groups do not
    slow each other down; computation is slowed down by all that travel, by the sum of their shares, but for what copy
    engines carry (`crossfade.all_gather_by_copy_engines`): that only keeps its group's link busy. A collective inside a
    node (`Costs.within`) has its link to itself; for what it holds up, the node stands still at its end.

        >>> from crossfade.graph.text import parse
        >>> program = parse('''
        ... x: f32[4] = input("x")
        ... start: f32[4] = c10d.all_reduce(x, "sum", "dp")
        ... y: f32[4] = aten.neg(x)
        ... done: f32[4] = c10d.wait_tensor(start)
        ... return output("y", y), output("done", done)
        ... ''', groups={"dp": 2})
        >>> x, start, y, *_ = program.graph.nodes
        >>> timeline = simulate(program, Costs({y: 2.0}, {start: 3.0}, {}))
        >>> timeline.seconds, timeline.exposed
        (3.0, 1.0)
    """
    clock = _Clock(costs)
    for node in program.graph.nodes:
        clock.run(node)
    return clock.timeline(source)


class _Clock:
    """The moving state of a simulation."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        groups = dict.fromkeys(map(_link_of, costs.travel))
        self.links = {group: link for link, group in enumerate(groups)}
        self.lanes = Lanes([costs.slows_compute.get(group, 0.0) for group in groups])
        self.computed: list[Computed] = []
        self.travels: dict[fx.Node, _Travel] = {}
        self.within: list[Travelled] = []
        self.host = 0.0
        self.idle = 0.0

    def run(self, node: fx.Node) -> None:
        if node in self.costs.launches:
            self.host += self.costs.launches[node]
            self.idle += self.lanes.wait(self.host)
        if collectives.is_wait(node) or offload.is_wait(node):
            self._wait(node)
        seconds = self.costs.compute.get(node, 0.0)
        if seconds:
            start = self.lanes.now
            self.lanes.compute(seconds)
            inside = self.costs.within.get(node)
            still = self._travel_within(node.name, inside, start) if inside is not None else 0.0
            self.computed.append(Computed(node.name, start, self.lanes.now - still))
        if node in self.costs.travel:
            self._launch(node)

    def _travel_within(self, name: str, inside: Within, start: float) -> float:
        """Note what travels inside a node that began then and ends now; how long the node stands still for it."""
        finish = self.lanes.now
        needed = finish - inside.exposed
        arrives = min(finish, start + inside.travel)
        self.within.append(
            Travelled(name, inside.kind, inside.group, inside.bytes, start, start, arrives, needed, inside.exposed)
        )
        return inside.exposed

    def _launch(self, node: fx.Node) -> None:
        group = _link_of(node)
        start = self.lanes.begins(self.links[group])
        collective = collectives.view(node)
        slows = collective is None or not collective.by_copy_engines
        finish = self.lanes.carry(self.costs.travel[node], self.links[group], slows=slows)
        self.travels[node] = _Travel(group, self.lanes.now, start, finish)

    def _wait(self, node: fx.Node) -> None:
        started = offload.started_by(node) if offload.is_wait(node) else collectives.started_by(node)
        travel = self.travels.get(started) if started is not None else None
        if travel is None:
            return
        travel.needed = self.lanes.now if travel.needed is None else travel.needed
        travel.exposed += self.lanes.wait(travel.finish)

    def _stand_still_for_the_rest(self) -> float:
        """When everything has arrived, also what nobody waited for; no moment is anybody's twice."""
        for travel in sorted(self.travels.values(), key=lambda travel: travel.finish):
            if travel.needed is None:
                travel.exposed = self.lanes.wait(travel.finish)
        return self.lanes.now

    def timeline(self, source: str) -> Timeline:
        end = self._stand_still_for_the_rest()
        spans = []
        for node, travel in self.travels.items():
            kind, size = _kind_and_bytes(node)
            spans.append(
                Travelled(
                    node.name, kind, travel.group, size, travel.launch, travel.start, travel.finish, travel.needed,
                    travel.exposed,
                )
            )  # fmt: skip
        spans = sorted([*spans, *self.within], key=lambda span: span.launch) if self.within else spans
        return Timeline(tuple(self.computed), tuple(spans), end, source, self.idle)


def _link_of(node: fx.Node) -> str:
    """The link that carries what a node begins to send: its group's, or the way to the host or from it."""
    copy = offload.view(node)
    return copy.way if copy is not None else collectives.group_of(node) or ""


def _kind_and_bytes(node: fx.Node) -> tuple[str, int]:
    if (copy := offload.view(node)) is not None:
        return copy.way, copy.bytes
    found = collectives.view(node)
    assert found is not None
    return str(found.kind), found.bytes


@dataclass
class _Travel:
    group: str
    launch: float
    start: float
    finish: float
    needed: float | None = None
    exposed: float = 0.0
