"""Where launches and waits stand in a given order of computation.

- What grows memory (gathers) is launched just early enough to be hidden: at the latest start that lets it, and all that
  is needed after it on the same link, arrive in time; behind what travels, and a stock of others, so that the link does
  not fall idle if that arrives sooner than predicted or a rank is late.
- Everything else is launched when it is ready, unless it would keep the link from something more urgent; gathers that
  only go to the results too, since these are held to the end anyway, if memory is not limited.
- Waits stand before the first use; those that let go of memory once their collective has surely arrived, or sooner
  where a limit asks for it.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Iterator, Sequence

from crossfade.cost.lanes import Lanes
from crossfade.graph.memory import Meter
from crossfade.schedule.headroom import Headroom
from crossfade.schedule.problem import NONE, Flight, SchedulingProblem

SAFETY = 0.25
"""How much longer, or less, than predicted a collective may travel and still be counted on: links are not clocks."""
_STOCK = 1 / 32
"""Which share of all that a link carries may be queued on it ahead of need, so that it does not fall idle when a rank
is late: that much of what gathers make is held longer than hiding them takes."""
_SETTLED = 1.0
"""How much longer it may travel until nothing is risked by waiting for it only to let go of memory."""
_LOOK_AHEAD = 16
"""Among how many of the next launches a more urgent one is looked for."""


def lane_of(problem: SchedulingProblem, order: Sequence[int]) -> list[int]:
    """The computation of an order: what is neither launched nor waited for, nor only takes a result of these apart.

    A launch that needs another collective's result stays: to have it started, it may pay to stand still for that.
    """
    elements = {element for flight in problem.flights.values() for element in flight.elements}
    follows = [problem.flight_at[node] != NONE or problem.loose[node] for node in range(len(problem.nodes))]
    return [
        node
        for node in order
        if not follows[node]
        and node not in elements
        and (node not in problem.flights or any(follows[source] for source in problem.before[node]))
    ]


class Placing:
    """Puts launches and waits between the nodes of a lane. `order` is the result.

    With `prefetch`, gathers are launched ahead of their use, as far as `headroom` allows (None: no limit); without,
    just before it. Where live bytes would go above `limit`, what lets go of memory at its wait is waited for, though
    it has not arrived. `held_back` are the starts that memory kept from being launched in time, or from travelling on.
    """

    def __init__(
        self, problem: SchedulingProblem, lane: Sequence[int], *,
        prefetch: bool = True, headroom: Headroom | None = None, limit: int | None = None,
    ) -> None:  # fmt: skip
        self.problem, self.lane, self.tails = problem, lane, problem.tails
        self.prefetch, self.headroom, self.limit = prefetch, headroom, limit
        self._meter = Meter(problem.storages)
        self.held_back: set[int] = set()
        self.order: list[int] = []
        self.lanes = Lanes([0.0] * len(problem.links))  # not slowed down: by how much depends on the order
        self.arrives: dict[int, float] = {}
        self._emitted = bytearray(len(problem.nodes))
        self._place = [NONE] * len(problem.nodes)
        for index, node in enumerate(lane):
            self._place[node] = index
        self._progress = list(itertools.accumulate((problem.cost[node] for node in lane), initial=0.0))
        self._upstream = self._flights_needed()
        self._ready_at = self._places_of_readiness()
        self._needed_at = self._places_of_need()
        self._latest = self._latest_starts()
        self._stock = self._stocks()
        self._hungry: list[list[tuple[float, int]]] = [[] for _ in problem.links]
        self._eager: list[list[tuple[float, int]]] = [[] for _ in problem.links]
        self._chained: list[tuple[float, int]] = []
        self._arriving: list[tuple[float, int]] = []
        self._coming, self._coming_held = self._by_readiness(held=False), self._by_readiness(held=True)
        self._missing, self._waiting_for = self._what_launches_wait_for()

    def run(self) -> list[int]:
        """Walk the lane once."""
        for start in self.problem.flights:
            if not self._missing[start]:
                self._enable(start)
        for place, node in enumerate(self.lane):
            needed = self._upstream.get(node, ())
            for start in needed:
                self._launch(start)
            begins = max([self.lanes.now, *(self.arrives[start] for start in needed)])
            self._take_what_arrived()
            self._launch_what_pays(place, begins + self.problem.cost[node])
            if begins > self.lanes.now:  # standing still for what it needs, which others may need too
                self._emit_what_it_needs(node)
                self._launch_what_pays(place, self.lanes.now + self.problem.cost[node])
            self._make_room(node)
            self._emit(node)
            if node not in self.problem.flights:
                self._satisfied_by(node)
        for start in self.problem.flights:
            self._launch(start)
        for node in self.problem.movable:
            self._emit(node)
        return self.order

    # what is known of a lane before walking it

    def _flights_needed(self) -> dict[int, tuple[int, ...]]:
        """For each node, the flights it needs directly: through waits, elements and what takes results apart."""
        problem = self.problem
        found: dict[int, tuple[int, ...]] = {}
        for node in problem.movable:
            needed: dict[int, None] = {}
            if problem.flight_at[node] != NONE:
                needed[problem.flight_at[node]] = None
            for source in problem.before[node]:
                if source in problem.flights:
                    needed[source] = None
                elif self._place[source] == NONE:
                    needed.update(dict.fromkeys(found.get(source, ())))
            if needed:
                found[node] = tuple(needed)
        return found

    def _places_of_readiness(self) -> dict[int, int]:
        """For each flight, the first place in the lane at which it could be launched."""
        ready: dict[int, int] = {}
        for start in self.problem.flights:
            behind = [self._place[node] + 1 for node in self.problem.before[start] if self._place[node] != NONE]
            upstream = [ready[other] for other in self._upstream.get(start, ()) if other in ready]
            ready[start] = max([0, *behind, *upstream])
        return ready

    def _places_of_need(self) -> dict[int, int]:
        """For each flight, the place in the lane at which something first needs it, also through another flight."""
        needed = dict.fromkeys(self.problem.flights, len(self.lane))
        for place in range(len(self.lane) - 1, -1, -1):
            for start in self._upstream.get(self.lane[place], ()):
                needed[start] = place
        for start in reversed(list(self.problem.flights)):
            for other in self._upstream.get(start, ()):
                needed[other] = min(needed[other], needed[start])
        return needed

    def _latest_starts(self) -> dict[int, float]:
        """For each flight, the seconds of computation done by when it must start, so that it and all that is needed
        after it on its link arrive in time."""
        latest: dict[int, float] = {}
        link_until = [self._progress[-1]] * len(self.problem.links)
        flights = self.problem.flights
        for start in sorted(flights, key=lambda start: (self._needed_at[start], start), reverse=True):
            flight = flights[start]
            arrive_by = min(link_until[flight.link], self._progress[self._needed_at[start]])
            latest[start] = link_until[flight.link] = arrive_by - flight.travel * (1 + SAFETY)
        return latest

    def _stocks(self) -> list[float]:
        """For each link, the seconds of travel to keep queued on it."""
        stocks = [0.0] * len(self.problem.links)
        for flight in self.problem.flights.values():
            stocks[flight.link] += _STOCK * flight.travel
        return stocks

    def _by_readiness(self, *, held: bool) -> list[list[tuple[int, int]]]:
        """For each link its flights by where they become ready: those held until that pays, or the others."""
        coming: list[list[tuple[int, int]]] = [[] for _ in self.problem.links]
        for start, flight in self.problem.flights.items():
            if self._is_held(flight) == held:
                coming[flight.link].append((self._ready_at[start], start))
        return [sorted(flights) for flights in coming]

    def _what_launches_wait_for(self) -> tuple[dict[int, int], dict[int, list[int]]]:
        """For each flight how many nodes of the lane and other flights it needs, and who needs each of those."""
        missing: dict[int, int] = {}
        waiting: dict[int, list[int]] = {}
        for start in self.problem.flights:
            needed = {node for node in self.problem.before[start] if self._place[node] != NONE}
            needed |= self._behind_loose(start) | set(self._upstream.get(start, ()))
            missing[start] = len(needed)
            for node in needed:
                waiting.setdefault(node, []).append(start)
        return missing, waiting

    def _behind_loose(self, start: int) -> set[int]:
        """Nodes of the lane that a launch needs through something that stands nowhere in it."""
        found: set[int] = set()
        pending = [node for node in self.problem.before[start] if self._place[node] == NONE]
        seen = set(pending)
        while pending:
            for node in self.problem.before[pending.pop()]:
                if self._place[node] != NONE:
                    found.add(node)
                elif node not in seen and node not in self.problem.flights:
                    seen.add(node)
                    pending.append(node)
        return found

    def _is_held(self, flight: Flight) -> bool:
        """Whether a flight makes memory that something in the lane has yet to use: not launched before that pays.

        What only goes to the program's results is held to the end, whenever it is launched; where memory is limited,
        as late as that.
        """
        return flight.grows and (self.limit is not None or self._needed_at[flight.start] < len(self.lane))

    # walking it

    def _emit(self, node: int) -> None:
        """Put a node at the end, and before it what it needs of waits, elements and launches."""
        if self._emitted[node]:
            return
        pending = [node]
        while pending:
            last = pending[-1]
            if self._emitted[last]:
                pending.pop()
                continue
            missing = [source for source in self.problem.before[last] if not self._emitted[source]]
            if missing:
                pending += reversed(missing)
                continue
            pending.pop()
            self._put(last)

    def _emit_what_it_needs(self, node: int) -> None:
        for source in self.problem.before[node]:
            self._emit(source)

    def _put(self, node: int) -> None:
        self._emitted[node] = 1
        self.order.append(node)
        problem = self.problem
        if self.limit is not None:
            self._meter.run(problem.nodes[node])
        start = problem.flight_at[node]
        if start != NONE:
            self.lanes.wait(self.arrives[start])
        self.lanes.compute(problem.cost[node])
        if node in problem.flights:
            self._took_off(problem.flights[node])

    def _took_off(self, flight: Flight) -> None:
        self.arrives[flight.start] = self.lanes.carry(flight.travel, flight.link)
        for element in flight.elements:
            self._emit(element)
        if flight.shrinks:
            safely = self.arrives[flight.start] + _SETTLED * flight.travel
            heapq.heappush(self._arriving, (safely, flight.start))
        self._satisfied_by(flight.start)

    def _launch(self, start: int) -> None:
        if not self._emitted[start]:
            self._make_room(start)
            self._emit(start)

    def _make_room(self, node: int) -> None:
        """Wait for what lets go of memory until what a node makes is within the limit, or nothing is left to."""
        if self.limit is None:
            return
        while self._arriving and self._meter.live + self._meter.made_by(self.problem.nodes[node]) > self.limit:
            start = heapq.heappop(self._arriving)[1]
            if self.arrives[start] > self.lanes.now:
                self.held_back.add(start)
            self._wait_for(start)

    def _satisfied_by(self, node: int) -> None:
        for start in self._waiting_for.get(node, ()):
            self._missing[start] -= 1
            if not self._missing[start] and not self._emitted[start]:
                self._enable(start)

    def _enable(self, start: int) -> None:
        """A launch may happen now, or when the flights that it needs have arrived."""
        at = max((self.arrives[other] for other in self._upstream.get(start, ())), default=0.0)
        if at > self.lanes.now:
            heapq.heappush(self._chained, (at, start))
            return
        flight = self.problem.flights[start]
        if not self._is_held(flight):
            heapq.heappush(self._eager[flight.link], (-self.tails[start], start))
        elif self.prefetch:
            heapq.heappush(self._hungry[flight.link], (self._latest[start], start))

    def _launch_what_pays(self, place: int, lane_free: float) -> None:
        """Launch what is worth launching before the next node, which keeps the lane until `lane_free`."""
        while self._chained and self._chained[0][0] <= self.lanes.now:
            self._enable(heapq.heappop(self._chained)[1])
        for link in range(len(self.lanes.free)):
            while (start := self._best(link, place, lane_free)) is not None:
                self._launch(start)

    def _best(self, link: int, place: int, lane_free: float) -> int | None:
        """Which launch on a link pays before the next node, or None.

        A gather goes once it is due, since launched earlier it would only hold memory for longer. Everything else goes
        at once, except where that would delay what is more urgent: something that becomes ready before it is through,
        or a gather whose latest start would pass meanwhile, which then goes first.
        """
        gather, reduction = self._first(self._hungry[link]), self._first(self._eager[link])
        if gather is not None and self._is_due(gather, place, lane_free):
            return gather
        would_idle = self.lanes.free[link] <= lane_free
        if reduction is None or (not would_idle and self._in_the_way(reduction, place)):
            return None
        through = self._done_when_free(link, place) + self.problem.flights[reduction].travel
        is_late = gather is not None and self._latest[gather] < through
        if gather is not None and is_late and self._fits(gather, place, is_late=True):
            return gather
        return reduction

    def _is_due(self, gather: int, place: int, lane_free: float) -> bool:
        """Whether a gather launched after the next node may be late, its link has room for it now, and memory too."""
        if self._latest[gather] >= self._progress[place + 1]:
            return False
        link = self.problem.flights[gather].link
        idles = self._idles_soon(gather, lane_free)
        in_stock = self.lanes.free[link] - lane_free < self._stock[link]
        fills = idles or (in_stock and not self._queues_before_its_turn(gather, place))
        return fills and self._fits(gather, place, is_late=idles)

    def _done_when_free(self, link: int, place: int) -> float:
        """The seconds of computation that will be done when a link is free."""
        return self._progress[place] + max(0.0, self.lanes.free[link] - self.lanes.now)

    def _idles_soon(self, start: int, lane_free: float) -> bool:
        """Whether a gather's link is idle when the lane is free again, or may be if what travels is early."""
        flight = self.problem.flights[start]
        idle_in = self.lanes.free[flight.link] - lane_free
        return idle_in <= 0 or idle_in < SAFETY * flight.travel

    def _first(self, waiting: list[tuple[float, int]]) -> int | None:
        while waiting and self._emitted[waiting[0][1]]:
            heapq.heappop(waiting)
        return waiting[0][1] if waiting else None

    def _fits(self, start: int, place: int, *, is_late: bool) -> bool:
        """Whether memory allows a gather this early; then it is taken into account, else it is held back if late."""
        if self.headroom is None or self.headroom.take(place, self._needed_at[start], self.problem.flights[start].made):
            return True
        if is_late:
            self.held_back.add(start)
        return False

    def _in_the_way(self, start: int, place: int) -> bool:
        """Whether something becomes ready before this would be through that had better go first.

        A launch held back is a bet on when the link falls idle: not worth a small gain.
        """
        flight = self.problem.flights[start]
        through = self._done_when_free(flight.link, place) + flight.travel
        coming = self._becoming_ready(self._coming[flight.link], place, through)
        return any(self._gain(other, start) > SAFETY * flight.travel for other in coming)

    def _queues_before_its_turn(self, gather: int, place: int) -> bool:
        """Whether a gather that is needed sooner becomes ready while this one would only stand in the queue."""
        link = self.problem.flights[gather].link
        coming = self._becoming_ready(self._coming_held[link], place, self._done_when_free(link, place))
        return any(self._latest[other] < self._latest[gather] for other in coming)

    def _becoming_ready(self, coming: Sequence[tuple[int, int]], place: int, until: float) -> Iterator[int]:
        """The next few flights that become ready behind a place of the lane, before so much computation is done."""
        first = bisect.bisect_right(coming, (place, len(self.problem.nodes)))
        for ready, other in coming[first : first + _LOOK_AHEAD]:
            if self._progress[ready] >= until:
                return
            yield other

    def _gain(self, first: int, second: int) -> float:
        """By how much sooner all is done if the first of two flights on one link travels before the second."""
        flights, tails = self.problem.flights, self.tails
        in_turn = max(tails[first], flights[first].travel + tails[second])
        return max(tails[second], flights[second].travel + tails[first]) - in_turn

    def _take_what_arrived(self) -> None:
        while self._arriving and self._arriving[0][0] <= self.lanes.now:
            self._wait_for(heapq.heappop(self._arriving)[1])

    def _wait_for(self, start: int) -> None:
        for wait in self.problem.flights[start].waits:
            if all(self._emitted[source] for source in self.problem.before[wait]):
                self._emit(wait)
