"""What the page's script draws, as data: timelines in whole ticks, names once, all of it compressed.

Names are the user's, so nothing of it is markup: the page holds base64, and the script writes names as text.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from crossfade.cost.timeline import Computed, Timeline, Travelled
from crossfade.report.answers import about, bounds_of
from crossfade.report.data import ReportData
from crossfade.report.draw_timeline import exposed_span, placed, timelines
from crossfade.report.rank_timelines import RankComparison
from crossfade.report.units import format_bytes

TICK = 1e-7
"""Seconds: times travel as whole numbers of these."""
RANKS_DRAWN = 8
"""The page draws at most this many ranks, those that others wait for first; the table and the trace have all."""
POINTS = 2_000
"""The memory curve is drawn through at most this many points; the highest ones stay."""


def packed(value: Any) -> str:
    """Anything that fits JSON, compressed, as base64; `unpacked` in the page's script reads it.

    >>> zlib.decompress(base64.b64decode(packed({"<b>": 1}))).decode()
    '{"<b>":1}'
    """
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def drawn(report: ReportData) -> dict[str, Any] | None:
    """The timelines of a report for the script: predicted, then measured; or the ranks that count most."""
    names = _Names(report.modules, report.compared_ranks.ways)
    tracks = [names.track(title, timeline, start) for title, timeline, start in _tracks(report)]
    first = tracks[0]["start"] * TICK if tracks else 0.0
    points = [(first + at, size) for at, size in placed(report.memory, _of_memory(report))] if tracks else []
    if not tracks:
        return None
    shown = thinned(points)
    return {
        "tick": TICK,
        "length": max(track["start"] + track["seconds"] for track in tracks),
        "names": names.names,
        "places": names.places,
        "tracks": tracks,
        "memory": [[_ticks(at), size] for at, size in shown],
        "peak": format_bytes(max((size for _, size in points), default=0)),
    }


def _of_memory(report: ReportData) -> Timeline | None:
    shown = _tracks(report)
    return shown[0][1] if shown else None


def _tracks(report: ReportData) -> list[tuple[str, Timeline, float]]:
    predicted = [(title, timeline, 0.0) for title, timeline in timelines(report) if title == "predicted"]
    if len(report.ranks) < 2:
        measured = [(title, timeline, 0.0) for title, timeline in timelines(report) if title == "measured"]
        return [*predicted, *measured]
    return [*predicted, *ranks_drawn(report.compared_ranks)]


def ranks_drawn(compared: RankComparison) -> list[tuple[str, Timeline, float]]:
    """The first rank and those that others wait for the longest, by number, with when each began.

    >>> ranks_drawn(RankComparison.of([]))
    []
    """
    waited = {sums.rank: sums.waited_for for sums in compared.sums}
    chosen = sorted(compared.ranks[1:], key=lambda rank: -waited[rank.rank])[: RANKS_DRAWN - 1]
    wanted = {rank.rank for rank in (*compared.ranks[:1], *chosen)}
    pairs = zip(compared.ranks, compared.starts, strict=True)
    return [(f"rank {rank.rank}", rank.timeline, start) for rank, start in pairs if rank.rank in wanted]


def thinned(points: Sequence[tuple[float, int]], limit: int = POINTS) -> list[tuple[float, int]]:
    """At most about `limit` of the points of a curve, the highest and the last of each stretch.

    >>> thinned([(0.0, 1), (1.0, 9), (2.0, 3), (3.0, 4)], limit=2)
    [(1.0, 9), (2.0, 3), (3.0, 4)]
    """
    stride = -(-len(points) // limit) + 1 if len(points) > limit else 1
    found: list[tuple[float, int]] = []
    for first in range(0, len(points), stride):
        stretch = points[first : first + stride]
        highest = max(stretch, key=lambda point: point[1])
        found += [highest, stretch[-1]] if highest is not stretch[-1] else [highest]
    return found


class _Names:
    """Every name once, by number, and the module of each by number too."""

    def __init__(self, modules: Mapping[str, str], ways: Mapping[str, float]) -> None:
        self.names: list[str] = []
        self.places: list[str] = []
        self._modules, self._ways = modules, ways
        self._number: dict[str, int] = {}
        self._place: dict[str, int] = {}

    def number(self, name: str) -> int:
        """The number of a name."""
        return _numbered(name, self._number, self.names)

    def place(self, name: str) -> int:
        """The number of the module of a node, -1 without one."""
        module = self._modules.get(name, "")
        return _numbered(module, self._place, self.places) if module else -1

    def track(self, title: str, timeline: Timeline, start: float) -> dict[str, Any]:
        """One timeline: its computation, what it stood still for, and its communication by group."""
        groups: dict[str, list[Travelled]] = {}
        for sent in timeline.communication:
            groups.setdefault(sent.group, []).append(sent)
        bounds = bounds_of(timeline, self._ways if title.startswith("rank") else None)
        still = [sent for sent in timeline.communication if sent.exposed > 0]
        return {
            "title": title,
            "source": "" if timeline.source == title or title.startswith("rank") else timeline.source,
            "start": _ticks(start),
            "seconds": _ticks(timeline.seconds),
            "overlapped": _ticks(bounds.overlapped),
            "alone": _ticks(bounds.alone),
            "stretched": timeline.stretched is not None,
            "computation": _flat(self._computed(node) for node in timeline.computation),
            "exposed": _flat(self._exposed(sent) for sent in still),
            "groups": [
                {
                    "label": group,
                    "spans": _flat(self._travelled(sent) for sent in sorted(members, key=lambda sent: sent.start)),
                    "about": [about(sent) for sent in sorted(members, key=lambda sent: sent.start)],
                }
                for group, members in groups.items()
            ],
        }

    def _computed(self, node: Computed) -> list[int]:
        seconds = _ticks(node.finish) - _ticks(node.start)
        core = seconds if node.on_core is None else min(seconds, _ticks(node.on_core))
        return [_ticks(node.start), seconds, core, self.number(node.name), self.place(node.name)]

    def _travelled(self, sent: Travelled) -> list[int]:
        begun = _ticks(sent.start)
        queued = begun - _ticks(sent.launch)
        return [begun, _ticks(sent.finish) - begun, queued, _ticks(sent.exposed), self.number(sent.name)]

    def _exposed(self, sent: Travelled) -> list[int]:
        start, finish = exposed_span(sent)
        return [_ticks(start), _ticks(finish) - _ticks(start), self.number(sent.name)]


def _numbered(name: str, numbers: dict[str, int], names: list[str]) -> int:
    if name not in numbers:
        numbers[name] = len(names)
        names.append(name)
    return numbers[name]


def _flat(rows: Iterable[list[int]]) -> list[int]:
    """Rows one after the other; the first number of each as its distance from the one before, which packs well."""
    found, before = [], 0
    for row in rows:
        found += [row[0] - before, *row[1:]]
        before = row[0]
    return found


def _ticks(seconds: float) -> int:
    return round(seconds / TICK)
