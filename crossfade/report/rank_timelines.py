"""The timelines of several ranks on one clock: who waited for whom at each collective, what each rank did of its time.

Ranks on one host share a clock. Elsewhere clocks differ, and the collectives correct them: nobody has a result before
every member has launched, so each collective bounds by how much two clocks can differ. The clocks' own word counts
within these bounds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from crossfade.cost.timeline import Timeline, Travelled

EVERYONE_NEEDS_EVERYONE = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""Kinds, by how they begin, whose results need every member to have launched."""


@dataclass(frozen=True)
class RankTimeline:
    """What one rank did when. `began` is when, in seconds of its own host's clock; `groups` has, for each group that it
    names, the ranks in it.

    >>> RankTimeline(1, Timeline((), (), 0.5), began=100.0).rank
    1
    """

    rank: int
    timeline: Timeline
    began: float = 0.0
    host: str = ""
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankSums:
    """One rank's time from when the first rank began to when the last one ended, and what it did in it.

    `computing` is on a processor (or on a GPU's stream), `stretched` the time that computation lost because others had
    its processor, `exposed` standing still for communication, `idle` the rest. The four add up to the whole.
    `travelling` lies beneath them; `waited_for` is for how long others stood still because this rank launched late.
    """

    rank: int
    host: str
    computing: float
    stretched: float | None
    exposed: float
    idle: float
    travelling: float
    waited_for: float


@dataclass(frozen=True, slots=True)
class Meeting:
    """One collective on all members of its group: when each launched it, and who stood still for whom.

    `launches` are seconds on the common clock; `waited` is for how long each member stood still before the `last` rank
    had launched. The rest of its exposed time is the way itself.
    """

    name: str
    kind: str
    group: str
    bytes: int
    launches: Mapping[int, float]
    exposed: Mapping[int, float]
    waited: Mapping[int, float]

    @property
    def last(self) -> int:
        """The rank that launched last."""
        return max(self.launches, key=lambda rank: self.launches[rank])

    @property
    def skew(self) -> float:
        """Seconds between the first launch and the last."""
        return max(self.launches.values()) - min(self.launches.values())

    @property
    def lost(self) -> float:
        """Seconds that members stood still for the last rank, summed over them."""
        return sum(self.waited.values())


@dataclass(frozen=True)
class RankComparison:
    """Timelines of ranks on one clock. `starts` are when each began, from the first one's beginning on.

    >>> quick, slow = (Timeline((), (Travelled("r", "all_reduce", "dp", 8, at, at, 4.0, 4.0, 0.0),), 5.0)
    ...                for at in (1.0, 3.0))
    >>> members = {"dp": (0, 1)}
    >>> pair = RankComparison.of([RankTimeline(0, quick, groups=members), RankTimeline(1, slow, groups=members)])
    >>> pair.meetings[0].skew, pair.meetings[0].last
    (2.0, 1)
    """

    ranks: tuple[RankTimeline, ...]
    starts: tuple[float, ...]

    @classmethod
    def of(cls, ranks: Sequence[RankTimeline]) -> RankComparison:
        """Put ranks on one clock."""
        ordered = sorted(ranks, key=lambda rank: rank.rank)
        starts = _on_one_clock(ordered)
        first = min(starts, default=0.0)
        return cls(tuple(ordered), tuple(start - first for start in starts))

    @cached_property
    def seconds(self) -> float:
        """From when the first rank began to when the last one ended."""
        ends = [start + rank.timeline.seconds for start, rank in zip(self.starts, self.ranks, strict=True)]
        return max(ends, default=0.0)

    @cached_property
    def meetings(self) -> tuple[Meeting, ...]:
        """The collectives that several of these ranks took part in, in the order of their first launch."""
        met: dict[tuple, dict[int, tuple[float, Travelled]]] = {}
        for start, rank in zip(self.starts, self.ranks, strict=True):
            for key, travelled in _numbered(rank):
                met.setdefault(key, {})[rank.rank] = start, travelled
        found = [_meeting(members) for members in met.values() if len(members) > 1]
        return tuple(sorted(found, key=lambda meeting: min(meeting.launches.values())))

    @cached_property
    def ways(self) -> dict[str, float]:
        """The seconds that each collective is under way on the rank that launched last, which waits for nobody."""
        found: dict[str, float] = {}
        for rank in self.ranks if len(self.ranks) > 1 else ():
            for sent in rank.timeline.communication:
                way = sent.finish - sent.start
                found[sent.name] = min(way, found.get(sent.name, way))
        return found

    @cached_property
    def sums(self) -> tuple[RankSums, ...]:
        """What each rank did of its time."""
        waited_for = dict.fromkeys((rank.rank for rank in self.ranks), 0.0)
        for meeting in self.meetings:
            waited_for[meeting.last] += meeting.lost
        return tuple(self._sums(rank, waited_for[rank.rank]) for rank in self.ranks)

    def _sums(self, rank: RankTimeline, waited_for: float) -> RankSums:
        timeline = rank.timeline
        computing = timeline.busy if timeline.on_core is None else timeline.on_core
        idle = max(0.0, self.seconds - timeline.busy - timeline.exposed)
        return RankSums(
            rank.rank, rank.host, computing, timeline.stretched, timeline.exposed, idle, timeline.travelling, waited_for
        )

    @cached_property
    def slowest(self) -> RankSums | None:
        """The rank that others waited for the longest; where nobody waited, the one that computed the longest."""
        if len(self.ranks) < 2:
            return None
        return max(self.sums, key=lambda sums: (sums.waited_for, sums.computing + (sums.stretched or 0.0)))


