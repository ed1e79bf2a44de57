"""What a report holds: passes, verdicts, counts, tables and timelines. Renderers read it; `report` puts them on top."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Self

from crossfade.cost.fused import is_fused, read_fused
from crossfade.cost.keys import Keys
from crossfade.cost.timeline import Timeline
from crossfade.errors import CrossfadeError
from crossfade.graph.collectives import count_by_kind
from crossfade.graph.modules import by_module
from crossfade.graph.passes import Outcome, PassRecord, Verdict
from crossfade.graph.program import Program
from crossfade.graph.text import render
from crossfade.report.rank_timelines import RankComparison, RankTimeline
from crossfade.report.units import Cell, format_bytes, format_seconds, plural

CollectiveCounts = Mapping[str, tuple[int, int]]
"""Kind of collective -> how many, and their bytes in all."""

ALIVE_KEPT = 200
"""A report names at most this many of the values that are alive at the peak of memory."""

MemoryPoint = tuple[float | str, int]
"""Bytes from a time on: seconds from the start, or the name of the node that begins then."""


class PassVerdict(NamedTuple):
    """A verdict, and the name of the pass that gave it.

    >>> name, verdict = PassVerdict("sink-waits", Verdict("wait_3", Outcome.MOVED, "its result is needed later"))
    >>> print(f"{name}: {verdict}")
    sink-waits: wait_3: moved: its result is needed later
    """

    pass_name: str
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class VerdictGroup:
    """All verdicts of one outcome and reason: how many, their bytes, and the remedies they name.

    >>> VerdictGroup(Outcome.LEFT, "alone in its group", number=3, bytes=48).outcome.value
    'left alone'
    """

    outcome: Outcome
    reason: str
    number: int
    bytes: int
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table that a caller adds to a report; numbers are set flush right, `note` goes below.

    >>> Table("Step time", ["ranks", "ms"], [[2, 14.5], [4, 9.1]]).rows
    ((2, 14.5), (4, 9.1))
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(self.columns))
        object.__setattr__(self, "rows", tuple(tuple(row) for row in self.rows))
        for index, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise CrossfadeError(
                    f"{plural(len(row), 'cell')} in row {index} of table {self.title!r}",
                    expected=f"{len(self.columns)}, one for each of {', '.join(self.columns)}",
                    remedy="give every row one cell per column, None where there is nothing to say",
                )


@dataclass(frozen=True)
class ReportData:
    """What a pipeline did to a program, and what became of each of its collectives.

    `predicted` and `measured` are timelines of the final program. `memory` is the bytes alive over time: pairs of a
    time (seconds, or the name of the node that begins then) and the bytes from then on; `alive` names what is there
    when most is, the largest first. `ranks` are the measured timelines of several ranks. `modules` says of each node
    which module it belongs to.

    >>> from crossfade.graph.text import parse
    >>> before = parse('''
    ... x: f32[4] = input("x")
    ... start: f32[4] = c10d.all_reduce(x, "sum", "dp")
    ... done: f32[4] = c10d.wait_tensor(start)
    ... return output("y", done)
    ... ''', groups={"dp": 2})
    >>> report = ReportData.of(before, before, title="one step", facts={"mesh": "dp=2"})
    >>> print(report)
    one step: 1 collective (16 B) became 1 (16 B), 4 nodes became 4. No passes ran. No verdicts were given.
    """

    title: str
    records: tuple[PassRecord, ...] = ()
    collectives_before: CollectiveCounts = field(default_factory=dict)
    collectives_after: CollectiveCounts = field(default_factory=dict)
    nodes_before: int = 0
    nodes_after: int = 0
    facts: Mapping[str, str] = field(default_factory=dict)
    tables: tuple[Table, ...] = ()
    program: str = ""
    predicted: Timeline | None = None
    measured: Timeline | None = None
    memory: Sequence[MemoryPoint] = ()
    alive: Sequence[tuple[str, int]] = ()
    ranks: Sequence[RankTimeline] = ()
    modules: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Copies: a report must not change when the caller's dict does.
        for name in ("collectives_before", "collectives_after", "facts", "modules"):
            object.__setattr__(self, name, dict(getattr(self, name)))
        object.__setattr__(self, "memory", tuple((at, size) for at, size in self.memory))
        object.__setattr__(self, "alive", tuple((name, size) for name, size in self.alive))
        object.__setattr__(self, "ranks", tuple(self.ranks))

    @classmethod
    def of(
        cls,
        before: Program,
        after: Program,
        *,
        title: str = "Crossfade report",
        facts: Mapping[str, str] | None = None,
    ) -> Self:
        """The report of what turned `before` into `after`; the passes are those in `after`'s history.

        >>> from crossfade.graph.text import parse
        >>> program = parse('x: f32[4] = input("x")\\nreturn output("x", x)')
        >>> ReportData.of(program, program).nodes_after
        2
        """
        return cls(
            title=title,
            records=after.history,
            collectives_before=_counted(before),
            collectives_after=_counted(after),
            nodes_before=len(before.graph.nodes),
            nodes_after=len(after.graph.nodes),
            facts={key: str(value) for key, value in (facts or {}).items()},
            program=render(after),
            modules=by_module(after, by_module(before)),
        )

    def with_table(self, table: Table) -> Self:
        """A copy with one more table at the end.

        >>> [table.title for table in ReportData("step").with_table(Table("Speed", ["ms"], [[3.2]])).tables]
        ['Speed']
        """
        return replace(self, tables=(*self.tables, table))

    def with_timelines(
        self,
        *,
        predicted: Timeline | None = None,
        measured: Timeline | None = None,
        memory: Sequence[MemoryPoint] | None = None,
        alive: Sequence[tuple[str, int]] | None = None,
        ranks: Sequence[RankTimeline] | None = None,
    ) -> Self:
        """A copy with the timelines and the memory curve that are given; others stay.

        >>> ReportData("step").with_timelines(measured=Timeline((), (), 0.25)).measured.seconds
        0.25
        """
        return replace(
            self,
            predicted=self.predicted if predicted is None else predicted,
            measured=self.measured if measured is None else measured,
            memory=self.memory if memory is None else memory,
            alive=self.alive if alive is None else alive[:ALIVE_KEPT],
            ranks=self.ranks if ranks is None else ranks,
        )

    @cached_property
    def compared_ranks(self) -> RankComparison:
        """The timelines of all ranks on one clock: who waited for whom.

        >>> ReportData("step").compared_ranks.meetings
        ()
        """
        return RankComparison.of(self.ranks)

    @property
    def verdicts(self) -> tuple[PassVerdict, ...]:
        """Every verdict with the name of its pass, in the order they were given.

        >>> ReportData("step").verdicts
        ()
        """
        return tuple(PassVerdict(record.name, verdict) for record in self.records for verdict in record.verdicts)

    @property
    def verdict_groups(self) -> tuple[VerdictGroup, ...]:
        """The verdicts grouped by outcome and reason: in the order of `Outcome`, the most frequent reason first.

        >>> ReportData("step").verdict_groups
        ()
        """
        members: dict[tuple[Outcome, str], list[Verdict]] = {}
        for _, verdict in self.verdicts:
            members.setdefault((verdict.outcome, verdict.reason), []).append(verdict)
        order = list(Outcome)
        groups = [_group(*key, verdicts) for key, verdicts in members.items()]
        return tuple(sorted(groups, key=lambda group: (order.index(group.outcome), -group.number, group.reason)))

    @property
    def total_before(self) -> tuple[int, int]:
        """How many collectives there were, and their bytes.

        >>> ReportData("step", collectives_before={"all_reduce": (2, 64), "all_gather": (1, 8)}).total_before
        (3, 72)
        """
        return _total(self.collectives_before)

    @property
    def total_after(self) -> tuple[int, int]:
        """How many collectives there are now, and their bytes.

        >>> ReportData("step", collectives_after={"all_reduce": (2, 64)}).total_after
        (2, 64)
        """
        return _total(self.collectives_after)

    @property
    def seconds(self) -> float:
        """The time that all passes took together.

        >>> ReportData("step").seconds
        0.0
        """
        return sum((record.seconds for record in self.records), 0.0)

    @property
    def looking(self) -> float:
        """The time that verifying and printing the program took, beside its passes.

        >>> ReportData("step").looking
        0.0
        """
        return sum((record.looking for record in self.records), 0.0)

    @property
    def summary(self) -> str:
        """The report in one paragraph, without its title.

        >>> ReportData("step", nodes_before=9, nodes_after=7).summary
        '0 collectives (0 B) became 0 (0 B), 9 nodes became 7. No passes ran. No verdicts were given.'
        """
        (number_before, bytes_before), (number_after, bytes_after) = self.total_before, self.total_after
        return (
            f"{plural(number_before, 'collective')} ({format_bytes(bytes_before)}) became "
            f"{number_after:,} ({format_bytes(bytes_after)}), {plural(self.nodes_before, 'node')} became "
            f"{self.nodes_after:,}. {_passes_sentence(self)} {_verdicts_sentence(self)}"
        )

    def __str__(self) -> str:
        return f"{self.title}: {self.summary}"


def _counted(program: Program) -> CollectiveCounts:
    """Number and bytes of a program's collectives by kind; those inside a collective matmul count apart."""
    counts = count_by_kind(program.graph)
    keys = Keys()
    for node in program.graph.nodes:
        if is_fused(node.target):
            inside = read_fused(node, keys)
            number, size = counts.get(kind := f"{inside.kind} in pieces", (0, 0))
            counts[kind] = (number + 1, size + inside.bytes)
    return counts


