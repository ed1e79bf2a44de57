"""The report on a terminal: what counts on at most 25 lines, or all of it. No name is broken, however narrow it is.

Every string of the user's goes through `Text`: rich must not read `f32[4]` as markup.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as Grid
from rich.text import Text

from crossfade.graph.passes import Outcome, PassRecord
from crossfade.report import draw_timeline as lanes
from crossfade.report.answers import Answers, about
from crossfade.report.compare import Comparison
from crossfade.report.data import ReportData, Table
from crossfade.report.page_tables import ranks
from crossfade.report.units import Cell, format_bytes, format_cell, format_seconds, is_numeric, plural

LINES = 25
"""The short form takes at most this many lines."""

LANE_CELLS = 64
"""Characters of a lane."""

_SHOWN = 3
"""How many exposed collectives, and how much advice, the short form has."""

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


def show(report: ReportData, console: Console | None = None, *, all: bool = False) -> None:
    """Print the report: what counts, on at most 25 lines; with `all`, every table.

    >>> show(ReportData("step", collectives_before={"all_reduce": (2, 64)}), Console(width=66))
    ────────────────────────────── step ──────────────────────────────
    collectives  2 (64 B) became 0 (0 B)
    step         not timed: step.profile(batch) measures it, a machine
                 predicts it
    """
    console = console or Console()
    console.rule(Text(report.title, style="bold"))
    for line in _everything_above(report) if all else _short(report, console.width):
        console.print(line, no_wrap=True, overflow="ignore", crop=False)
    for grid in _grids(report) if all else ():
        _print(grid, console)


def show_table(table: Table, console: Console | None = None) -> None:
    """Print one table with its note.

    >>> show_table(Table("Loss", ["step", "ours"], [("0", "2.5")]), Console(width=40))  # doctest: +ELLIPSIS
    <BLANKLINE>
    Loss...
    """
    _print(_extra(table), console or Console())


def _print(grid: Grid, console: Console) -> None:
    grid.width = _needed(grid, console)
    console.print()
    console.print(grid, crop=False, no_wrap=True, overflow="ignore")


def show_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """Print what differs between two reports.

    >>> show_comparison(Comparison(ReportData("a"), ReportData("a")), Console(width=40))
    ───────── a: before and after ──────────
    No step was timed in both.
    """
    console = console or Console()
    console.rule(Text(comparison.title, style="bold"))
    console.print(Text(comparison.verdict))
    for table in comparison.tables:
        _print(_extra(table), console)


def _short(report: ReportData, width: int) -> list[Text]:
    """The lines of the short form: what is said first stays, tables come while there is room."""
    lines = [line for label, words in _said(report) for line in _wrapped(label, words, width)]
    pictures = list(_pictures(report, width))
    room = LINES - 3  # the title, and what is not shown
    kept = [*lines[: room - len(pictures)], *pictures]
    left = []
    for table in report.tables:
        if len(kept) + len(table.rows) + 2 <= room and (rows := list(_plain(table, width))):
            kept += rows
        else:
            left.append(table.title)
    more = [plural(len(report.verdicts), "verdict")] if report.verdicts else []
    more += [plural(len(report.records), "pass")] if report.records else []
    more += [f"table {title!r}" for title in left]
    note = f"{', '.join(more)}; show(all=True), --all and the page have them"
    return [*kept, *(list(_wrapped("more", note, width))[:2] if more else [])]


def _said(report: ReportData) -> Iterator[tuple[str, str]]:
    """Labels and what is said, in the order in which it matters."""
    answers, timeline = Answers(report), Answers(report).timeline
    (number_before, bytes_before), (number_after, bytes_after) = report.total_before, report.total_after
    yield (
        "collectives",
        (f"{number_before:,} ({format_bytes(bytes_before)}) became {number_after:,} ({format_bytes(bytes_after)})"),
    )
    bounds = answers.bounds
    if bounds is None or timeline is None:
        yield "step", "not timed: step.profile(batch) measures it, a machine predicts it"
    else:
        yield (
            "step",
            (
                f"{format_seconds(bounds.step)} {answers.how_known}; "
                f"perfect overlap {format_seconds(bounds.overlapped)}; no communication {format_seconds(bounds.alone)}"
            ),
        )
        yield from _exposed(answers)
        slowest = report.compared_ranks.slowest
        if slowest is not None:
            yield "ranks", f"{_slowest(report)}, of {len(report.ranks)}"
        for advice in answers.advice[:_SHOWN]:
            yield "to do", f"≤ {format_seconds(advice.seconds)}: {advice.how}"
    if answers.fired:
        changed = [fired for fired in answers.fired if fired.record.changed]
        names = ", ".join(dict.fromkeys(fired.record.name for fired in changed))
        yield "passes", f"{len(changed)} of {len(answers.fired)} changed the program{f': {names}' if names else ''}"


def _exposed(answers: Answers) -> Iterator[tuple[str, str]]:
    timeline = answers.timeline
    if timeline is None:
        return
    share = lanes.hidden(timeline)
    of = "" if share is None else f" of {format_seconds(timeline.travelling)}, {share:.0%} hidden"
    lost = "" if not timeline.stretched else f"; computation stretched by {format_seconds(timeline.stretched)}"
    yield "exposed", f"{format_seconds(timeline.exposed)}{of}{lost}"
    for exposure in answers.exposures[:_SHOWN]:
        what = f"{exposure.collective.name}, {about(exposure.collective)}"
        yield "", f"{format_seconds(exposure.collective.exposed)} {what}: {exposure.why}"


def _slowest(report: ReportData) -> str:
    slowest = report.compared_ranks.slowest
    if slowest is None:
        return ""
    if slowest.waited_for:
        return f"rank {slowest.rank} is the slowest: others stand still for it for {format_seconds(slowest.waited_for)}"
    return f"rank {slowest.rank} computes the longest; nobody waits for a late rank"


def _wrapped(label: str, words: str, width: int) -> Iterator[Text]:
    """A label and what is said of it, over several lines if need be; no word is broken."""
    # A word that does not fit stands on a line of its own, longer than the terminal is wide.
    room = max(20, width - _LABEL)
    found = textwrap.wrap(words, room, break_long_words=False, break_on_hyphens=False) or [""]
    for index, line in enumerate(found):
        head = label if index == 0 else ""
        yield Text(f"{head:<{_LABEL}}", style="dim").append(Text(line, style="default not dim"))


_LABEL = 13


def _plain(table: Table, width: int) -> Iterator[Text]:
    """A small table, a line a row; nothing if it is wider than the terminal."""
    cells = [list(table.columns), *([format_cell(cell) for cell in row] for row in table.rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(table.columns))]
    if sum(widths) + 2 * len(widths) > width:
        return
    right = {index for index, _ in enumerate(table.columns) if is_numeric([row[index] for row in table.rows])}
    yield Text(table.title, style="bold")
    for number, row in enumerate(cells):
        pairs = zip(row, widths, range(len(row)), strict=True)
        line = "  ".join(f"{cell:>{size}}" if index in right else f"{cell:<{size}}" for cell, size, index in pairs)
        yield Text(line.rstrip(), style="" if number else "dim")


def _everything_above(report: ReportData) -> Iterator[Text | Grid]:
    if report.facts:
        yield from (Text(f"{key:<16}", style="dim").append(Text(value, style="not dim")) for key, value in
                    report.facts.items())  # fmt: skip
        yield Text("")
    yield from _paragraph(report.summary)
    if pictures := list(_pictures(report)):
        yield Text("")
        yield from pictures


def _paragraph(words: str) -> Iterator[Text]:
    return map(Text, textwrap.wrap(words, 100, break_long_words=False, break_on_hyphens=False))


def _needed(grid: Grid, console: Console) -> int:
    """How wide a table must be for no word in it to be broken; at least as wide as the terminal."""
    measured = Measurement.get(console, console.options.update(width=10_000), grid)
    return max(min(console.width, measured.maximum), measured.minimum)


def _pictures(report: ReportData, width: int = 100) -> Iterator[Text]:
    """Two lines a timeline: what computation did, and below it communication. All on one axis."""
    shown = lanes.timelines(report)
    length = max((timeline.seconds for _, timeline in shown), default=0.0)
    cells = max(10, min(LANE_CELLS, width - 26))
    for title, timeline in shown if length else ():
        busy = lanes.coverage(((node.start, node.finish) for node in timeline.computation), length, cells)
        still = lanes.coverage(map(lanes.exposed_span, timeline.communication), length, cells)
        travel = lanes.coverage(((sent.start, sent.finish) for sent in timeline.communication), length, cells)
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
    if len(report.ranks) > 1:
        found = ranks(report)
        yield _extra(Table("Ranks", found.columns, found.rows, found.note))
    if report.collectives_before or report.collectives_after:
        yield _collectives(report)
    if report.verdict_groups:
        yield _verdicts(report)
    if report.records:
        yield _passes(report)
    for table in report.tables:
        yield _extra(table)


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
    for group in report.verdict_groups:
        outcome = Text(group.outcome, style=_STYLES[group.outcome])
        size = format_bytes(group.bytes) if group.bytes else ""
        _row(grid, outcome, f"{group.number:,}", size, group.reason, group.remedy)
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
        # Names and numbers stay in one piece; what is said of them wraps between words.
        grid.columns[index].no_wrap = index == 0 or index in right
    return grid


def _row(grid: Grid, *cells: str | Text, style: str = "") -> None:
    texts = [cell if isinstance(cell, Text) else Text(cell) for cell in cells]
    for column, text in zip(grid.columns, texts, strict=True):
        if column.no_wrap:
            column.min_width = max(column.min_width or 0, text.cell_len)
    grid.add_row(*texts, style=style)