def _numbered(rank: RankTimeline) -> list[tuple[tuple, Travelled]]:
    """A rank's collectives, each with what it is called on all members: the ranks of its group, and its number there.

    Where the group's members are not known its name stands for them.
    """
    count: Counter = Counter()
    found = []
    for travelled in rank.timeline.communication:
        group = rank.groups.get(travelled.group, travelled.group)
        key = (group, travelled.kind, count[group, travelled.kind])
        count[group, travelled.kind] += 1
        found.append((key, travelled))
    return found


def _meeting(members: Mapping[int, tuple[float, Travelled]]) -> Meeting:
    launches = {rank: start + travelled.launch for rank, (start, travelled) in members.items()}
    latest = max(launches.values())
    waited = {}
    for rank, (start, travelled) in members.items():
        from_then = start + (travelled.finish - travelled.exposed if travelled.needed is None else travelled.needed)
        waited[rank] = max(0.0, min(from_then + travelled.exposed, latest) - from_then)
    exposed = {rank: travelled.exposed for rank, (_, travelled) in members.items()}
    _, some = next(iter(members.values()))
    return Meeting(some.name, some.kind, some.group, some.bytes, launches, exposed, waited)


def _on_one_clock(ranks: Sequence[RankTimeline]) -> list[float]:
    """When each rank began, on the first one's clock: as its own clock says, within what collectives allow."""
    own = [{key: travelled for key, travelled in _numbered(rank) if _binds(travelled)} for rank in ranks]
    starts: list[float] = []
    for index, rank in enumerate(ranks):
        least, most = -math.inf, math.inf
        for before, start in enumerate(starts):
            for key in own[index].keys() & own[before].keys():
                mine, other = own[index][key], own[before][key]
                least = max(least, start + other.launch - mine.finish)  # mine came after the other's launch
                most = min(most, start + other.finish - mine.launch)  # and the other's after my launch
        starts.append(_within(rank.began - ranks[0].began, least, most))
    return starts


def _within(value: float, least: float, most: float) -> float:
    """A value within bounds, or the middle of bounds that exclude each other, as unsteady clocks make them."""
    if least > most:
        return (least + most) / 2
    return min(max(value, least), most)


def _binds(travelled: Travelled) -> bool:
    return travelled.kind.startswith(EVERYONE_NEEDS_EVERYONE)


def waits_for_late_ranks(comparison: RankComparison, rank: int) -> dict[str, float]:
    """For each collective of a rank that it stood still for because another was late: the seconds, by name.

    >>> waits_for_late_ranks(RankComparison.of([]), 0)
    {}
    """
    found = {}
    for meeting in comparison.meetings:
        if meeting.waited.get(rank, 0.0) > 0:
            found[meeting.name] = meeting.waited[rank]
    return found
