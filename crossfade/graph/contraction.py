"""Nodes that are to become one: who may join whom, and an order of the graph in which each group stands together.

Contracting nodes of an acyclic graph can make a cycle: two buckets, each with a member that needs the other's result.
Reachability between the contracted groups, here called units, is therefore kept exact while they grow, as one bitset
of units for each node: a walk over the graph decides everything, and units are few where nodes are many.
"""

from __future__ import annotations

import heapq
import itertools

from torch import fx

from crossfade.errors import RewriteError
from crossfade.graph.order import Order


class Contraction:
    """Units of communicating nodes over one walk of the graph: `walk` each node in order, then `open` or `join`.

    Every node that communicates must belong to a unit, alone or with others, so that the launches of each group can be
    put in an order that only depends on the collectives and their dependencies, which are the same on all ranks.

        >>> from crossfade.graph.text import parse
        >>> program = parse('''
        ... x: f32[4] = input("x")
        ... a: f32[4] = c10d.all_reduce(x, "sum", "dp")
        ... wait_a: f32[4] = c10d.wait_tensor(a)
        ... neg: f32[4] = aten.neg(wait_a)
        ... b: f32[4] = c10d.all_reduce(x, "sum", "dp")
        ... wait_b: f32[4] = c10d.wait_tensor(b)
        ... return output("a", neg), output("b", wait_b)
        ... ''', groups={"dp": 2})
        >>> units = Contraction(Order(program.graph))
        >>> for node in program.graph.nodes:
        ...     units.walk(node)
        ...     if node.name == "a":
        ...         unit = units.open(node)
        ...     if node.name == "b" and units.may_join(node, unit):
        ...         units.join(node, unit)
        >>> [node.name for node in units.sorted()]
        ['x', 'a', 'b', 'wait_a', 'neg', 'wait_b', 'output']
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        self.members: list[list[fx.Node]] = []
        self.unit_of: dict[fx.Node, int] = {}
        self._above: dict[fx.Node, int] = {}
        self._edges: dict[fx.Node, int] = {}
        self._unit_above: list[int] = []
        self._seen = 0
        """Units that some node already walked depends on."""
        self._grown = 0
        """Units that something was added to after they were seen: the bitsets below them lack what that needs."""

    def walk(self, node: fx.Node) -> None:
        """Note which units a node depends on; the nodes above it must have been walked, and put into their units."""
        above = 0
        predecessors = self.order.predecessors(node, within_group=False)
        self._edges[node] = len(predecessors)
        for before in predecessors:
            unit = self.unit_of.get(before)
            above |= self._above[before] if unit is None else self._unit_above[unit] | 1 << unit
        self._above[node] = above
        self._seen |= above

    def open(self, node: fx.Node) -> int:
        """Begin a unit with a node."""
        self.members.append([])
        self._unit_above.append(0)
        unit = len(self.members) - 1
        self._add(node, unit)
        return unit

    def may_join(self, node: fx.Node, unit: int) -> bool:
        """Whether the node does not depend on the unit, not even through other units."""
        return not self._closed(self._above[node]) >> unit & 1

    def is_ready_for(self, node: fx.Node, unit: int) -> bool:
        """Whether the node depends on nothing that begins with the unit or after it."""
        return not self._closed(self._above[node]) >> unit

    def join(self, node: fx.Node, unit: int) -> None:
        """Add a node to a unit."""
        if not self.may_join(node, unit):
            names = ", ".join(member.name for member in self.members[unit])
            raise RewriteError(
                f"{node.name} put together with {names}, on which it depends",
                expected="nodes that do not need one another's results",
                remedy="put it into another bucket",
            )
        self._grown |= self._seen & 1 << unit
        self._add(node, unit)

    def sorted(self, *, at_first: bool = True) -> list[fx.Node]:
        """All nodes, each unit's together: a topological order, else as they stood. Nothing moves up but units.

        A unit stands where its first member stood (its last, unless `at_first`), or below, where its inputs are ready.
        What used its members' results before that comes after it. Units are launched in `sequence`, whatever their
        groups: were two groups launched in another order on another rank, waits in between could lock both.
        """
        sequence = [self.members[unit][0] for unit in self.sequence(at_first=at_first)]
        chained = dict(itertools.pairwise(sequence))
        head = {member: members[0] for members in self.members for member in members}
        waiting = self._waiting(head, chained)
        rank, output = self._ranks(at_first), self.order.nodes[-1]
        ready = [(rank[node], node) for node, edges in waiting.items() if not edges and node is not output]
        heapq.heapify(ready)
        result: list[fx.Node] = []
        while ready:
            _, node = heapq.heappop(ready)
            unit = self.unit_of.get(node)
            together = [node] if unit is None else self.members[unit]
            result += together
            after = [head.get(follower, follower) for member in together for follower in self._successors(member)]
            for follower in after if node not in chained else [*after, chained[node]]:
                waiting[follower] -= 1
                if not waiting[follower] and follower is not output:
                    heapq.heappush(ready, (rank[follower], follower))
        return [*result, *(node for node in self.order.nodes if node.op == "output")]

    def sequence(self, *, at_first: bool = True) -> list[int]:
        """The units in the order to launch them: as their first (or last) members stood, but below what they need.

        It depends on nothing but the order of the communicating nodes and the dependencies between them.
        """
        position = self.order.position
        standing = sorted(range(len(self.members)), key=lambda u: position[self.members[u][0 if at_first else -1]])
        launched, sequence = 0, []
        held: list[tuple[int, int]] = []
        for unit in standing:
            held.append((unit, self._closed(self._unit_above[unit])))
            while ready := [entry for entry in held if not entry[1] & ~launched]:
                sequence += [entry[0] for entry in ready]
                launched |= sum(1 << entry[0] for entry in ready)
                held = [entry for entry in held if entry not in ready]
        return sequence

    def _add(self, node: fx.Node, unit: int) -> None:
        self.members[unit].append(node)
        self.unit_of[node] = unit
        self._unit_above[unit] |= self._above[node]

    def _closed(self, above: int) -> int:
        """Complete a set of units by what units in it have come to depend on since they were seen."""
        done = 0
        while pending := above & self._grown & ~done:
            unit = pending.bit_length() - 1
            done |= 1 << unit
            above |= self._unit_above[unit]
        return above

    def _ranks(self, at_first: bool) -> dict[fx.Node, int]:
        """Where each node wants to stand; placeholders first, whatever else is ready."""
        ranks = dict(self.order.position)
        for node in self.order.graph.find_nodes(op="placeholder"):
            ranks[node] -= len(ranks)
        for members in self.members:
            ranks[members[0]] = self.order.position[members[0 if at_first else -1]]
        return ranks

    def _waiting(self, head: dict[fx.Node, fx.Node], chained: dict[fx.Node, fx.Node]) -> dict[fx.Node, int]:
        """For each unit's head and each other node, how many edges lead to it; members of a unit have none between."""
        waiting: dict[fx.Node, int] = {}
        for node, edges in self._edges.items():
            unit = head.get(node, node)
            waiting[unit] = waiting.get(unit, 0) + edges
        for unit in chained.values():
            waiting[unit] += 1
        return waiting

    def _successors(self, node: fx.Node) -> list[fx.Node]:
        return self.order.successors(node, within_group=False)
