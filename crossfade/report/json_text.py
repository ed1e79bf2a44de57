"""Report to JSON and back. The keys are the fields' names and are a promise: change one, raise `FORMAT`.

A timeline has its sums beside its spans; reading it back takes the spans.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from crossfade.cost.timeline import Timeline
from crossfade.errors import CrossfadeError
from crossfade.files.found import Found
from crossfade.files.plain import decoded_json
from crossfade.report.report import Report, Table
from crossfade.report.timeline import hidden, timelines
from crossfade.report.units import Cell

FORMAT = 1


def dump(report: Report) -> str:
    """The report as indented JSON text.

    >>> print(dump(Report("step"))[:38])
    {
      "format": 1,
      "title": "step",
    """
    content = {"format": FORMAT, **asdict(report)}
    content.update({name: _sums(timeline) | content[name] for name, timeline in timelines(report)})
    return json.dumps(content, indent=2) + "\n"


def load(text: str, where: str = "a report") -> Report:
    """The report that `dump` wrote; `where` it stands is said in errors.

    >>> load(dump(Report("step"))).title
    'step'
    """
    content = _checked(text, where)
    # Reports of earlier versions have no timelines, and no memory.
    lanes = {name: _timeline(content.get(name, None)) for name in ("predicted", "measured")}
    memory = [(at.value, size.whole(least=0)) for at, size in map(_pair, content.get("memory", []).items())]
    given = {"memory": tuple(memory), "tables": tuple(map(_table, content["tables"].items())), **lanes}
    plain = {name: value for name, value in content.value.items() if name != "format"}
    for name in ("records", "collectives_before", "collectives_after", "nodes_before", "facts", "program"):
        content[name]
    return content.at(plain, "").record(Report, **given)


def _checked(text: str, where: str) -> Found:
    remedy = "give it what Report.to_json wrote, with this version of crossfade"
    content = decoded_json(text, where, CrossfadeError, remedy, finite=False)
    found = content.get("format", "none") if isinstance(content, dict) else "none"
    if found != FORMAT:
        raise CrossfadeError(f"JSON of report format {found!r:.80}", expected=f"format {FORMAT}", remedy=remedy)
    return Found(content, where, "", CrossfadeError, remedy)


def _table(item: Found) -> Table:
    rows = [[cell.read_as(Cell) for cell in row.items()] for row in item["rows"].items()]
    columns = [column.text() for column in item["columns"].items()]
    wrong = next((row for row in rows if len(row) != len(columns)), None)
    if wrong is not None:
        raise item.wrong("as many cells in each row as there are columns")
    return Table(item["title"].text(), columns, rows, item.get("note", "").text())


def _pair(item: Found) -> tuple[Found, Found]:
    if not isinstance(item.value, list) or len(item.value) != 2 or not isinstance(item.value[0], (str, int, float)):
        raise item.wrong("a time and the bytes from then on")
    return item.items()[0], item.items()[1]


def _sums(timeline: Timeline) -> dict[str, float | None]:
    sums = {name: getattr(timeline, name) for name in ("seconds", "busy", "travelling", "exposed")}
    return {**sums, "hidden": hidden(timeline)}


def _timeline(item: Found) -> Timeline | None:
    if item.value is None:
        return None
    spans = {name: item[name].value for name in ("computation", "communication", "seconds", "source")}
    return item.at(spans, "").record(Timeline)
