"""Report to JSON and back. The keys are the fields' names and are a promise: change one, raise `FORMAT`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from crossfade.errors import CrossfadeError
from crossfade.graph.passes import Outcome, PassRecord, Verdict
from crossfade.report.report import CollectiveCounts, Report, Table

FORMAT = 1


def dump(report: Report) -> str:
    """The report as indented JSON text.

    >>> print(dump(Report("step"))[:38])
    {
      "format": 1,
      "title": "step",
    """
    return json.dumps({"format": FORMAT, **asdict(report)}, indent=2) + "\n"


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
