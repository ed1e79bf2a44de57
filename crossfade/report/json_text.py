"""Report to JSON and back. The keys are the fields' names and are a promise: change one, raise `FORMAT`.

A timeline has its sums beside its spans; reading it back takes the spans.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TypeVar

from crossfade.cost.timeline import Timeline
from crossfade.errors import CrossfadeError
from crossfade.files.found import FileValue
from crossfade.files.plain import decoded_json
from crossfade.graph.passes import PassRecord
from crossfade.report.data import CollectiveCounts, MemoryPoint, ReportData, Table
from crossfade.report.draw_timeline import hidden, timelines
from crossfade.report.rank_timelines import RankTimeline
from crossfade.report.units import Cell

FORMAT = 1
AnyReport = TypeVar("AnyReport", bound=ReportData)


def dump(report: ReportData) -> str:
    """The report as indented JSON text.

    >>> print(dump(ReportData("step"))[:38])
    {
      "format": 1,
      "title": "step",
    """
    content = {"format": FORMAT, **asdict(report)}
    content.update({name: _sums(timeline) | content[name] for name, timeline in timelines(report)})
    return json.dumps(content, indent=2) + "\n"


def load(kind: type[AnyReport], text: str, where: str = "text") -> AnyReport:
    """The report that `dump` wrote; errors name `where` the text is from.

    >>> load(ReportData, dump(ReportData("step"))).title
    'step'
    """
    content = _checked(text, where)
    return kind(
        title=content["title"].text(),
        records=content["records"].read_as(tuple[PassRecord, ...]),
        collectives_before=content["collectives_before"].read_as(CollectiveCounts),
        collectives_after=content["collectives_after"].read_as(CollectiveCounts),
        nodes_before=content["nodes_before"].whole(least=0),
        nodes_after=content["nodes_after"].whole(least=0),
        facts=content["facts"].read_as(Mapping[str, str]),
        tables=tuple(_table(item) for item in content["tables"].items()),
        program=content["program"].text(),
        # Reports of earlier versions have none of these.
        predicted=_timeline(content.get("predicted", None)),
        measured=_timeline(content.get("measured", None)),
        memory=tuple(item.read_as(MemoryPoint) for item in content.get("memory", []).items()),
        alive=tuple(item.read_as(tuple[str, int]) for item in content.get("alive", []).items()),
        ranks=tuple(_rank(item) for item in content.get("ranks", []).items()),
        modules=content.get("modules", {}).read_as(Mapping[str, str]),
    )


def _checked(text: str, where: str) -> FileValue:
    remedy = "give it what Report.to_json wrote, with this version of crossfade"
    content = decoded_json(text, where, CrossfadeError, remedy, finite=False)
    found = content.get("format", "none") if isinstance(content, dict) else "none"
    if found != FORMAT:
        raise CrossfadeError(
            f"{where} is JSON of report format {str(found)[:80]}", expected=f"format {FORMAT}", remedy=remedy
        )
    return FileValue(content, where, "", CrossfadeError, remedy)


def _table(item: FileValue) -> Table:
    rows = [[cell.read_as(Cell) for cell in row.items()] for row in item["rows"].items()]
    columns = [column.text() for column in item["columns"].items()]
    wrong = next((row for row in rows if len(row) != len(columns)), None)
    if wrong is not None:
        raise item.wrong("as many cells in each row as there are columns")
    return Table(item["title"].text(), columns, rows, item.get("note", "").text())


def _sums(timeline: Timeline) -> dict[str, float | None]:
    sums = {name: getattr(timeline, name) for name in ("seconds", "busy", "travelling", "exposed")}
    return {**sums, "hidden": hidden(timeline)}


def _rank(item: FileValue) -> RankTimeline:
    timeline = _timeline(item["timeline"])
    if timeline is None:
        raise item.wrong("a rank with its timeline")
    return RankTimeline(
        item["rank"].whole(least=0),
        timeline,
        item["began"].number(),
        item["host"].text(),
        item["groups"].read_as(Mapping[str, tuple[int, ...]]),
    )


def _timeline(item: FileValue) -> Timeline | None:
    if item.value is None:
        return None
    spans = {name: item[name].value for name in ("computation", "communication", "seconds", "source")}
    return item.at(spans, "").record(Timeline)
