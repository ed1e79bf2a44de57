"""Starts of collectives on their way up: as far as data, the order of their group and the peak of live memory let them.

Shared by the passes that raise them; `sink_waits.py` is the other end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import fx

from crossfade.graph import collectives
from crossfade.graph.effects import aliased_by, is_pure
from crossfade.graph.order import Order, reorder
from crossfade.graph.prologues import prologue_of
from crossfade.graph.room import Room

HELD = "earlier it would hold more than the peak of live memory"
"""Why a start is where it is, where nothing but memory kept it from rising farther."""


@dataclass(frozen=True)
class Place:
    """Where a start goes: behind the node at the position `after`, or behind what rose to there before. `held` says
    that it would go farther if memory let it."""

    after: int
    held: bool


class Rising:
    """Where the starts of a graph go that rise one after the other, from the top.

    What only prepares a start's input rises with it. What is made earlier is held longer: that the peak of live memory
    stays what it was is looked after here.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph, self.order = graph, Order(graph)
        self._after: dict[fx.Node, int] = {}
        """For each node that rose, the position behind which it stands now."""
        self._risen: dict[int, list[fx.Node]] = {}
        position = self.order.position
        self._inputs_end = max((position[node] for node in self.order.nodes if node.op == "placeholder"), default=0)

    @cached_property
    def _room(self) -> Room:
        return Room(self.order.nodes, up=True, roots=self.order.roots)

    def place(self, start: fx.Node) -> Place:
        """Let one start rise, and say how far."""
        position, here = self.order.position, self.order.position[start]
        together = [*prologue_of(start), start]
        inside = set(together)
        needed = [
            self._after.get(before, position[before])
            for node in together
            for before in self.order.predecessors(node)
            if before not in inside
        ]
        end = max([min(self._inputs_end, here), *needed])
        if end >= here - 1:
            return Place(end, held=False)
        rising = [node for node in together if node is start or end < position[node]]
        gap = self._room.gap_before(self.order.nodes[end])
        limit = self._room.move(dict.fromkeys(rising, gap))
        if limit < gap:
            end = self._room.position_before(limit)
            rising = [node for node in rising if end < position[node]]
            if end >= here - 1:
                return Place(end, held=True)
        self._after.update(dict.fromkeys(rising, end))
        self._risen.setdefault(end, []).extend(rising)
        return Place(end, held=limit < gap)

    def apply(self) -> bool:
        """Put the graph's nodes where they went; whether that changed anything."""
        return bool(self._after) and reorder(self.graph, self.nodes())

    def nodes(self) -> list[fx.Node]:
        """All nodes, in their new order."""
        result: list[fx.Node] = []
        for place, node in enumerate(self.order.nodes):
            if node not in self._after:
                result.append(node)
            result += self._risen.get(place, ())
        return result


def stays(start: fx.Node) -> bool:
    """Whether what stands just above a start, and what prepares its input, is needed by these: told without an order.

    Views that they do not need are passed over: to start above them would hide nothing.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4, 4] = input("x")
    ... mm: f32[4, 4] = aten.mm(x, x)
    ... half: f32[4, 4] = aten.div.Tensor(mm, 2)
    ... s: f32[4, 4] = c10d.all_reduce(half, "sum", "dp")
    ... w: f32[4, 4] = c10d.wait_tensor(s)
    ... return output("w", w)
    ... ''', groups={"dp": 2})
    >>> stays(collectives.find(program.graph)[0].node)
    True
    """
    inside = {start, *prologue_of(start)}
    above = start.prev
    while above in inside or (_is_view(above) and inside.isdisjoint(above.users)):
        above = above.prev
    if above.op in ("placeholder", "root"):
        return True
    same_group = collectives.group_of(above) is not None and collectives.group_of(above) == collectives.group_of(start)
    return same_group or not inside.isdisjoint(above.users)


def _is_view(node: fx.Node) -> bool:
    """Whether all that a node does is look at memory."""
    return node.op == "call_function" and is_pure(node.target) and aliased_by(node) is not None
