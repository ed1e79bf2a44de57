"""List scheduling on one computing lane and one link a group, from the front or from the end.

Whenever the lane is free, the ready node of the smallest rank runs; what waits for a collective becomes ready when that
has arrived. Whenever a link would fall idle before the lane is free again, the ready collective of the smallest rank
goes on it. From the end, the same is done with all arrows turned round: the result is the order in which everything
runs as late as it may, given what competes for the lane and the links.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from crossfade.cost.lanes import Lanes
from crossfade.schedule.problem import NONE, Flight, SchedulingProblem


def schedule_forward(problem: SchedulingProblem, rank: Sequence[int]) -> list[int]:
    """An order of all movable nodes; the smallest `rank` goes first where there is a choice."""
    return _Forward(problem, rank).order()


def schedule_backward(problem: SchedulingProblem, rank: Sequence[int]) -> list[int]:
    """The same from the end: the largest `rank` goes last where there is a choice."""
    return _Backward(problem, rank).order()[::-1]


class _ListSchedule:
    """The moving state: time, links, what is ready, and what waits for something on its way.

    How much travelling slows computation down is left out: it depends on the order that is being made.
    """

    def __init__(self, problem: SchedulingProblem, rank: Sequence[int]) -> None:
        self.problem, self.rank = problem, rank
        self.lanes = Lanes([0.0] * len(problem.links))
        self.ready: list[tuple[int, int]] = []
        self.arriving: list[tuple[float, int, int]] = []
        self.departing: list[list[tuple[int, int]]] = [[] for _ in problem.links]
        self.done: list[int] = []
        self.missing = [0] * len(problem.nodes)
        self.arrives: dict[int, float] = {}

    def order(self) -> list[int]:
        for node in self.problem.movable:
            self.missing[node] = self.count(node)
        for node in self.problem.movable:
            if not self.missing[node]:
                self.enable(node)
        while self._step():
            pass
        return self.done

    def _step(self) -> bool:
        """Choose what runs next; before it, put on each link what would keep it from falling idle meanwhile."""
        while self.arriving and self.arriving[0][0] <= self.lanes.now:
            _, rank, node = heapq.heappop(self.arriving)
            heapq.heappush(self.ready, (rank, node))
        if self.ready:
            node, begins = self.ready[0][1], self.lanes.now
        elif self.arriving:
            begins, _, node = self.arriving[0]
        else:
            return self._depart(float("inf"))
        if self._depart(begins + self.problem.cost[node]):
            return True
        if self.ready:
            heapq.heappop(self.ready)
        else:
            heapq.heappop(self.arriving)
        self.lanes.now = begins
        self.run(node)
        return True

    def _depart(self, until: float) -> bool:
        for link, waiting in enumerate(self.departing):
            if waiting and (self.lanes.free[link] < until or self.lanes.free[link] <= self.lanes.now):
                self.depart(self.problem.flights[heapq.heappop(waiting)[1]])
                return True
        return False

    def run(self, node: int) -> None:
        self.lanes.now += self.problem.cost[node]
        self.done.append(node)
        for other in self.next_to(node):
            self.satisfy(other)

    def satisfy(self, node: int) -> None:
        self.missing[node] -= 1
        if not self.missing[node]:
            self.enable(node)

    def enable(self, node: int) -> None:
        """Everything that a node needs has run or is on its way."""
        at = self.arrives.get(node, 0.0)
        if at > self.lanes.now:
            heapq.heappush(self.arriving, (at, self.rank[node], node))
        else:
            heapq.heappush(self.ready, (self.rank[node], node))

    def count(self, node: int) -> int:
        raise NotImplementedError

    def next_to(self, node: int) -> Sequence[int]:
        raise NotImplementedError

    def depart(self, flight: Flight) -> None:
        raise NotImplementedError


class _Forward(_ListSchedule):
    def count(self, node: int) -> int:
        return len(self.problem.before[node]) + (self.problem.flight_at[node] != NONE)

    def next_to(self, node: int) -> Sequence[int]:
        return self.problem.after[node]

    def enable(self, node: int) -> None:
        if node in self.problem.flights:
            heapq.heappush(self.departing[self.problem.flights[node].link], (self.rank[node], node))
        else:
            super().enable(node)

    def depart(self, flight: Flight) -> None:
        self.lanes.now += self.problem.cost[flight.start]
        arrives = self.lanes.carry(flight.travel, flight.link)
        self.done.append(flight.start)
        for wait in flight.waits:
            self.arrives[wait] = arrives
        for node in (*self.problem.after[flight.start], *flight.waits):
            self.satisfy(node)


class _Backward(_ListSchedule):
    """Waits run first, then their collective travels, then its start may run."""

    def __init__(self, problem: SchedulingProblem, rank: Sequence[int]) -> None:
        super().__init__(problem, [-place for place in rank])
        self.waits_left = {start: len(flight.waits) for start, flight in problem.flights.items()}

    def count(self, node: int) -> int:
        return len(self.problem.after[node]) + (node in self.problem.flights)

    def next_to(self, node: int) -> Sequence[int]:
        return self.problem.before[node]

    def order(self) -> list[int]:
        for start, flight in self.problem.flights.items():
            if not flight.waits:
                self._arrived(start)
        return super().order()

    def run(self, node: int) -> None:
        super().run(node)
        start = self.problem.flight_at[node]
        if start != NONE:
            self.waits_left[start] -= 1
            if not self.waits_left[start]:
                self._arrived(start)

    def _arrived(self, start: int) -> None:
        heapq.heappush(self.departing[self.problem.flights[start].link], (self.rank[start], start))

    def depart(self, flight: Flight) -> None:
        self.arrives[flight.start] = self.lanes.carry(flight.travel, flight.link)
        self.satisfy(flight.start)
