"""A report of a program that a real pass changed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from crossfade.graph.passes import run_passes
from crossfade.graph.text import parse
from crossfade.report.report import Report
from tests.report.small_reports import TWO_REDUCES, RemoveUnusedCollectives


@pytest.fixture
def report() -> Report:
    before = parse(TWO_REDUCES, groups={"dp": 2})
    after = run_passes(before, [RemoveUnusedCollectives(), RemoveUnusedCollectives()])
    # Times differ from run to run: fixed ones make the texts exact.
    after.history = tuple(
        replace(record, seconds=0.0125 * (2 * i + 1), looking=0.0) for i, record in enumerate(after.history)
    )
    return Report.of(before, after, title="two reduces", facts={"mesh": "dp=2"})
