"""Which order to run a program in: a few orders are tried, each is predicted, the best that fits is kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from crossfade.cost.timeline import Costs
from crossfade.errors import MemoryLimitError, RewriteError
from crossfade.graph.order import reorder
from crossfade.graph.program import Program, paused_garbage_collection
from crossfade.schedule.headroom import Headroom
from crossfade.schedule.lean import lean_order
from crossfade.schedule.list_schedule import schedule_backward, schedule_forward
from crossfade.schedule.place import Placing, lane_of
from crossfade.schedule.predict import PredictedTravel, Prediction, live_bytes, predict
from crossfade.schedule.problem import SchedulingProblem, scheduling_problem

HIDDEN = "it travels under computation"
AT_ONCE = "its result is needed at once"
NOTHING_LEFT = "no independent computation left"
BUSY = "the link was busy"
MEMORY = "memory limit"

_AS_IT_STANDS = "as it stands"
_NEGLIGIBLE = 1e-3
"""Exposed communication under this share of a step, or of its travel, counts as none."""
_NEAR_THE_LEAST = 5e-3
"""An order within this share of what no order can beat ends the search."""
_WORTH_MEMORY = 0.01
"""Orders within this share of the fastest are as good: the one that holds the least memory is taken."""


@dataclass(frozen=True, slots=True)
class CollectiveOutlook:
    """What is predicted for one collective: the seconds it travels, those that computation stands still for it or for
    what it queues behind, and why."""

    name: str
    travel: float
    exposed: float
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.name}: travels {_milliseconds(self.travel)}, exposed {_milliseconds(self.exposed)}: {self.reason}"
        )


@dataclass(frozen=True)
class Schedule:
    """An order of a program's nodes and what is predicted of it; `chosen` says which of the orders tried it is.

    Peaks are live bytes beside inputs and constants, as `crossfade.graph.memory` counts them.
    """

    order: tuple[str, ...]
    chosen: str
    seconds_before: float
    seconds: float
    peak_before: int
    peak: int
    collectives: tuple[CollectiveOutlook, ...]

    @property
    def exposed(self) -> float:
        """Seconds in which computation is predicted to stand still for communication."""
        return sum(outlook.exposed for outlook in self.collectives)

    def __str__(self) -> str:
        lines = [
            f"{self.chosen}: {_milliseconds(self.seconds_before)} -> {_milliseconds(self.seconds)},"
            f" peak {self.peak_before:,} -> {self.peak:,} bytes",
            *map(str, self.collectives),
            " ".join(self.order),
        ]
        return "\n".join(lines)


def plan_schedule(program: Program, costs: Costs, memory_limit: int | None = None) -> Schedule:
    """The best order found for a program on a machine that these are the costs of; pure.

    It is never predicted to be slower than the order that the program has, unless that one breaks the limit: live
    bytes, beside inputs and constants. The same program and costs give the same schedule, everywhere.

        >>> from crossfade.graph.text import parse
        >>> program = parse('''
        ... x: f32[4] = input("x")
        ... start: f32[4] = c10d.all_reduce(x, "sum", "dp")
        ... done: f32[4] = c10d.wait_tensor(start)
        ... a: f32[4] = aten.neg(done)
        ... b: f32[4] = aten.exp(x)
        ... return output("a", a), output("b", b)
        ... ''', groups={"dp": 2})
        >>> x, start, done, a, b, _ = program.graph.nodes
        >>> print(plan_schedule(program, Costs({a: 1e-3, b: 2e-3}, {start: 3e-3}, {})))
        in order unless blocked: 6.000 ms -> 4.000 ms, peak 32 -> 48 bytes
        start: travels 3.000 ms, exposed 1.000 ms: no independent computation left
        x start b done a output
    """
    with paused_garbage_collection():
        return _plan(scheduling_problem(program, costs), memory_limit)


def apply_schedule(program: Program, schedule: Schedule) -> bool:
    """Put a program's nodes in a schedule's order; True if that changed anything."""
    by_name = {node.name: node for node in program.graph.nodes}
    unknown = [name for name in schedule.order if name not in by_name]
    if unknown or len(schedule.order) != len(by_name):
        raise RewriteError(
            f"the schedule has {len(schedule.order)} nodes, the program {len(by_name)}"
            + (f" and no {unknown[0]}" if unknown else ""),
            expected="the schedule of this program",
            remedy="plan it again",
        )
    return reorder(program.graph, [by_name[name] for name in schedule.order])


@dataclass(frozen=True)
class _Candidate:
    label: str
    order: Sequence[int]
    prediction: Prediction
    held_back: frozenset[int] = frozenset()
    firm: bool = True
    """Whether it would be the same under another limit."""

    def fits(self, limit: int | None) -> bool:
        return limit is None or self.prediction.peak <= limit

    def is_enough(self, problem: SchedulingProblem, limit: int | None) -> bool:
        """Whether nothing better is worth looking for."""
        found, least = self.prediction, problem.least_seconds
        hides_all = found.exposed <= _NEGLIGIBLE * found.seconds
        return self.fits(limit) and (hides_all or found.seconds <= least * (1 + _NEAR_THE_LEAST))


def _plan(problem: SchedulingProblem, memory_limit: int | None) -> Schedule:
    incoming = _Candidate(_AS_IT_STANDS, problem.movable, predict(problem, problem.movable))
    candidates = [incoming]
    for label, lane in _lanes(problem):
        candidates += _placed(problem, label, lane, memory_limit)
        if _some_fit(candidates, memory_limit) and any(
            candidate.is_enough(problem, memory_limit) for candidate in candidates
        ):
            break
    if not _some_fit(candidates, memory_limit):
        order = lean_order(problem)
        candidates.append(_Candidate("least memory", order, predict(problem, order)))
        _refuse_unless_some_fit(candidates, memory_limit)
    chosen = _best(candidates, memory_limit)
    bounded = [candidate.held_back for candidate in candidates if candidate is chosen or not candidate.firm]
    return _schedule(problem, incoming, chosen, frozenset[int]().union(*bounded))


def _lanes(problem: SchedulingProblem) -> Iterator[tuple[str, Sequence[int]]]:
    """Orders of computation to try, from the least change to the most."""
    yield "launches and waits moved", problem.movable
    in_order = schedule_forward(problem, range(len(problem.nodes)))
    yield "in order unless blocked", in_order
    longest_first = sorted(problem.movable, key=lambda node: (-problem.tails[node], node))
    critical = schedule_forward(problem, _ranks(longest_first))
    yield "longest way first", critical
    for order in (in_order, critical):
        late = schedule_backward(problem, _ranks(order))
        yield "as late as it may", late
        early = schedule_forward(problem, _ranks(late))
        yield "by latest start", early
    longest_behind = sorted(problem.movable, key=lambda node: (problem.heads[node], node))
    late = schedule_backward(problem, _ranks(longest_behind))
    yield "longest way last", late
    yield "by latest start", schedule_forward(problem, _ranks(late))


def _ranks(order: Sequence[int]) -> list[int]:
    ranks = [0] * (max(order, default=-1) + 1)
    for rank, node in enumerate(order):
        ranks[node] = rank
    return ranks


def _placed(problem: SchedulingProblem, label: str, order: Sequence[int], limit: int | None) -> list[_Candidate]:
    """An order of computation with launches and waits put into it: as early as pays, and as memory allows."""
    lane = lane_of(problem, order)
    if limit is None:
        return [_candidate(problem, label, Placing(problem, lane))]
    lean = _candidate(problem, f"{label}, scatters waited for", Placing(problem, lane, prefetch=False, limit=0))
    late = _candidate(problem, f"{label}, nothing gathered ahead", Placing(problem, lane, prefetch=False, limit=limit))
    found = [lean, replace(late, firm=False)]
    for base in found:
        if base.fits(limit):
            headroom = Headroom(_live_by_place(problem, lane, base.order), limit)
            ahead = _candidate(problem, label, Placing(problem, lane, headroom=headroom, limit=limit))
            return [*found, replace(ahead, firm=False)]
    return found


def _candidate(problem: SchedulingProblem, label: str, placing: Placing) -> _Candidate:
    order = placing.run()
    return _Candidate(label, order, predict(problem, order), frozenset(placing.held_back))


def _some_fit(candidates: Sequence[_Candidate], limit: int | None) -> bool:
    """Whether one fits that does not depend on the limit: so that any larger limit is possible too."""
    return any(candidate.firm and candidate.fits(limit) for candidate in candidates)


def _live_by_place(problem: SchedulingProblem, lane: Sequence[int], order: Sequence[int]) -> list[int]:
    """The most live bytes at each place of a lane, what stands before it in the order included."""
    live = live_bytes(problem, order)
    place, most = 0, [0] * (len(lane) + 1)
    for node, size in zip(order, live, strict=True):
        most[place] = max(most[place], size)
        if place < len(lane) and node == lane[place]:
            place += 1
    return most


def _best(candidates: Sequence[_Candidate], limit: int | None) -> _Candidate:
    """The fastest that fits; of those nearly as fast, and no slower than as it stands, the one of least memory."""
    incoming, fitting = candidates[0], [candidate for candidate in candidates if candidate.fits(limit)]
    fastest = min(candidate.prediction.seconds for candidate in fitting)
    near = fastest * (1 + _WORTH_MEMORY)
    bound = min(near, incoming.prediction.seconds) if incoming.fits(limit) else near
    good = [candidate for candidate in fitting if candidate.prediction.seconds <= bound]
    return min(good, key=lambda candidate: (candidate.prediction.peak, candidate.prediction.seconds))


def _refuse_unless_some_fit(candidates: Sequence[_Candidate], limit: int | None) -> None:
    firm = [candidate for candidate in candidates if candidate.firm]
    best = min(firm, key=lambda candidate: candidate.prediction.peak)
    if limit is None or best.fits(limit):
        return
    least = best.prediction.peak
    error = MemoryLimitError(
        f"the program's live bytes reach {least:,} in the best order found ({best.label})",
        expected=f"at most {limit:,}, the memory limit, beside inputs and constants",
        remedy=f"raise the limit to at least {least}, shard more (zero3), or use a smaller batch",
    )
    error.least = least
    raise error


def _schedule(
    problem: SchedulingProblem, incoming: _Candidate, chosen: _Candidate, held_back: frozenset[int]
) -> Schedule:
    nodes = problem.nodes
    inputs = [node.name for node in nodes if node.op == "placeholder"]
    names = (*inputs, *(nodes[index].name for index in chosen.order), nodes[-1].name)
    found = chosen.prediction
    outlooks = tuple(
        CollectiveOutlook(
            nodes[start].name, travel.finish - travel.start, travel.exposed, _reason(start in held_back, travel)
        )
        for start, travel in found.travels.items()
    )
    before = incoming.prediction
    return Schedule(names, chosen.label, before.seconds, found.seconds, before.peak, found.peak, outlooks)


def _reason(held_back: bool, travel: PredictedTravel) -> str:
    """Why a collective is exposed, if it is."""
    alone, queued = travel.finish - travel.start, travel.start - travel.launch
    if travel.exposed <= _NEGLIGIBLE * alone:
        return HIDDEN
    if held_back:
        return MEMORY
    if travel.exposed - queued <= travel.exposed / 2:
        return BUSY
    return AT_ONCE if travel.needed <= travel.launch else NOTHING_LEFT


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms"
