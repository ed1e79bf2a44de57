"""Timelines as traces: processes, threads, arrows and counters."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from crossfade.cost.timeline import Computed, Timeline
from crossfade.errors import CrossfadeError
from crossfade.report.rank_timelines import RankTimeline
from crossfade.report.report import Report
from crossfade.report.trace import dump_trace
from tests.report.small_timelines import MEASURED, PREDICTED, REDUCE


def test_a_trace_has_a_process_a_timeline_and_a_thread_a_lane(tmp_path: Path) -> None:
    path = Report("r", predicted=PREDICTED, measured=MEASURED).to_trace(tmp_path / "trace.json")
    events = json.loads(path.read_text())["traceEvents"]
    names = {
        (event["pid"], event["tid"], event["name"]): event["args"]["name"]
        for event in events
        if event["name"].endswith("_name")
    }
    assert names == {
        (1, 0, "process_name"): "predicted: a machine",
        (1, 0, "thread_name"): "computation",
        (1, 1, "thread_name"): "communication dp",
        (2, 0, "process_name"): "measured",
        (2, 0, "thread_name"): "computation",
        (2, 1, "thread_name"): "communication dp",
    }
    about = {"kind": "all_reduce", "group": "dp", "bytes": 2048, "launch_us": 250000.0, "exposed_us": 1000000.0}
    assert [event for event in events if event["ph"] == "X" and event["pid"] == 2] == [
        {"ph": "X", "pid": 2, "tid": 0, "name": "mm", "cat": "computation", "ts": 0.0, "dur": 1e6},
        {"ph": "X", "pid": 2, "tid": 0, "name": "add", "cat": "computation", "ts": 2e6, "dur": 1e6},
        {"ph": "X", "pid": 2, "tid": 1, "name": "r", "cat": "communication", "ts": 0.5e6, "dur": 1.5e6, "args": about},
        {"ph": "X", "pid": 2, "tid": 0, "name": "exposed: r", "cat": "exposed", "ts": 1e6, "dur": 1e6,
         "cname": "terrible", "args": about},
    ]  # fmt: skip


def test_a_trace_leads_from_a_launch_to_its_travel_and_counts_memory() -> None:
    launching = Timeline((Computed("r", 0.0, 0.25), *MEASURED.computation), (REDUCE,), 3.0)
    events = json.loads(dump_trace(Report("r", measured=launching, memory=[("r", 8), ("add", 4)])))["traceEvents"]
    flow = {"pid": 1, "name": "launch", "cat": "launch", "id": "1.0"}
    assert [event for event in events if event["ph"] in "sf"] == [
        {"ph": "s", **flow, "tid": 0, "ts": 0.0},
        {"ph": "f", **flow, "tid": 1, "ts": 0.5e6, "bp": "e"},
    ]
    assert [(event["ts"], event["args"]) for event in events if event["ph"] == "C"] == [
        (0.0, {"bytes": 8}),
        (2e6, {"bytes": 4}),
    ]


def test_neighbours_in_a_trace_touch_and_never_overlap() -> None:
    times = [0.1 * i / 7 for i in range(500)]
    nodes = tuple(Computed(f"n{i}", *pair) for i, pair in enumerate(pairwise(times)))
    events = json.loads(dump_trace(Report("r", measured=Timeline(nodes, (), 8.0))))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 499
    for event, other in pairwise(slices):
        assert round(event["ts"] * 1000) + round(event["dur"] * 1000) == round(other["ts"] * 1000)


def test_a_trace_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CrossfadeError, match="the report has no timeline: expected a predicted or a measured one"):
        Report("r").to_trace(tmp_path / "trace.json")
    assert list(tmp_path.iterdir()) == []


def test_every_rank_is_a_process_on_one_clock() -> None:
    late = RankTimeline(1, MEASURED, 12.5, "a", {"dp": (0, 1)})
    report = Report(
        "r", measured=MEASURED, predicted=PREDICTED, ranks=[RankTimeline(0, MEASURED, 12.0, "a", {"dp": (0, 1)}), late]
    )
    events = json.loads(dump_trace(report))["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["predicted: a machine", "rank 0", "rank 1"]
    began = {event["pid"]: event["ts"] for event in events if event["ph"] == "X" and event["name"] == "mm"}
    assert began == {1: 0.0, 2: 0.0, 3: 500_000.0}
