"""Report to JSON and back. The keys are the fields' names and are a promise: change one, raise `FORMAT`.

A timeline has its sums beside its spans; reading it back takes the spans.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from crossfade.cost.timeline import Computed, Timeline, Travelled
from crossfade.errors import CrossfadeError
from crossfade.graph.passes import Outcome, PassRecord, Verdict
from crossfade.report.report import CollectiveCounts, Report, Table
from crossfade.report.timeline import hidden, timelines

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


def load(text: str) -> Report:
    """The report that `dump` wrote.

    >>> load(dump(Report("step"))).title
    'step'
    """
    content = _checked(text)
    return Report(
        title=content["title"],
        records=tuple(_record(item) for item in content["records"]),
        collectives_before=_counts(content["collectives_before"]),
        collectives_after=_counts(content["collectives_after"]),
        nodes_before=content["nodes_before"],
        nodes_after=content["nodes_after"],
        facts=content["facts"],
        tables=tuple(Table(**item) for item in content["tables"]),
        program=content["program"],
        # Reports of earlier versions have none of these.
        predicted=_timeline(content.get("predicted")),
        measured=_timeline(content.get("measured")),
        memory=tuple((at, size) for at, size in content.get("memory", ())),
    )


def _checked(text: str) -> dict[str, Any]:
    remedy = "give it what Report.to_json wrote, with this version of crossfade"
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise CrossfadeError(f"text that is no JSON ({error})", expected="a report", remedy=remedy) from error
    found = content.get("format", "none") if isinstance(content, dict) else "none"
    if found != FORMAT:
        raise CrossfadeError(f"JSON of report format {found}", expected=f"format {FORMAT}", remedy=remedy)
    return content


def _record(item: dict[str, Any]) -> PassRecord:
    verdicts = tuple(Verdict(**{**one, "outcome": Outcome(one["outcome"])}) for one in item["verdicts"])
    return PassRecord(**{**item, "verdicts": verdicts})


def _counts(item: dict[str, list[int]]) -> CollectiveCounts:
    return {kind: (number, size) for kind, (number, size) in item.items()}


def _sums(timeline: Timeline) -> dict[str, float | None]:
    sums = {name: getattr(timeline, name) for name in ("seconds", "busy", "travelling", "exposed")}
    return {**sums, "hidden": hidden(timeline)}


def _timeline(item: dict[str, Any] | None) -> Timeline | None:
    if item is None:
        return None
    computation = tuple(Computed(**one) for one in item["computation"])
    communication = tuple(Travelled(**one) for one in item["communication"])
    return Timeline(computation, communication, item["seconds"], item["source"])
