"""The report as one HTML page. What the page shows is decided here; how it looks, in `page.html`.

The page loads nothing: style and script are inline, and its content-security policy forbids the network. Jinja escapes
every value, since node names, file names and program texts are the user's.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from crossfade.graph.passes import TEXT_LIMIT, Outcome, PassRecord
from crossfade.report.data import ReportData, Table
from crossfade.report.diff import Diff, unified
from crossfade.report.draw_timeline import COLUMNS, MEMORY_HEIGHT, comparison, draw, stood_still
from crossfade.report.units import Cell, format_bytes, format_cell, format_change, format_seconds, is_numeric, plural

PROGRAM_LINE_LIMIT = 20_000
"""The page shows at most this many lines of the final program, and says how many it cut."""

_COLLECTIVE_MARK = "= c10d."


@dataclass(frozen=True, slots=True)
class Figure:
    """One of the big numbers at the top: a value before, after, and a remark."""

    label: str
    before: str
    after: str
    remark: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A value as text, and the length of the bar beside it."""

    value: str
    percent: float


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """A kind of collective; the pairs of bars are before and after."""

    kind: str
    numbers: tuple[Bar, ...]
    sizes: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class PassView:
    """A pass as the page shows it; `percent` is its share of the time, `diff` None where there is no text."""

    record: PassRecord
    percent: float
    diff: Diff | None
    why_no_diff: str


@dataclass(frozen=True, slots=True)
class ProgramText:
    """The final program in runs of lines that are, or are not, collectives."""

    runs: tuple[tuple[bool, str], ...]
    lines: int
    cut: int


def render_page(report: ReportData) -> str:
    """The page's HTML.

    >>> "<h1>a &lt; b</h1>" in render_page(ReportData("a < b"))
    True
    """
    return _environment().get_template("page.html").render(_content(report)).lstrip()


def _environment() -> Environment:
    # Autoescape always, not by file extension: nothing in this package renders anything but HTML.
    environment = Environment(
        loader=PackageLoader("crossfade.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(bytes=format_bytes, seconds=format_seconds, cell=format_cell, plural=plural)
    return environment


def _content(report: ReportData) -> dict[str, Any]:
    outcomes = [verdict.outcome for _, verdict in report.verdicts]
    return {
        "report": report,
        "figures": _figures(report),
        "collectives": _collective_rows(report),
        "outcomes": [(outcome, outcomes.count(outcome)) for outcome in Outcome if outcome in outcomes],
        "passes": [_pass_view(record, report.seconds) for record in report.records],
        "timeline": _timeline(report),
        "tables": [(table, _numeric_columns(table)) for table in report.tables],
        "program": _program_text(report.program),
    }


def _timeline(report: ReportData) -> dict[str, Any]:
    columns, rows = comparison(report)
    longest, more = stood_still(report)
    return {
        "drawing": draw(report),
        "width": COLUMNS,
        "memory_height": MEMORY_HEIGHT,
        "columns": columns if len(columns) > 1 else [],
        "rows": rows,
        "stood_still": longest,
        "more": more,
    }


def _figures(report: ReportData) -> list[Figure]:
    (number_before, bytes_before), (number_after, bytes_after) = report.total_before, report.total_after
    nodes = report.nodes_before, report.nodes_after
    changed = sum(record.changed for record in report.records)
    ran = f"{plural(len(report.records), 'pass')}, {changed} changed the program"
    return [
        Figure("Collectives", f"{number_before:,}", f"{number_after:,}", format_change(number_before, number_after)),
        Figure(
            "Bytes", format_bytes(bytes_before), format_bytes(bytes_after), format_change(bytes_before, bytes_after)
        ),
        Figure("Nodes", f"{nodes[0]:,}", f"{nodes[1]:,}", format_change(*nodes)),
        Figure("Pass time", "", format_seconds(report.seconds), ran if report.records else "no passes ran"),
    ]


def _collective_rows(report: ReportData) -> list[CollectiveRow]:
    before, after = report.collectives_before, report.collectives_after
    kinds = list(dict.fromkeys([*before, *after]))
    pairs = [(before.get(kind, (0, 0)), after.get(kind, (0, 0))) for kind in kinds]
    most = max((number for pair in pairs for number, _ in pair), default=0)
    largest = max((size for pair in pairs for _, size in pair), default=0)
    return [
        CollectiveRow(
            kind,
            numbers=tuple(Bar(f"{number:,}", _percent(number, most)) for number, _ in pair),
            sizes=tuple(Bar(format_bytes(size), _percent(size, largest)) for _, size in pair),
        )
        for kind, pair in zip(kinds, pairs, strict=True)
    ]


def _percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 2) if whole else 0.0


def _pass_view(record: PassRecord, total_seconds: float) -> PassView:
    percent = _percent(record.seconds, total_seconds)
    has_text = bool(record.before or record.after)
    diff = unified(record.before, record.after) if has_text else None
    if not record.changed:
        return PassView(record, percent, diff, "It changed nothing.")
    why = f"No diff: texts were not kept (asked not to, or a program over {TEXT_LIMIT:,} nodes)."
    return PassView(record, percent, diff, "" if has_text else why)


def _numeric_columns(table: Table) -> list[bool]:
    columns: list[list[Cell]] = [[row[index] for row in table.rows] for index in range(len(table.columns))]
    return [is_numeric(cells) for cells in columns]


def _program_text(text: str) -> ProgramText:
    lines = text.splitlines()
    shown = lines[:PROGRAM_LINE_LIMIT]
    runs = tuple((mark, "\n".join(run)) for mark, run in groupby(shown, key=lambda line: _COLLECTIVE_MARK in line))
    return ProgramText(runs, len(lines), len(lines) - len(shown))
