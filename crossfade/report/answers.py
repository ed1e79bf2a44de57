"""What a reader asks first: how long a step is and could be, what is exposed and why, what to do, which passes fired.

Everything here is read off a report's timelines, verdicts and records; terminal, page and comparison show the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from crossfade.cost.timeline import Timeline, Travelled
from crossfade.graph.passes import Outcome, PassRecord, Verdict
from crossfade.report.data import ReportData
from crossfade.report.rank_timelines import waits_for_late_ranks
from crossfade.report.units import format_bytes, format_seconds, plural

WORTH_SAYING = 0.005
"""The share of a step below which nothing is advised."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds of a step, and what they would be if no computation stood still for communication, and without any.

    `overlapped` is never less than what the busiest link carries. `alone` is the computation on processors of its own,
    without launching collectives.
    """

    step: float
    overlapped: float
    alone: float


@dataclass(frozen=True, slots=True)
class Exposure:
    """A collective that computation stood still for: why, and what can be done; `late` seconds of it are another
    rank's, which launched later."""

    collective: Travelled
    why: str
    remedy: str = ""
    late: float = 0.0


@dataclass(frozen=True, slots=True)
class Advice:
    """Something to do, and the most seconds that it can give."""

    seconds: float
    what: str
    how: str


@dataclass(frozen=True, slots=True)
class Fired:
    """What one pass that was asked for did: it `changed` the program, or found nothing, or says why it left things."""

    record: PassRecord
    did: str

    @property
    def left(self) -> bool:
        """Whether it declined something."""
        return any(verdict.outcome is Outcome.LEFT for verdict in self.record.verdicts)


@dataclass(frozen=True)
class Answers:
    """The answers of one report, from what was measured or, if nothing was, from what was predicted.

    >>> reduce = Travelled("r", "all_reduce", "dp", 2048, 0.0, 0.0, 4.0, needed=3.0, exposed=1.0)
    >>> answers = Answers(ReportData("step", measured=Timeline((), (reduce,), 5.0, "measured")))
    >>> answers.bounds, answers.exposures[0].why
    (Bounds(step=5.0, overlapped=4.0, alone=0.0), 'needed 3.00 s after its launch; its way takes 4.00 s')
    """

    report: ReportData

    @property
    def timeline(self) -> Timeline | None:
        """The timeline that answers."""
        return self.report.measured or self.report.predicted

    @property
    def how_known(self) -> str:
        """`measured` or `predicted`."""
        return "measured" if self.report.measured is not None else "predicted"

    @cached_property
    def bounds(self) -> Bounds | None:
        """How long a step is, and the two reference lines."""
        return bounds_of(self.timeline, self.report.compared_ranks.ways) if self.timeline is not None else None

    @cached_property
    def exposures(self) -> tuple[Exposure, ...]:
        """What is exposed, the longest first."""
        if self.timeline is None:
            return ()
        late = self._late
        before = _link_before(self.timeline)
        found = [self._exposure(collective, late.get(collective.name, 0.0), before) for collective in
                 self.timeline.communication if collective.exposed > 0]  # fmt: skip
        return tuple(sorted(found, key=lambda exposure: -exposure.collective.exposed))

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """What to do, the most milliseconds first."""
        timeline = self.timeline
        if timeline is None or not timeline.seconds:
            return ()
        found = [advice for advice in self._all_advice(timeline) if advice.seconds >= WORTH_SAYING * timeline.seconds]
        return tuple(sorted(found, key=lambda advice: -advice.seconds))

    @cached_property
    def fired(self) -> tuple[Fired, ...]:
        """Every pass that ran, and whether it did something."""
        return tuple(Fired(record, _did(record)) for record in self.report.records)

    @cached_property
    def _late(self) -> Mapping[str, float]:
        ranks = self.report.ranks
        own = next((rank.rank for rank in ranks if rank.timeline == self.report.measured), None)
        if len(ranks) < 2 or own is None:
            return {}
        return waits_for_late_ranks(self.report.compared_ranks, own)

    @cached_property
    def _last_words(self) -> dict[str, Verdict]:
        """The last verdict on each subject that was left as it was."""
        left = [verdict for _, verdict in self.report.verdicts if verdict.outcome in (Outcome.LEFT, Outcome.EXPOSED)]
        return {verdict.subject: verdict for verdict in left}

    def _exposure(self, collective: Travelled, late: float, before: Mapping[str, str]) -> Exposure:
        word = self._last_words.get(collective.name)
        remedy = word.remedy if word is not None else ""
        if late > collective.exposed / 2:
            return Exposure(collective, _why_late(self.report, collective, late), remedy, late)
        return Exposure(collective, _why(collective, before.get(collective.name, "")), remedy, late)

    def _all_advice(self, timeline: Timeline) -> Iterator[Advice]:
        stretched = timeline.stretched or 0.0
        if timeline.communication:
            yield Advice(
                stretched,
                "computation is stretched: other threads have its processor",
                "give each rank a core more than it computes with: fewer ranks on the host, or a lower OMP_NUM_THREADS",
            )
        late = sum(exposure.late for exposure in self.exposures)
        slowest = self.report.compared_ranks.slowest if late else None
        if slowest is not None:
            yield Advice(
                late,
                f"this rank stands still for rank {slowest.rank}, which launches last",
                f"see what rank {slowest.rank} does instead (Ranks), and give it less",
            )
        yield from self._advice_on_overlap(timeline, late)

    def _advice_on_overlap(self, timeline: Timeline, late: float) -> Iterator[Advice]:
        by_remedy: dict[str, float] = defaultdict(float)
        for exposure in self.exposures:
            by_remedy[exposure.remedy] += exposure.collective.exposed - exposure.late
        for remedy, seconds in by_remedy.items():
            if remedy:
                yield Advice(seconds, "collectives are exposed that a pass left as they were", remedy)
        busiest = busiest_link(timeline, self.report.compared_ranks.ways)
        movable = max(0.0, timeline.exposed - late)
        if self.report.predicted is None:
            beyond = max(0.0, busiest - (timeline.seconds - timeline.exposed))
            yield Advice(
                max(0.0, movable - beyond),
                "collectives are ordered without knowing what they cost",
                'plan for the machine: machine="calibrate", or a preset',
            )
        beyond = max(0.0, busiest - (timeline.seconds - timeline.exposed))
        yield Advice(
            min(beyond, movable),
            "a link carries more than computation can hide",
            "send less on it: more samples a step (accumulate), or parts of parameters along a faster axis",
        )


