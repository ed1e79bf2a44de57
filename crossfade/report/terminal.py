"""The report on a terminal. Every string of the user's goes through `Text`: rich must not read `f32[4]` as markup."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from crossfade.graph.passes import Outcome, PassRecord
from crossfade.report import draw_timeline as lanes
from crossfade.report.data import ReportData, Table
from crossfade.report.units import Cell, format_bytes, format_cell, format_seconds, is_numeric, plural

GROUP_LIMIT = 20
"""The terminal shows at most this many groups of verdicts, and says how many it cut; JSON and HTML have all."""

LANE_CELLS = 64
"""Characters of a lane."""

_STYLES = {
    Outcome.INSERTED: "blue",
    Outcome.FUSED: "magenta",
    Outcome.BUCKETED: "cyan",
    Outcome.MOVED: "bright_blue",
    Outcome.REMOVED: "green",
    Outcome.REPLACED: "yellow",
    Outcome.HIDDEN: "bright_green",
    Outcome.EXPOSED: "red",
    Outcome.LEFT: "dim",
}


def show(report: ReportData, console: Console | None = None) -> None:
    """Print the report: facts, collectives, why, passes, and the tables that callers added.

    >>> show(ReportData("step", collectives_before={"all_reduce": (2, 64)}), Console(width=66))
    ────────────────────────────── step ──────────────────────────────
    2 collectives (64 B) became 0 (0 B), 0 nodes became 0. No passes
    ran. No verdicts were given.
    <BLANKLINE>
    Collectives
    ...
      all_reduce        2       0           64 B           0 B
    ...
    """
    console = console or Console()
    console.rule(Text(report.title, style="bold"))
    if report.facts:
        console.print(_facts(report))
        console.print()
    console.print(Text(report.summary))
    if pictures := list(_pictures(report)):
        console.print()
        for line in pictures:
            console.print(line, no_wrap=True)
    for grid in _grids(report):
        console.print()
        console.print(grid)


def _pictures(report: ReportData) -> Iterator[Text]:
    """Two lines a timeline: what computation did, and below it communication. All on one axis."""
    shown = lanes.timelines(report)
    length = max((timeline.seconds for _, timeline in shown), default=0.0)
    for title, timeline in shown if length else ():
        busy = lanes.coverage(((node.start, node.finish) for node in timeline.computation), length, LANE_CELLS)
        still = lanes.coverage(map(lanes.exposed_span, timeline.communication), length, LANE_CELLS)
        travel = lanes.coverage(((sent.start, sent.finish) for sent in timeline.communication), length, LANE_CELLS)
        yield Text(f"{title:<11}computation    ").append_text(_lane(busy, still, "█", "blue"))
        yield Text(f"{'':<11}communication  ").append_text(_lane(travel, still, "▄", "cyan"))


def _lane(filled: list[float], still: list[float], mark: str, style: str) -> Text:
    """A cell has the mark if at least half full, and a shade where computation stood still for most of it."""
    text = Text()
    for part, exposed in zip(filled, still, strict=True):
        if exposed >= 0.5:
            text.append("░", "red")
        else:
            text.append(mark if part >= 0.5 else "·" if part > 0 else " ", style)
    return text


def _timelines(report: ReportData) -> Grid:
    columns, rows = lanes.comparison(report)
    grid = _grid("Timeline", columns, right=range(1, len(columns)))
    for row in rows:
        _row(grid, *(format_cell(cell) for cell in row))
    return grid


def _grids(report: ReportData) -> Iterable[Grid]:
    if lanes.timelines(report):
        yield _timelines(report)
    if report.collectives_before or report.collectives_after:
        yield _collectives(report)
    if report.verdict_groups:
        yield _verdicts(report)
    if report.records:
        yield _passes(report)
    for table in report.tables:
        yield _extra(table)


def _facts(report: ReportData) -> Grid:
    grid = Grid.grid(padding=(0, 2, 0, 0))
    for key, value in report.facts.items():
        grid.add_row(Text(key, style="dim"), Text(value))
    return grid


def _collectives(report: ReportData) -> Grid:
    grid = _grid("Collectives", ["kind", "before", "after", "bytes before", "bytes after"], right=(1, 2, 3, 4))
    before, after = report.collectives_before, report.collectives_after
    for kind in dict.fromkeys([*before, *after]):
        _row(grid, kind, *_numbers(before.get(kind, (0, 0)), after.get(kind, (0, 0))))
    grid.add_section()
    _row(grid, "all", *_numbers(report.total_before, report.total_after))
    return grid


def _numbers(before: tuple[int, int], after: tuple[int, int]) -> tuple[str, str, str, str]:
    return f"{before[0]:,}", f"{after[0]:,}", format_bytes(before[1]), format_bytes(after[1])


def _verdicts(report: ReportData) -> Grid:
    grid = _grid("What became of them, and why", ["outcome", "number", "bytes", "reason", "remedy"], right=(1, 2))
    groups = report.verdict_groups
    for group in groups[:GROUP_LIMIT]:
        outcome = Text(group.outcome, style=_STYLES[group.outcome])
        size = format_bytes(group.bytes) if group.bytes else ""
        _row(grid, outcome, f"{group.number:,}", size, group.reason, group.remedy)
    if len(groups) > GROUP_LIMIT:
        grid.caption = f"{plural(len(groups) - GROUP_LIMIT, 'more reason')} not shown: see to_html or to_json"
    return grid


def _passes(report: ReportData) -> Grid:
    grid = _grid("Passes", ["pass", "time", "nodes", "numerics", "counts"], right=(1, 2))
    for record in report.records:
        _row(grid, *_pass_row(record), style="" if record.changed else "dim")
    return grid


def _pass_row(record: PassRecord) -> tuple[str, str, str, str, str]:
    nodes = f"{record.nodes_before:,} → {record.nodes_after:,}"
    counts = ", ".join(f"{name} {number:,}" for name, number in record.counts.items())
    return record.shown, format_seconds(record.seconds), nodes, record.numerics, counts


def _extra(table: Table) -> Grid:
    columns: list[list[Cell]] = [[row[index] for row in table.rows] for index in range(len(table.columns))]
    right = [index for index, cells in enumerate(columns) if is_numeric(cells)]
    grid = _grid(table.title, table.columns, right=right)
    for row in table.rows:
        _row(grid, *(format_cell(cell) for cell in row))
    grid.caption = Text(table.note) if table.note else None
    return grid


def _grid(title: str, columns: Sequence[str], *, right: Sequence[int]) -> Grid:
    grid = Grid(title=Text(title, style="bold"), title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    for index, name in enumerate(columns):
        grid.add_column(Text(name), justify="right" if index in right else "left", overflow="fold")
    return grid


def _row(grid: Grid, *cells: str | Text, style: str = "") -> None:
    grid.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in cells), style=style)
