"""Hidden: how much of each collective's travel plain overlap can put under computation that does not need it.

A collective can travel beside whatever neither leads to it nor follows from it. Which nodes these are is one bitset of
collectives a node, for a thousand collectives at a time; sums over nodes are numpy's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy
from torch import fx

from crossfade.cost.timeline import Costs
from crossfade.graph.order import Order
from crossfade.graph.program import Program

_AT_A_TIME = 1024
"""Collectives in a bitset: more would take more memory, a bit for each node and each of them."""

_FIRST_REACH = 256
"""How far to either side is looked first, in nodes; four times as far each time that it does not suffice."""


def hidden_by_overlap(program: Program, costs: Costs) -> dict[fx.Node, float]:
    """For each started collective the seconds of its travel that independent computation can cover.

    Independent are the nodes neither above nor below it, by data, memory and effects. Collectives are served in the
    order of the program, each by the nearest computation that is left: no second of a node covers two of them.

        >>> from crossfade.graph.text import parse
        >>> program = parse('''
        ... x: f32[4] = input("x")
        ... start: f32[4] = c10d.all_reduce(x, "sum", "dp")
        ... done: f32[4] = c10d.wait_tensor(start)
        ... y: f32[4] = aten.neg(x)
        ... z: f32[4] = aten.add.Tensor(done, y)
        ... return output("z", z)
        ... ''', groups={"dp": 2})
        >>> x, start, done, y, z, _ = program.graph.nodes
        >>> hidden_by_overlap(program, Costs({y: 2.0, z: 5.0}, {start: 3.0}, {}))
        {start: 2.0}
    """
    overlap = Overlap(program, costs)
    return {start: overlap.hidden(start) for start in overlap.starts}


class Overlap:
    """`hidden_by_overlap` for whoever decides about collectives one by one, in the order of the program."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self._order, self._costs = Order(program.graph), costs
        self._places = [index for index, node in enumerate(self._order.nodes) if node in costs.travel]
        self.starts = [self._order.nodes[place] for place in self._places]
        self._before = _predecessors(self._order) if self.starts else []
        self._work = _Work(self._order, costs)
        self._bound: numpy.ndarray = numpy.empty((0, 0))
        self._found: dict[fx.Node, float] = {}

    def hidden(self, start: fx.Node) -> float:
        """The seconds of a collective's travel that are covered, once all before it have been served."""
        while start not in self._found:
            number = len(self._found)
            index, node = number % _AT_A_TIME, self.starts[number]
            if index == 0:
                self._bound = self._work.bound(_related(self._before, self._places[number : number + _AT_A_TIME]))
            bit = (self._bound[index >> 3], 1 << (index & 7))
            self._found[node] = self._work.cover(self._places[number], self._costs.travel[node], *bit)
        return self._found[start]

    def take(self, start: fx.Node, nodes: Iterable[fx.Node]) -> None:
        """Let nodes cover nothing any more, and a collective that was the last to be served go without its cover."""
        if self.starts[len(self._found) - 1] is start:
            self._work.give_back()
        self._work.spend([self._order.position[node] for node in nodes])


def _predecessors(order: Order) -> list[list[int]]:
    position = order.position
    return [[position[source] for source in order.predecessors(node, within_group=False)] for node in order.nodes]


def _related(before: Sequence[Sequence[int]], starts: Sequence[int]) -> list[int]:
    """For each node, the bits of the collectives above and below it."""
    above = [0] * len(before)
    for index, start in enumerate(starts):
        above[start] = 1 << index
    below = list(above)
    for node, earlier in enumerate(before):
        bits = above[node]
        for source in earlier:
            bits |= above[source]
        above[node] = bits
    for node in range(len(before) - 1, -1, -1):
        bits = below[node]
        if bits:
            for source in before[node]:
                below[source] |= bits
    return [over | other for over, other in zip(above, below, strict=True)]


class _Work:
    """The nodes that compute, in order, and the seconds of each that are still to be given."""

    def __init__(self, order: Order, costs: Costs) -> None:
        seconds = [(index, _seconds(node, costs)) for index, node in enumerate(order.nodes)]
        self._positions = numpy.array([index for index, spent in seconds if spent > 0], dtype=numpy.int64)
        self._left = numpy.array([spent for _, spent in seconds if spent > 0], dtype=numpy.float64)
        self._given: tuple[slice, numpy.ndarray] = (slice(0, 0), numpy.empty(0))

    def bound(self, bits: Sequence[int]) -> numpy.ndarray:
        """The bits of the nodes that have something left, eight collectives a row; the others are forgotten."""
        some = self._left > 0
        self._positions, self._left = self._positions[some], self._left[some]
        wide = -(-_AT_A_TIME // 8)
        rows = b"".join([bits[index].to_bytes(wide, "little") for index in self._positions.tolist()])
        return numpy.frombuffer(rows, dtype=numpy.uint8).reshape(len(self._left), wide).T.copy()

    def cover(self, position: int, travel: float, bound: numpy.ndarray, bit: int) -> float:
        """Give up to so many seconds of the nodes nearest to a position that are not bound by this bit; what there
        was of them."""
        reach, positions = _FIRST_REACH, self._positions
        while True:
            low, high = numpy.searchsorted(positions, (position - reach, position + reach + 1)).tolist()
            offered = numpy.where(bound[low:high] & bit, 0.0, self._left[low:high])
            total = float(offered.sum())
            if total >= travel or high - low == len(positions):
                break
            reach *= 4
        near = slice(low, high)
        taken = offered if total <= travel else _nearest(offered, positions[near] - position, travel)
        self._left[near] -= taken
        self._given = near, taken
        return min(total, travel)

    def give_back(self) -> None:
        """Take the last cover away again."""
        near, taken = self._given
        self._left[near] += taken
        self._given = near, numpy.zeros_like(taken)

    def spend(self, positions: Sequence[int]) -> None:
        """Leave nothing of the nodes at these positions."""
        self._left[numpy.isin(self._positions, positions)] = 0.0


def _nearest(offered: numpy.ndarray, distances: numpy.ndarray, wanted: float) -> numpy.ndarray:
    """What of each offer to take, the nearest first, the later of two as near: in sum what is wanted."""
    turn = numpy.argsort(numpy.where(distances > 0, 2 * distances, 1 - 2 * distances), kind="stable")
    offers = offered[turn]
    taken = numpy.empty_like(offered)
    taken[turn] = numpy.clip(wanted - (numpy.cumsum(offers) - offers), 0.0, offers)
    return taken


def _seconds(node: fx.Node, costs: Costs) -> float:
    """Seconds for which a node computes; what it stands still for inside it, and launches, cover nothing."""
    inside = costs.within.get(node)
    still = inside.exposed if inside is not None else 0.0
    return 0.0 if node in costs.travel else max(0.0, costs.compute.get(node, 0.0) - still)
