"""A program as a scheduling problem: numbers instead of nodes, what must precede what, seconds, links and memory."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from crossfade.cost.timeline import Costs
from crossfade.graph import collectives
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.memory import Storages
from crossfade.graph.order import Order, is_random, written_inputs
from crossfade.graph.private import has_schema
from crossfade.graph.program import Program, tensor_bytes
from crossfade.schedule.updates import reads_before_updates

NONE = -1


@dataclass(slots=True)
class Flight:
    """One collective: its start, its waits and elements by number, its link, and what it does to memory.

    A `grows` one holds more once it is launched than before (gathers): it is launched no earlier than useful. A
    `shrinks` one lets go of more at its wait than it brings (reduce-scatters): it is waited for once it has arrived.
    """

    start: int
    waits: tuple[int, ...]
    elements: tuple[int, ...]
    link: int
    travel: float
    grows: bool
    shrinks: bool
    made: int


@dataclass
class SchedulingProblem:
    """What a schedule is made from. Nodes are known by their position in the program; inputs and output stay put."""

    program: Program
    nodes: list[fx.Node]
    movable: list[int]
    cost: list[float]
    before: list[tuple[int, ...]]
    after: list[list[int]]
    flights: dict[int, Flight]
    """By the number of its start."""
    flight_at: list[int]
    """For each wait, the start of its flight; NONE for others."""
    links: list[str]
    slows: list[float]
    loose: list[bool]
    """Nodes that only take a wait's result apart: they follow their wait, and stand where they are needed."""
    storages: Storages
    touches: list[list[int]] = field(default_factory=list)

    @property
    def busy(self) -> float:
        """Seconds of computation, whatever the order."""
        return sum(self.cost)

    @cached_property
    def tails(self) -> list[float]:
        """For each node the longest way from its start to the end of the program, over computation and travel."""
        tail = [0.0] * len(self.nodes)
        for node in reversed(self.movable):
            longest = max((tail[user] for user in self.after[node]), default=0.0)
            if node in self.flights:
                flight = self.flights[node]
                longest = max([longest, *(tail[wait] + flight.travel for wait in flight.waits)])
            tail[node] = self.cost[node] + longest
        return tail

    @cached_property
    def heads(self) -> list[float]:
        """For each node the longest way from the beginning of the program to its end, over computation and travel."""
        head = [0.0] * len(self.nodes)
        for node in self.movable:
            longest = max((head[source] for source in self.before[node]), default=0.0)
            if self.flight_at[node] != NONE:
                start = self.flight_at[node]
                longest = max(longest, head[start] + self.flights[start].travel)
            head[node] = longest + self.cost[node]
        return head

    @cached_property
    def least_seconds(self) -> float:
        """No order is faster: computation takes so long, and so do the collectives of each link, after what the first
        of them needs and before what follows the last."""
        found = [self.busy]
        for link in range(len(self.links)):
            flights = [flight for flight in self.flights.values() if flight.link == link]
            first = min(self.heads[flight.start] for flight in flights)
            last = min(self.tails[wait] for flight in flights for wait in flight.waits or (flight.start,))
            found.append(first + sum(flight.travel for flight in flights) + last)
        return max(found)


def scheduling_problem(program: Program, costs: Costs) -> SchedulingProblem:
    """Read a program and its costs once."""
    order = Order(program.graph)
    nodes, position = order.nodes, order.position
    storages = Storages(nodes)
    ordered_groups = _groups_to_keep(nodes)
    before: list[tuple[int, ...]] = []
    after: list[list[int]] = [[] for _ in nodes]
    behind = reads_before_updates(program)
    movable = [index for index, node in enumerate(nodes) if node.op not in ("placeholder", "output")]
    fixed = {node for node in nodes if node.op in ("placeholder", "output")}
    for index, node in enumerate(nodes):
        found = set() if node in fixed else _predecessors(order, node, ordered_groups) - fixed
        found.update(behind.get(node, ()))
        before.append(tuple(sorted(position[source] for source in found)))
        for source in before[-1]:
            after[source].append(index)
    problem = SchedulingProblem(
        program, nodes, movable, [costs.compute.get(node, 0.0) for node in nodes], before, after, {},
        [NONE] * len(nodes), [], [], [False] * len(nodes), storages, [storages.touches[node] for node in nodes],
    )  # fmt: skip
    _add_flights(problem, costs, position)
    _find_loose(problem)
    return problem


def _groups_to_keep(nodes: Sequence[fx.Node]) -> set[str]:
    """Groups on which something communicates that we do not know: between sends and receives the order is theirs."""
    groups = ((collectives.group_of(node), node) for node in nodes)
    return {group for group, node in groups if group is not None and not collectives.is_collective(node)}


def _predecessors(order: Order, node: fx.Node, ordered_groups: set[str]) -> set[fx.Node]:
    keep = bool(ordered_groups) and collectives.group_of(node) in ordered_groups
    return set(order.predecessors(node, within_group=keep))


def _add_flights(problem: SchedulingProblem, costs: Costs, position: dict[fx.Node, int]) -> None:
    links: dict[str, int] = {}
    for index, node in enumerate(problem.nodes):
        collective = collectives.view(node)
        if collective is None or node not in costs.travel:  # what does not travel is computed
            continue
        link = links.setdefault(collective.group, len(links))
        waits = tuple(sorted(position[wait] for wait in collective.waits))
        elements = tuple(position[result] for result in collective.results if result is not node)
        problem.flights[index] = _flight(collective, index, waits, elements, link, costs.travel[node])
        for wait in waits:
            problem.flight_at[wait] = index
    problem.links = list(links)
    problem.slows = [costs.slows_compute.get(group, 0.0) for group in links]


def _flight(
    collective: Collective, index: int, waits: tuple[int, ...], elements: tuple[int, ...], link: int, travel: float
) -> Flight:
    taken = sum(tensor_bytes(node.meta.get("val")) for node in collective.inputs)
    in_own_memory = collective.in_place or collective.out is not None
    made = 0 if in_own_memory else tensor_bytes(collective.node.meta.get("val"))
    keeps_inputs = collective.kind not in (Kind.ALL_REDUCE, Kind.BROADCAST)
    return Flight(index, waits, elements, link, travel, made > taken, keeps_inputs and made < taken, made)


def _find_loose(problem: SchedulingProblem) -> None:
    """Mark views and elements that need nothing but waits, elements of flights, and one another."""
    element = {element for flight in problem.flights.values() for element in flight.elements}
    follows = [wait != NONE for wait in problem.flight_at]
    for index in problem.movable:
        node = problem.nodes[index]
        if follows[index] or index in problem.flights or index in element or not problem.before[index]:
            continue
        if all(follows[source] for source in problem.before[index]) and _takes_apart(problem.storages, node):
            problem.loose[index] = follows[index] = True


def _takes_apart(storages: Storages, node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    plain = has_schema(node.target) and not written_inputs(node) and not is_random(node)
    return plain and not node.is_impure() and collectives.group_of(node) is None and storages.makes_nothing(node)
