"""Two reports side by side: before and after a change, or the same program on two machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from crossfade.cost.timeline import Travelled
from crossfade.graph.passes import PassRecord
from crossfade.report.answers import Answers
from crossfade.report.data import ReportData, Table
from crossfade.report.diff import Diff, unified
from crossfade.report.draw_timeline import hidden
from crossfade.report.units import Cell, format_bytes, format_change, format_seconds

SHOWN = 15
"""How many collectives and modules that changed a comparison names, the most seconds first."""


@dataclass(frozen=True)
class Comparison:
    """What differs between two reports, as tables; each has what was, what is, and the change.

    >>> before, after = (ReportData("step", collectives_after={"all_reduce": (n, 64)}) for n in (4, 2))
    >>> Comparison(before, after).tables[0].rows
    (('collectives', '4', '2', '-50%'),)
    """

    before: ReportData
    after: ReportData

    @property
    def title(self) -> str:
        """What is compared with what."""
        one, other = self.before.title, self.after.title
        return f"{one}: before and after" if one == other else f"{one} against {other}"

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """Every table in which something differs, what counts most first."""
        found = (self._sums(), self._collectives(), self._modules(), self._ranks(), self._passes(), self._facts())
        return tuple(table for table in found if table.rows)

    @property
    def verdict(self) -> str:
        """The comparison in a sentence: faster or slower, and by how much."""
        one, other = Answers(self.before).bounds, Answers(self.after).bounds
        if one is None or other is None:
            return "No step was timed in both."
        change = format_change(one.step, other.step)
        if one.step == other.step:
            return f"A step takes {format_seconds(one.step)} in both."
        word = "shorter" if other.step < one.step else "longer"
        return f"A step is {word}: {format_seconds(one.step)} became {format_seconds(other.step)} ({change})."

    @cached_property
    def program(self) -> Diff:
        """What changed in the program's text."""
        return unified(self.before.program, self.after.program)

    def _sums(self) -> Table:
        rows: list[tuple[Cell, ...]] = []
        for label, value, shown in _MEASURES:
            one, other = value(self.before), value(self.after)
            if one != other and one is not None and other is not None:
                rows.append((label, shown(one), shown(other), format_change(one, other)))
            elif one != other:
                rows.append((label, *("" if found is None else shown(found) for found in (one, other)), ""))
        how = {Answers(report).how_known for report in (self.before, self.after) if Answers(report).timeline}
        note = "" if len(how) < 2 else "One of them is predicted, the other measured."
        return Table("Sums", ("", "before", "after", "change"), rows, note)

    def _collectives(self) -> Table:
        before, after = (_by_place(report) for report in (self.before, self.after))
        rows: list[tuple[float, tuple[Cell, ...]]] = []
        for key in dict.fromkeys([*before, *after]):
            one, other = before.get(key), after.get(key)
            exposed = [0.0 if found is None else found.exposed for found in (one, other)]
            if exposed[0] == exposed[1] and one is not None and other is not None:
                continue
            name = _either(one, other, lambda found: found.name)
            cells = [_exposed_of(found) for found in (one, other)]
            kind = _either(one, other, lambda found: f"{found.kind} of {format_bytes(found.bytes)} on {found.group}")
            rows.append((abs(exposed[1] - exposed[0]), (name, kind, *cells)))
        note = "Collectives by their kind, group and bytes, in the order of launch."
        return _longest("Exposed", ("collective", "what", "before", "after"), rows, note)

    def _modules(self) -> Table:
        before, after = (_seconds_by_module(report) for report in (self.before, self.after))
        rows: list[tuple[float, tuple[Cell, ...]]] = []
        if not before or not after:
            return Table("Computation by module", ("module", "before", "after", "change"), ())
        for name in dict.fromkeys([*before, *after]):
            one, other = before.get(name, 0.0), after.get(name, 0.0)
            if one != other:
                cells = (name, format_seconds(one), format_seconds(other), format_change(one, other))
                rows.append((abs(other - one), cells))
        return _longest("Computation by module", ("module", "before", "after", "change"), rows)

    def _ranks(self) -> Table:
        before, after = ({one.rank: one for one in report.compared_ranks.sums} for report in (self.before, self.after))
        rows: list[tuple[Cell, ...]] = []
        for rank in sorted(before.keys() & after.keys()) if max(len(before), len(after)) > 1 else ():
            one, other = before[rank], after[rank]
            if one == other:
                continue
            pairs = [(one.computing, other.computing), (one.exposed, other.exposed), (one.waited_for, other.waited_for)]
            cells = [f"{format_seconds(was)} → {format_seconds(now)}" for was, now in pairs]
            rows.append((f"rank {rank}", *cells))
        return Table("Ranks", ("rank", "computation", "exposed", "others waited for it"), rows)

    def _passes(self) -> Table:
        before, after = (dict(_counts(report.records)) for report in (self.before, self.after))
        rows = [
            (name, before.get(name, "did not run"), after.get(name, "did not run"))
            for name in dict.fromkeys([*before, *after])
            if before.get(name) != after.get(name)
        ]
        return Table("Passes", ("pass", "before", "after"), rows)

    def _facts(self) -> Table:
        one, other = self.before.facts, self.after.facts
        names = dict.fromkeys([*one, *other])
        rows = [(name, one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)]
        return Table("Where and how", ("", "before", "after"), rows)


