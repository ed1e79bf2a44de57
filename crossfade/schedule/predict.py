"""What an order of nodes would do: its seconds, what stands still for what, and its memory. `simulate` on numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from crossfade.cost.lanes import Lanes
from crossfade.schedule.problem import NONE, SchedulingProblem


@dataclass(frozen=True, slots=True)
class PredictedTravel:
    """When a collective was launched, began to travel, arrived and was first asked for, and what it held up."""

    launch: float
    start: float
    finish: float
    needed: float
    exposed: float


@dataclass(frozen=True)
class Prediction:
    """What an order would do; `travels` by the number of each collective's start."""

    seconds: float
    exposed: float
    peak: int
    travels: dict[int, PredictedTravel]


def predict(problem: SchedulingProblem, order: Sequence[int]) -> Prediction:
    """Run an order on one computing lane and one link a group, as `crossfade.cost.timeline.simulate` does."""
    lanes = Lanes(problem.slows)
    cost, flight_at, flights = problem.cost, problem.flight_at, problem.flights
    begun: dict[int, tuple[float, float, float]] = {}
    needed: dict[int, float] = {}
    exposed: dict[int, float] = {}
    for node in order:
        start = flight_at[node]
        if start != NONE:
            needed.setdefault(start, lanes.now)
            exposed[start] = exposed.get(start, 0.0) + lanes.wait(begun[start][2])
        if cost[node]:
            lanes.compute(cost[node])
        if node in flights:
            link, travel = flights[node].link, flights[node].travel
            begun[node] = lanes.now, lanes.begins(link), lanes.carry(travel, link)
    end = lanes.now
    unasked = [start for start in begun if start not in needed]
    for start in sorted(unasked, key=lambda start: begun[start][2]):  # the end of the program waits for these
        exposed[start] = lanes.wait(begun[start][2])
    travels = {start: PredictedTravel(*times, needed.get(start, end), exposed[start]) for start, times in begun.items()}
    return Prediction(lanes.now, sum(exposed.values()), peak_of(problem, order), travels)


def peak_of(problem: SchedulingProblem, order: Sequence[int]) -> int:
    """The most live bytes at any time."""
    return max(live_bytes(problem, order), default=0)


def live_bytes(problem: SchedulingProblem, order: Sequence[int]) -> list[int]:
    """The live bytes during each node of an order."""
    storages = problem.storages
    size, then, touches = storages.size, storages.then, problem.touches
    uses = list(storages.uses)
    begun = bytearray(len(size))
    live, result = 0, []
    for node in order:
        for cell in touches[node]:
            if not begun[cell]:
                begun[cell] = 1
                live += size[cell]
        result.append(live)
        for cell in touches[node]:
            uses[cell] -= 1
            if not uses[cell]:
                live -= size[cell]
                if then[cell]:
                    live -= _let_go(then[cell], size, then, uses)
    return result


def _let_go(cells: tuple[int, ...], size: list[int], then: list[tuple[int, ...]], uses: list[int]) -> int:
    """Release what an ended cell kept; the bytes that end with it."""
    ended, waiting = 0, list(cells)
    while waiting:
        cell = waiting.pop()
        uses[cell] -= 1
        if not uses[cell]:
            ended += size[cell]
            waiting += then[cell]
    return ended
