"""The tables of the page: ranks, what is alive at the peak of memory, and each collective."""

from __future__ import annotations

from dataclasses import dataclass

from crossfade.report.answers import Answers
from crossfade.report.data import ReportData
from crossfade.report.units import Cell, format_bytes, format_seconds

ROWS_LIMIT = 300
"""A table has at most this many rows, and says how many more there are."""
ALIVE_SHOWN = 8
"""Values alive at the peak that stand open; the rest is folded."""
MEETINGS_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Rows:
    """A table: columns, rows, which columns are numbers, a note below; `more` rows are folded."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    numeric: tuple[bool, ...]
    note: str = ""
    more: tuple[tuple[Cell, ...], ...] = ()
    remark: str = ""


def ranks(report: ReportData) -> Rows:
    """What each rank did of its time; the ones that others wait for longest, if there are too many.

    >>> ranks(ReportData("step")).rows
    ()
    """
    compared = report.compared_ranks
    hosts = len({sums.host for sums in compared.sums}) > 1
    sums = sorted(compared.sums, key=lambda sums: -sums.waited_for)[:ROWS_LIMIT]
    rows = [
        (
            f"rank {one.rank}" + (f" ({one.host})" if hosts else ""),
            format_seconds(one.computing),
            "" if one.stretched is None else format_seconds(one.stretched),
            format_seconds(one.exposed),
            format_seconds(one.idle),
            format_seconds(one.travelling),
            format_seconds(one.waited_for),
        )
        for one in sorted(sums, key=lambda one: one.rank)
    ]
    columns = ("rank", "computation", "stretched", "exposed", "idle", "communication", "others waited for it")
    note = (
        f"Computation, stretched, exposed and idle add up to the {format_seconds(compared.seconds)} from when the "
        "first rank began to when the last one ended; communication lies beneath them."
    )
    if len(compared.sums) > len(rows):
        note += f" {len(compared.sums) - len(rows):,} more ranks are in the JSON form and in the trace."
    return Rows(columns, tuple(rows), (False, *[True] * 6), note)


def meetings(report: ReportData) -> Rows:
    """The collectives at which ranks waited for another the longest, or were furthest apart.

    >>> meetings(ReportData("step")).rows
    ()
    """
    found = sorted(report.compared_ranks.meetings, key=lambda met: (-met.lost, -met.skew))
    rows = []
    for met in found[:MEETINGS_SHOWN]:
        waiting = sorted((rank for rank in met.waited if met.waited[rank] > 0), key=lambda rank: -met.waited[rank])
        who = ", ".join(f"rank {rank} for {format_seconds(met.waited[rank])}" for rank in waiting[:4])
        who += f" and {len(waiting) - 4} more" if len(waiting) > 4 else ""
        about = f"{met.kind} of {format_bytes(met.bytes)}"
        rows.append((met.name, about, met.group, format_seconds(met.skew), f"rank {met.last}", who or "nobody"))
    columns = ("collective", "what", "group", "skew", "came last", "who stood still for it")
    note = "Skew is the time between the first launch and the last."
    if len(found) > len(rows):
        note += f" The {len(rows)} that ranks waited for longest, of {len(found):,}."
    return Rows(columns, tuple(rows), (False, False, False, True, False, False), note)


def alive(report: ReportData) -> Rows:
    """What is alive when most is.

    >>> alive(ReportData("step", alive=[("mm", 4096)], modules={"mm": "forward head"})).rows
    (('mm', 'forward head', '4 KiB'),)
    """
    rows = [(name, report.modules.get(name, ""), format_bytes(size)) for name, size in report.alive]
    peak = max((size for _, size in report.memory), default=0)
    named = sum(size for _, size in report.alive)
    remark = f"What is alive at the peak{f' of {format_bytes(peak)}' if peak else ''}, beside inputs and constants."
    note = f"{format_bytes(peak - named)} more in smaller values." if peak > named else ""
    shown = tuple(rows[:ALIVE_SHOWN])
    return Rows(("value", "made in", "bytes"), shown, (False, False, True), note, tuple(rows[ALIVE_SHOWN:]), remark)


def each_collective(report: ReportData, answers: Answers) -> Rows:
    """Every collective of the timeline that answers, the most exposed first.

    >>> each_collective(ReportData("step"), Answers(ReportData("step"))).rows
    ()
    """
    timeline = answers.timeline
    if timeline is None:
        return Rows((), (), ())
    why = {exposure.collective.name: exposure.why for exposure in answers.exposures}
    found = sorted(timeline.communication, key=lambda sent: (-sent.exposed, sent.launch))
    rows = [
        (
            sent.name,
            sent.kind,
            sent.group,
            format_bytes(sent.bytes),
            format_seconds(sent.launch),
            format_seconds(sent.finish - sent.start),
            format_seconds(sent.exposed),
            why.get(sent.name, ""),
        )
        for sent in found[:ROWS_LIMIT]
    ]
    columns = ("collective", "kind", "group", "bytes", "launched at", "under way", "exposed", "why")
    more = f"{len(found) - len(rows):,} more are in the trace." if len(found) > len(rows) else ""
    return Rows(columns, tuple(rows), (False, False, False, True, True, True, True, False), more)