def _seconds(number: float) -> str:
    return format_seconds(number)


def _share(number: float) -> str:
    return f"{number:.0%}"


def _bytes(number: float) -> str:
    return format_bytes(int(number))


def _number(number: float) -> str:
    return f"{int(number):,}"


def _of_bounds(name: str) -> Callable[[ReportData], float | None]:
    return lambda report: getattr(Answers(report).bounds, name, None)


def _of_timeline(name: str) -> Callable[[ReportData], float | None]:
    return lambda report: getattr(Answers(report).timeline, name, None)


def _hidden(report: ReportData) -> float | None:
    timeline = Answers(report).timeline
    return None if timeline is None else hidden(timeline)


def _peak(report: ReportData) -> float | None:
    return max((size for _, size in report.memory), default=None)


_MEASURES: tuple[tuple[str, Callable[[ReportData], float | None], Callable[[float], str]], ...] = (
    ("step", _of_bounds("step"), _seconds),
    ("perfect overlap", _of_bounds("overlapped"), _seconds),
    ("no communication", _of_bounds("alone"), _seconds),
    ("computation", _of_timeline("busy"), _seconds),
    ("of it stretched", _of_timeline("stretched"), _seconds),
    ("communication", _of_timeline("travelling"), _seconds),
    ("exposed", _of_timeline("exposed"), _seconds),
    ("hidden", _hidden, _share),
    ("peak memory", _peak, _bytes),
    ("collectives", lambda report: report.total_after[0], _number),
    ("bytes", lambda report: report.total_after[1], _bytes),
    ("nodes", lambda report: report.nodes_after, _number),
    ("pass time", lambda report: report.seconds, _seconds),
    ("verifying, printing", lambda report: report.looking, _seconds),
)


def _by_place(report: ReportData) -> dict[tuple[str, str, int, int], Travelled]:
    """Collectives by what they are and the how-manieth of these they are: names differ between programs."""
    timeline = Answers(report).timeline
    found: dict[tuple[str, str, int, int], Travelled] = {}
    number: dict[tuple[str, str, int], int] = {}
    for sent in timeline.communication if timeline is not None else ():
        alike = sent.kind, sent.group, sent.bytes
        number[alike] = number.get(alike, -1) + 1
        found[*alike, number[alike]] = sent
    return found


def _exposed_of(sent: Travelled | None) -> str:
    return "not there" if sent is None else format_seconds(sent.exposed)


def _either(one: Travelled | None, other: Travelled | None, say: Callable[[Travelled], str]) -> str:
    said = dict.fromkeys(say(found) for found in (one, other) if found is not None)
    return " / ".join(said)


def _seconds_by_module(report: ReportData) -> Mapping[str, float]:
    timeline = Answers(report).timeline
    found: dict[str, float] = {}
    for span in timeline.computation if timeline is not None else ():
        if module := report.modules.get(span.name):
            found[module] = found.get(module, 0.0) + (
                span.finish - span.start if span.on_core is None else span.on_core
            )
    return found


def _counts(records: tuple[PassRecord, ...]) -> Iterator[tuple[str, str]]:
    for record in records:
        counts = ", ".join(f"{name} {number:,}" for name, number in record.counts.items() if number)
        yield record.shown, counts or ("changed the program" if record.changed else "nothing")


def _longest(title: str, columns: tuple[str, ...], rows: list[tuple[float, tuple[Cell, ...]]], note: str = "") -> Table:
    rows.sort(key=lambda pair: -pair[0])
    if len(rows) > SHOWN:
        note = f"{note} The {SHOWN} that differ most, of {len(rows):,}.".strip()
    return Table(title, columns, [cells for _, cells in rows[:SHOWN]], note)