def _total(counts: CollectiveCounts) -> tuple[int, int]:
    return sum(number for number, _ in counts.values()), sum(size for _, size in counts.values())


def _group(outcome: Outcome, reason: str, verdicts: list[Verdict]) -> VerdictGroup:
    remedies = dict.fromkeys(verdict.remedy for verdict in verdicts if verdict.remedy)
    size = sum(verdict.bytes for verdict in verdicts)
    return VerdictGroup(outcome, reason, len(verdicts), size, "; ".join(remedies))


def _passes_sentence(report: ReportData) -> str:
    if not report.records:
        return "No passes ran."
    changed = sum(record.changed for record in report.records)
    took = f"{plural(len(report.records), 'pass')} took {format_seconds(report.seconds)}"
    beside = f" and {format_seconds(report.looking)} to verify and print" if report.looking else ""
    return f"{took}{beside}, {changed} changed the program."


def _verdicts_sentence(report: ReportData) -> str:
    outcomes = [verdict.outcome for _, verdict in report.verdicts]
    if not outcomes:
        return "No verdicts were given."
    parts = [f"{outcomes.count(outcome):,} {outcome}" for outcome in Outcome if outcome in outcomes]
    return f"{plural(len(outcomes), 'verdict')}: {', '.join(parts)}."
