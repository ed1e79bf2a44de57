"""`crossfade report`: saved reports shown, drawn and compared from the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from crossfade.commands.cli import app
from crossfade.report.report import Report
from tests.report.small_timelines import MEASURED, PREDICTED, long_report


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["report", *arguments], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "before.json"
    replace(Report("a step"), measured=MEASURED, predicted=PREDICTED).to_json(path)
    return path


def test_a_saved_report_is_shown_short_or_whole(saved: Path, tmp_path: Path) -> None:
    long = tmp_path / "long.json"
    long_report().to_json(long)
    assert len(run("show", str(long)).splitlines()) <= 25
    assert "3.00 s measured; perfect overlap 2.00 s" in run("show", str(saved)).replace("\n", " ")
    assert "measured / predicted" in run("show", str(saved), "--all")


def test_a_page_and_a_trace_are_written(saved: Path, tmp_path: Path) -> None:
    run("page", str(saved), "-o", str(tmp_path / "page.html"))
    assert "<title>a step" in (tmp_path / "page.html").read_text()
    run("trace", str(saved), "-o", str(tmp_path / "trace.json"))
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_two_reports_are_compared(saved: Path, tmp_path: Path) -> None:
    after = tmp_path / "after.json"
    replace(Report("a step"), measured=replace(MEASURED, seconds=2.5)).to_json(after)
    said = run("diff", str(saved), str(after), "--html", str(tmp_path / "diff.html"))
    assert "A step is shorter: 3.00 s became 2.50 s (-17%)." in said
    assert "3.00 s became 2.50 s" in (tmp_path / "diff.html").read_text()
