"""Waits on their way down: as far as the first use of a result and the peak of live memory let them.

Views and copies that take a result apart sink with its wait. `rising.py` is the other end.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from torch import fx

from crossfade.graph import collectives
from crossfade.graph.collectives import Kind
from crossfade.graph.effects import aliased_by
from crossfade.graph.order import Order, reorder
from crossfade.graph.packing import COPIES_OUT
from crossfade.graph.private import schema_of
from crossfade.graph.room import Room

HELD = "later it would hold more than the peak of live memory"
"""Why a wait is where it is, where nothing but memory kept it from sinking farther."""


class Sinking:
    """Where the waits of a graph go, from the last to the first, each with what takes its result apart.

    What they go to are gaps, numbered as `Room` does: the one before the node at position p is 2p - 1.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph, self.order = graph, Order(graph)
        self.gaps: dict[fx.Node, int] = {}
        """The gap of each node that something below needs, and that takes a result apart, whether it moves or not."""
        self.held = set[fx.Node]()
        """The nodes that memory kept from sinking farther."""
        self._groups: list[list[fx.Node]] = []

    @cached_property
    def _room(self) -> Room:
        return Room(self.order.nodes, up=False, roots=self.order.roots)

    def sink(self) -> None:
        """Decide for every wait."""
        position = self.order.position
        found = [sorted(group, key=position.__getitem__) for group in self._together()]
        self._groups = sorted(found, key=lambda group: position[group[0]])
        for group in reversed(self._groups):
            gaps = self._wanted(group)
            if not self._may_hold_more(group):
                self.gaps |= gaps
                continue
            limit = self._room.move(gaps)
            for node, gap in gaps.items():
                self.gaps[node] = max(min(gap, limit), self._gap_behind(node))
                if self.gaps[node] < gap:
                    self.held.add(node)

    def first_behind(self, wait: fx.Node) -> fx.Node:
        """The first node below a wait that did not sink, where the wait stands now."""
        nodes = self.order.nodes
        place = (self.gaps[wait] + 1) // 2 if wait in self.gaps else self.order.position[wait]
        while nodes[place] in self.gaps:
            place += 1
        return nodes[place]

    def apply(self) -> bool:
        """Put the graph's nodes where they went; whether that changed anything."""
        sunk: dict[int, list[fx.Node]] = {}
        for group in self._groups:  # what sank first stands last in its gap
            for node in group:
                if node in self.gaps:
                    sunk.setdefault(self.gaps[node], []).append(node)
        result: list[fx.Node] = []
        for place, node in enumerate(self.order.nodes):
            result += sunk.get(2 * place - 1, ())
            if node not in self.gaps:
                result.append(node)
        return reorder(self.graph, result)

    def _gap_behind(self, node: fx.Node) -> int:
        return 2 * self.order.position[node] + 1

    def _together(self) -> Iterator[list[fx.Node]]:
        """The waits on one collective, and what takes its results apart; waits on other tensors, each alone."""
        grouped = set[fx.Node]()
        for collective in collectives.find(self.graph):
            group = [node for node in dict.fromkeys(_apart(collective, self.order)) if node not in grouped]
            grouped.update(group)
            if group:
                yield group
        yield from ([wait] for wait in collectives.waits(self.graph) if wait not in grouped)

    def _wanted(self, group: Sequence[fx.Node]) -> dict[fx.Node, int]:
        """The gap before the first node that keeps each node of a group up; copies go no lower than the first wait."""
        gaps = self._sunk(group, {})
        copies = [node for node in group if node.target in COPIES_OUT]
        if not copies:
            return gaps
        first: dict[fx.Node, int] = {}
        for wait in (node for node in group if collectives.is_wait(node) and node in gaps):
            owner = self.order.owner(wait)
            first[owner] = min(first.get(owner, gaps[wait]), gaps[wait])
        owners = {copy: self.order.owner(copy.args[0]) for copy in copies}  # type: ignore[arg-type]
        return self._sunk(group, {copy: first[owner] for copy, owner in owners.items() if owner in first})

    def _sunk(self, group: Sequence[fx.Node], at_most: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
        position, gaps = self.order.position, dict[fx.Node, int]()
        end = 2 * position[self.order.nodes[-1]] - 1
        for node in reversed(group):
            ends = [
                gaps[after] if after in gaps else self.gaps.get(after, 2 * position[after] - 1)
                for after in self.order.successors(node)
            ]
            gaps[node] = max(min([*ends, at_most.get(node, end)]), self._gap_behind(node))
        return gaps

    def _may_hold_more(self, group: Sequence[fx.Node]) -> bool:
        """Whether a group may hold more, or make more where it goes, when it sinks: a wait for what sends a copy of its
        input, and views of its result, hold nothing that is not held anyway."""
        for node in group:
            start = collectives.started_by(node) if collectives.is_wait(node) else None
            started = collectives.view(start) if start is not None else None
            if started is not None and (started.coalesced or started.kind not in (Kind.ALL_REDUCE, Kind.BROADCAST)):
                return True
            if node.target in COPIES_OUT or node.target is operator.getitem:
                return True
        return False


def stays(wait: fx.Node) -> bool:
    """Whether a wait, and all that takes its result apart, stand right above a node that needs them: told without an
    order.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4] = input("x")
    ... s: f32[4] = c10d.all_reduce(x, "sum", "dp")
    ... w: f32[4] = c10d.wait_tensor(s)
    ... flat: f32[2, 2] = aten.view(w, [2, 2])
    ... y: f32[2, 2] = aten.neg(flat)
    ... return output("y", y)
    ... ''', groups={"dp": 2})
    >>> stays(collectives.waits(program.graph)[0])
    True
    """
    waited = collectives.waited_value(wait)
    apart = [wait, *_users_apart(waited), *_users_apart(wait)]
    return all(node.next in node.users for node in apart)


def _apart(collective: collectives.Collective, order: Order) -> Iterator[fx.Node]:
    """What takes the results of a collective apart, and its waits."""
    for result in collective.results:
        if order.owner(result) is not result:  # it lies in a buffer, which others may name
            yield from (user for user in result.users if collectives.is_wait(user))
            continue
        if result is not collective.node:
            yield result
        yield from _users_apart(result)


def _users_apart(result: fx.Node) -> Iterator[fx.Node]:
    """Waits for a value, views and copies of it, and views of those copies."""
    waiting = [(user, result, False) for user in result.users]
    while waiting:
        node, source, copied = waiting.pop()
        copies = node.target in COPIES_OUT and node.args[0] is source and not copied
        if not (copies or collectives.is_wait(node) or _is_view_of(node, source)):
            continue
        yield node
        waiting += [(user, node, copied or copies) for user in node.users]


def _is_view_of(node: fx.Node, source: fx.Node) -> bool:
    """Views and `getitem`: they cost nothing and write nothing."""
    if node.target is operator.getitem:
        return True
    if aliased_by(node) is not source or collectives.is_collective(node):
        return False
    schema = schema_of(node.target)
    return schema is not None and not schema.is_mutable
