"""Reports as JSON, and back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from crossfade.errors import CrossfadeError
from crossfade.graph.passes import Outcome
from crossfade.report.report import Report, Table


def test_json_round_trips_everything(report: Report, tmp_path: Path) -> None:
    report = report.with_table(Table("Mixed", ["a", "b", "c", "d"], [["é", 1, 2.5, None]], note="n"))
    path = tmp_path / "report.json"
    text = report.to_json(path)
    assert Report.from_json(text) == report
    assert Report.from_json(path) == report
    assert Report.from_json(text).verdicts[0].verdict.outcome is Outcome.LEFT
    assert Report.from_json(text).to_json() == text


def test_json_keys_are_stable(report: Report) -> None:
    keys = re.findall(r'^  "(\w+)"', report.to_json(), flags=re.MULTILINE)
    assert keys == ["format", "title", "records", "collectives_before", "collectives_after", "nodes_before",
                    "nodes_after", "facts", "tables", "program", "predicted", "measured", "memory", "alive",
                    "ranks", "modules"]  # fmt: skip
    inner = re.findall(r'^ {10}"(\w+)"', report.to_json(), flags=re.MULTILINE)
    assert inner[:6] == ["subject", "outcome", "reason", "source", "remedy", "bytes"]


@pytest.mark.parametrize(
    ("text", "found"),
    [("{", "text, which is not JSON"), ("[]", "report format none"), ('{"format": 7}', "report format 7")],
)
def test_json_of_something_else_is_refused(text: str, found: str) -> None:
    with pytest.raises(CrossfadeError, match=found):
        Report.from_json(text)
