"""The report as one HTML page. What the page shows is decided here; how it looks, in the templates and `page.css`.

The page loads nothing: style and script are inline, and its content-security policy forbids the network. Jinja escapes
every value, since node names, file names and program texts are the user's; what the script draws is packed.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from crossfade.graph.passes import TEXT_LIMIT, Outcome, PassRecord, Verdict
from crossfade.report.answers import Answers, about
from crossfade.report.compare import Comparison
from crossfade.report.data import ReportData, Table, VerdictGroup
from crossfade.report.diff import Diff, unified
from crossfade.report.draw_timeline import COLUMNS, MEMORY_HEIGHT, comparison, draw, hidden, timelines
from crossfade.report.page_data import drawn, packed
from crossfade.report.page_tables import Rows, alive, each_collective, meetings, ranks
from crossfade.report.units import Cell, format_bytes, format_cell, format_seconds, is_numeric, plural

PROGRAM_LINE_LIMIT = 20_000
"""The page shows at most this many lines of the final program, and says how many it cut."""
VERDICT_LIMIT = 200
"""The page lists at most this many verdicts of one kind, and says how many more there are."""
EXPOSURES_SHOWN = 4
"""The first screen names at most this many exposed collectives."""

_COLLECTIVE_MARK = "= c10d."


@dataclass(frozen=True, slots=True)
class Bar:
    """A value as text, and the length of the bar beside it."""

    value: str
    percent: float


@dataclass(frozen=True, slots=True)
class Part:
    """A coloured piece of a reference line."""

    label: str
    tone: str
    value: str
    percent: float


@dataclass(frozen=True, slots=True)
class Line:
    """One of the lines that say how long a step is, or could be."""

    label: str
    value: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """A kind of collective; the pairs of bars are before and after."""

    kind: str
    numbers: tuple[Bar, ...]
    sizes: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class GroupView:
    """The verdicts of one kind: what they have in common, those shown with the position of their pass, and how many
    were cut."""

    told: VerdictGroup
    shown: tuple[tuple[int, Verdict], ...]
    cut: int


@dataclass(frozen=True, slots=True)
class PassView:
    """A pass as the page shows it; `percent` is its share of the time, `diff` None where there is no text."""

    position: int
    record: PassRecord
    percent: float
    diff: Diff | None
    why_no_diff: str


@dataclass(frozen=True, slots=True)
class ProgramText:
    """The final program in runs of lines that are, or are not, collectives."""

    runs: tuple[tuple[str, str], ...]
    lines: int


def render_page(report: ReportData) -> str:
    """The page's HTML.

    >>> "<h1>a &lt; b</h1>" in render_page(ReportData("a < b"))
    True
    """
    return rendered("page.html", "Crossfade report", report.title, _content(report))


def render_comparison(comparison: Comparison) -> str:
    """The HTML of two reports side by side.

    >>> "Nothing differs." in render_comparison(Comparison(ReportData("a"), ReportData("a")))
    True
    """
    content = {
        "comparison": comparison,
        "tables": [(table, _numeric_columns(table)) for table in comparison.tables],
        "texts": {"program-diff": packed(_diff_lines(comparison.program))},
    }
    return rendered("compared.html", "Crossfade reports compared", comparison.title, content)


def rendered(template: str, kind: str, title: str, content: dict[str, Any]) -> str:
    """A page of ours from its template.

    >>> rendered("base.html", "Crossfade", "<b>", {})[:15]
    '<!doctype html>'
    """
    shared = {"kind": kind, "title": title, "style": _own_file("page.css"), "script": _own_file("page.js")}
    return _environment().get_template(template).render(shared | content).lstrip()


def _own_file(name: str) -> Markup:
    """A file of this package, which is markup already."""
    return Markup(files("crossfade.report").joinpath(name).read_text(encoding="utf-8").strip())


def _environment() -> Environment:
    # Autoescape always, not by file extension: nothing in this package renders anything but HTML.
    environment = Environment(
        loader=PackageLoader("crossfade.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(bytes=format_bytes, seconds=format_seconds, cell=format_cell, plural=plural, about=about)
    return environment


def _content(report: ReportData) -> dict[str, Any]:
    outcomes = [verdict.outcome for _, verdict in report.verdicts]
    answers = Answers(report)
    passes = [_pass_view(position, record, report.seconds) for position, record in enumerate(report.records, 1)]
    program, data = _program_text(report.program), drawn(report)
    diffs = {f"diff-{view.position}": packed(_diff_lines(view.diff)) for view in passes if view.diff is not None}
    return {
        "report": report,
        "facts_line": " · ".join(list(report.facts.values())[:2]),
        **_first_screen(answers),
        "collectives": _collective_rows(report),
        "each": each_collective(report, answers),
        "alive": alive(report),
        "ranks": _ranks(report),
        "outcomes": [(outcome, outcomes.count(outcome)) for outcome in Outcome if outcome in outcomes],
        "groups": _groups(report),
        "passes": passes,
        "timeline": _timeline(report, data is not None),
        "tables": [(table, _numeric_columns(table)) for table in report.tables],
        "program": program,
        "texts": diffs
        | ({"program-text": packed(program.runs)} if program.lines else {})
        | ({"timeline-data": packed(data)} if data is not None else {}),
    }


def _first_screen(answers: Answers) -> dict[str, Any]:
    timeline, fired = answers.timeline, answers.fired
    changed = [position for position, view in enumerate(fired, 1) if view.record.changed]
    nothing = [view for view in fired if not view.record.changed and not view.left]
    left = [f"{view.record.name} {view.did}" for view in fired if not view.record.changed and view.left]
    share = "" if timeline is None or not timeline.seconds else f"{timeline.exposed / timeline.seconds:.0%} of the step"
    quiet = [f"{len(nothing)} found nothing to do"] if nothing else []
    return {
        "answers": answers,
        "lines": _lines(answers),
        "how_known": _how_known(answers),
        "overlap_line": _overlap_line(answers),
        "exposed_share": share,
        "exposures_shown": EXPOSURES_SHOWN,
        "changed": len(changed),
        "positions": changed,
        "quiet": "; ".join(quiet + left) + ("." if quiet or left else ""),
    }


def _how_known(answers: Answers) -> str:
    ranks = answers.report.ranks
    if answers.how_known == "predicted":
        return f"predicted for {answers.timeline.source}" if answers.timeline else ""
    slowest = answers.report.compared_ranks.slowest
    return f"measured on rank {ranks[0].rank} of {len(ranks)}" if slowest is not None else "measured"


def _overlap_line(answers: Answers) -> str:
    """How much of the communication costs nothing, and which rank is the slowest."""
    timeline, slowest = answers.timeline, answers.report.compared_ranks.slowest
    share = hidden(timeline) if timeline is not None else None
    if timeline is None or share is None:
        return ""
    said = f"Communication is under way for {format_seconds(timeline.travelling)}, {share:.0%} of it hidden."
    if slowest is not None:
        said += f" Rank {slowest.rank} is the slowest of {len(answers.report.ranks)}."
    return said


def _lines(answers: Answers) -> list[Line]:
    """How long a step is, in parts, and the two reference lines."""
    timeline, bounds = answers.timeline, answers.bounds
    if timeline is None or bounds is None or not bounds.step:
        return []
    core = timeline.busy if timeline.on_core is None else timeline.on_core
    pieces = [("computation", "computed", core)]
    if timeline.stretched is not None:
        pieces.append(("stretched", "stretched", timeline.stretched))
    pieces.append(("exposed", "exposed", timeline.exposed))
    step = tuple(_part(label, tone, seconds, bounds.step) for label, tone, seconds in pieces)
    return [
        Line("as it is", format_seconds(bounds.step), step),
        _reference("perfect overlap", "after", bounds.overlapped, bounds.step),
        _reference("no communication", "before", bounds.alone, bounds.step),
    ]


def _reference(label: str, tone: str, seconds: float, step: float) -> Line:
    return Line(label, format_seconds(seconds), (_part(label, tone, seconds, step),))


def _part(label: str, tone: str, seconds: float, whole: float) -> Part:
    return Part(label, tone, format_seconds(seconds), _percent(seconds, whole))


def _timeline(report: ReportData, is_packed: bool) -> dict[str, Any]:
    columns, rows = comparison(report)
    return {
        "drawing": draw(report),
        "packed": is_packed,
        "width": COLUMNS,
        "memory_height": MEMORY_HEIGHT,
        "columns": columns if len(columns) > 1 else [],
        "rows": rows,
        "stretched": any(timeline.stretched is not None for _, timeline in timelines(report)),
    }


def _ranks(report: ReportData) -> dict[str, Any]:
    slowest = report.compared_ranks.slowest
    if slowest is None:
        return {"rows": ()}
    lost = slowest.waited_for
    remark = f"Rank {slowest.rank} is the slowest: " + (
        f"others stand still for it for {format_seconds(lost)}, summed over them."
        if lost
        else "it computes the longest; nobody stands still for a rank that launches late."
    )
    sums, met = ranks(report), meetings(report)
    return {
        "remark": remark,
        **_rows(sums),
        "meetings": met.rows,
        "meeting_columns": met.columns,
        "meeting_numeric": met.numeric,
        "meeting_note": met.note,
    }


def _rows(table: Rows) -> dict[str, Any]:
    return {"columns": table.columns, "rows": table.rows, "numeric": table.numeric, "note": table.note}


def _groups(report: ReportData) -> list[GroupView]:
    members: dict[tuple[Outcome, str], list[tuple[int, Verdict]]] = {}
    for position, record in enumerate(report.records, 1):
        for verdict in record.verdicts:
            members.setdefault((verdict.outcome, verdict.reason), []).append((position, verdict))
    found = []
    for told in report.verdict_groups:
        own = members[told.outcome, told.reason]
        found.append(GroupView(told, tuple(own[:VERDICT_LIMIT]), max(0, len(own) - VERDICT_LIMIT)))
    return found


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


def _pass_view(position: int, record: PassRecord, total_seconds: float) -> PassView:
    percent = _percent(record.seconds, total_seconds)
    has_text = bool(record.before or record.after)
    diff = unified(record.before, record.after) if has_text else None
    why = f"No diff: texts were not kept (asked not to, or a program over {TEXT_LIMIT:,} nodes)."
    return PassView(position, record, percent, diff, why if record.changed and not has_text else "")


def _diff_lines(diff: Diff) -> list[tuple[str, str]]:
    lines = [(str(line.kind), line.text) for line in diff.lines]
    return [*lines, ("cut", f"{plural(diff.cut, 'more line')} cut")] if diff.cut else lines


def _numeric_columns(table: Table) -> list[bool]:
    columns: list[list[Cell]] = [[row[index] for row in table.rows] for index in range(len(table.columns))]
    return [is_numeric(cells) for cells in columns]


def _program_text(text: str) -> ProgramText:
    lines = text.splitlines()
    shown = lines[:PROGRAM_LINE_LIMIT]
    runs = [
        ("comm" if mark else "", "\n".join(run))
        for mark, run in groupby(shown, key=lambda line: _COLLECTIVE_MARK in line)
    ]
    if cut := len(lines) - len(shown):
        runs.append(("cut", f"{plural(cut, 'more line')} cut; the JSON form has them all"))
    return ProgramText(tuple(runs), len(lines))