def bounds_of(timeline: Timeline, ways: Mapping[str, float] | None = None) -> Bounds:
    """The reference lines of a timeline; `ways` says how long collectives take without waiting for ranks that are late.

    >>> from crossfade.cost.timeline import Computed
    >>> reduce = Travelled("r", "all_reduce", "dp", 8, 1.0, 1.0, 4.0, needed=3.0, exposed=1.0)
    >>> bounds_of(Timeline((Computed("r", 0.0, 1.0), Computed("mm", 1.0, 3.0, 1.5)), (reduce,), 4.0))
    Bounds(step=4.0, overlapped=3.0, alone=2.0)
    """
    overlapped = min(timeline.seconds, max(timeline.seconds - timeline.exposed, busiest_link(timeline, ways)))
    launches = {sent.name: sent.launch for sent in timeline.communication}
    alone = 0.0
    for span in timeline.computation:
        if launches.get(span.name, span.start) <= span.start:  # launching is no computation, a matmul in pieces is
            alone += span.finish - span.start if timeline.on_core is None else span.on_core or 0.0
    return Bounds(timeline.seconds, overlapped, min(alone, overlapped))


def busiest_link(timeline: Timeline, ways: Mapping[str, float] | None = None) -> float:
    """The seconds that the group which travels longest is under way, where collectives take as long as `ways` says.

    >>> busiest_link(Timeline((), (), 1.0))
    0.0
    """
    carried: dict[str, float] = defaultdict(float)
    for sent in timeline.communication:
        carried[sent.group] += (ways or {}).get(sent.name, sent.finish - sent.start)
    return max(carried.values(), default=0.0)


def about(collective: Travelled) -> str:
    """What a collective is, in words.

    >>> about(Travelled("r", "all_reduce", "dp", 2048, 0.0, 0.0, 1.0, None, 0.0))
    'all_reduce of 2 KiB on dp'
    """
    return f"{collective.kind} of {format_bytes(collective.bytes)} on {collective.group}"


def _link_before(timeline: Timeline) -> dict[str, str]:
    """For each collective the one that its link carried before it."""
    last: dict[str, str] = {}
    found = {}
    for sent in sorted(timeline.communication, key=lambda sent: sent.start):
        found[sent.name] = last.get(sent.group, "")
        last[sent.group] = sent.name
    return found


def _why(collective: Travelled, before: str) -> str:
    way = format_seconds(collective.finish - collective.start)
    queued = collective.start - collective.launch
    if collective.needed is None:
        return "nothing is left to compute while it is under way"
    if before and queued > collective.exposed / 2:
        return f"its link was busy with {before} for {format_seconds(queued)}; its way takes {way}"
    room = max(0.0, collective.needed - collective.launch)
    return f"needed {format_seconds(room)} after its launch; its way takes {way}"


def _why_late(report: ReportData, collective: Travelled, late: float) -> str:
    meeting = next((met for met in report.compared_ranks.meetings if met.name == collective.name), None)
    last = f"rank {meeting.last}" if meeting is not None else "another rank"
    return f"{last} launched it last: {format_seconds(late)} of standing still are for that"


def _did(record: PassRecord) -> str:
    counts = ", ".join(f"{name} {number:,}" for name, number in record.counts.items() if number)
    if record.changed:
        return counts or "changed the program"
    declined = Counter(verdict.reason for verdict in record.verdicts if verdict.outcome is Outcome.LEFT)
    if not declined:
        return "found nothing to do"
    reason, _ = declined.most_common(1)[0]
    return f"left {plural(sum(declined.values()), 'candidate')}: {reason}"
