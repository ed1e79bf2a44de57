"""Timelines in the trace event format, which Perfetto and chrome://tracing open.

Each timeline is a process: the predicted one, and one for each rank that was measured, all on one clock. Its threads
are the computing lane and one lane a group. Arrows lead from a launch to its
travel. Times are whole nanoseconds, written in microseconds as the format asks, so that neighbours touch and never
overlap.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from crossfade.cost.timeline import Timeline, Travelled
from crossfade.errors import CrossfadeError
from crossfade.report.data import ReportData
from crossfade.report.draw_timeline import exposed_span, placed, timelines

Event = dict[str, Any]

_COMPUTATION = 0


def dump_trace(report: ReportData) -> str:
    """The report's timelines as JSON text, one event a line.

    >>> from crossfade.cost.timeline import Computed
    >>> print(dump_trace(ReportData("step", measured=Timeline((Computed("mm", 0.0, 2e-3),), (), 2e-3))))
    {"displayTimeUnit": "ms", "traceEvents": [
    {"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": "measured"}},
    {"ph": "M", "pid": 1, "tid": 0, "name": "process_sort_index", "args": {"sort_index": 1}},
    {"ph": "M", "pid": 1, "tid": 0, "name": "thread_name", "args": {"name": "computation"}},
    {"ph": "M", "pid": 1, "tid": 0, "name": "thread_sort_index", "args": {"sort_index": 0}},
    {"ph": "X", "pid": 1, "tid": 0, "name": "mm", "cat": "computation", "ts": 0.0, "dur": 2000.0}
    ]}
    """
    shown = _processes(report)
    if not shown:
        raise CrossfadeError(
            "the report has no timeline",
            expected="a predicted or a measured one",
            remedy="add one with report.with_timelines(...), then write the trace",
        )
    processes = (_process(pid, title, timeline, start) for pid, (title, timeline, start) in enumerate(shown, 1))
    events = [event for process in processes for event in process]
    events += _memory(report, shown[0][1], shown[0][2])
    return '{"displayTimeUnit": "ms", "traceEvents": [\n' + ",\n".join(map(json.dumps, events)) + "\n]}\n"


def _processes(report: ReportData) -> list[tuple[str, Timeline, float]]:
    """What is a process of its own, with the second at which it begins: what was predicted, and each rank."""
    compared = report.compared_ranks
    if len(compared.ranks) < 2:
        return [(title, timeline, 0.0) for title, timeline in timelines(report)]
    predicted = [(title, timeline, 0.0) for title, timeline in timelines(report) if title == "predicted"]
    pairs = zip(compared.ranks, compared.starts, strict=True)
    return [*predicted, *((f"rank {rank.rank}", rank.timeline, start) for rank, start in pairs)]


def _process(pid: int, title: str, timeline: Timeline, start: float) -> Iterator[Event]:
    for event in _events(pid, title, timeline):
        yield {**event, "ts": round(event["ts"] + _micros(start), 3)} if "ts" in event and start else event


def _events(pid: int, title: str, timeline: Timeline) -> Iterator[Event]:
    groups = dict.fromkeys(collective.group for collective in timeline.communication)
    lanes = {group: tid for tid, group in enumerate(groups, 1)}
    name = title if timeline.source in ("", "measured") else f"{title}: {timeline.source}"
    yield from _labels("process", name, pid, _COMPUTATION, place=pid)
    yield from _labels("thread", "computation", pid, _COMPUTATION, place=_COMPUTATION)
    for group, tid in lanes.items():
        yield from _labels("thread", f"communication {group}", pid, tid, place=tid)
    for node in timeline.computation:
        event = _slice(pid, _COMPUTATION, node.name, "computation", node.start, node.finish)
        yield event if node.on_core is None else {**event, "args": {"on_core_us": _micros(node.on_core)}}
    launched_at = {node.name: node.start for node in timeline.computation}
    for number, collective in enumerate(timeline.communication):
        lane = lanes[collective.group]
        yield from _collective(pid, lane, collective)
        if collective.name in launched_at:
            yield from _arrow(f"{pid}.{number}", pid, launched_at[collective.name], lane, collective.start)


def _labels(what: str, name: str, pid: int, tid: int, *, place: int) -> Iterator[Event]:
    owner = {"ph": "M", "pid": pid, "tid": tid}
    yield {**owner, "name": f"{what}_name", "args": {"name": name}}
    yield {**owner, "name": f"{what}_sort_index", "args": {"sort_index": place}}


def _collective(pid: int, tid: int, collective: Travelled) -> Iterator[Event]:
    about = {name: getattr(collective, name) for name in ("kind", "group", "bytes")}
    about |= {"launch_us": _micros(collective.launch), "exposed_us": _micros(collective.exposed)}
    yield {**_slice(pid, tid, collective.name, "communication", collective.start, collective.finish), "args": about}
    if collective.exposed > 0:
        waiting = _slice(pid, _COMPUTATION, f"exposed: {collective.name}", "exposed", *exposed_span(collective))
        yield {**waiting, "cname": "terrible", "args": about}


def _slice(pid: int, tid: int, name: str, category: str, start: float, finish: float) -> Event:
    nanos = round(finish * 1e9) - round(start * 1e9)
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": category, "ts": _micros(start), "dur": nanos / 1e3}


def _arrow(number: str, pid: int, launched: float, tid: int, travels: float) -> Iterator[Event]:
    """From the start of the launching slice: an arrow belongs to the slice that it begins in."""
    about = {"pid": pid, "name": "launch", "cat": "launch", "id": number}
    yield {"ph": "s", **about, "tid": _COMPUTATION, "ts": _micros(launched)}
    yield {"ph": "f", **about, "tid": tid, "ts": _micros(travels), "bp": "e"}


def _memory(report: ReportData, timeline: Timeline, start: float) -> Iterator[Event]:
    for at, size in placed(report.memory, timeline):
        yield {"ph": "C", "pid": 1, "tid": 0, "name": "memory", "ts": _micros(start + at), "args": {"bytes": size}}


def _micros(seconds: float) -> float:
    return round(seconds * 1e9) / 1e3
