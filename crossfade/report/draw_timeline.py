"""Timelines as pictures: lanes of blocks on a common axis, the memory curve, and tables that compare.

A lane is `COLUMNS` wide. Spans narrower than `NARROW` columns are merged with their neighbours into blocks of about
`BLOCK` columns, so a lane of 100,000 nodes has some hundred blocks; what is wide enough to see keeps its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from crossfade.cost.timeline import Computed, Timeline, Travelled
from crossfade.report.data import MemoryPoint, ReportData
from crossfade.report.units import Cell, format_bytes, format_seconds, plural

COLUMNS = 1200
NARROW = 2.0
BLOCK = 4.0
GROUP_LANES = 6
"""Groups that have a lane of their own; further ones share one more."""
MEMORY_HEIGHT = 56


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a lane in seconds; `name` and `detail` are what the reader sees on pointing at it."""

    style: str
    start: float
    finish: float
    name: str
    detail: str = ""

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.finish - self.start


@dataclass(frozen=True, slots=True)
class DrawnBlock:
    """A drawn rectangle: position and width in columns."""

    style: str
    x: float
    width: float
    title: str


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of a picture."""

    label: str
    blocks: tuple[DrawnBlock, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """One timeline: what it is, its sums in words, and its lanes."""

    title: str
    source: str
    remark: str
    lanes: tuple[Lane, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on the axis."""

    percent: float
    label: str


@dataclass(frozen=True, slots=True)
class MemoryArea:
    """Live bytes over time as an SVG path, and its highest point in words."""

    path: str
    peak: str


@dataclass(frozen=True, slots=True)
class Drawing:
    """Everything the page draws on one axis."""

    pictures: tuple[Picture, ...]
    memory: MemoryArea | None
    ticks: tuple[Tick, ...]


def timelines(report: ReportData) -> list[tuple[str, Timeline]]:
    """The report's timelines, predicted first.

    >>> timelines(ReportData("step"))
    []
    """
    pairs = ("predicted", report.predicted), ("measured", report.measured)
    return [(title, timeline) for title, timeline in pairs if timeline is not None]


def draw(report: ReportData) -> Drawing | None:
    """What the page shows of a report's timelines and memory; None if there is nothing to show."""
    shown = timelines(report)
    points = placed(report.memory, shown[0][1] if shown else None)
    if not shown and not points:
        return None
    length = max([timeline.seconds for _, timeline in shown] + [at for at, _ in points[-1:]]) or 1.0
    unit = "" if not shown and _named(report.memory) else "s"
    pictures = [_picture(title, timeline, length) for title, timeline in shown]
    return Drawing(tuple(pictures), _memory_area(points, length), tuple(ticks(length, unit)))


def merged(spans: Iterable[Span], length: float) -> list[DrawnBlock]:
    """The blocks of spans that are sorted by their start, on an axis of `length` seconds.

    >>> spans = [Span("computed", i * 1e-3, (i + 1) * 1e-3, f"n{i}") for i in range(10)]
    >>> [(block.x, block.width, block.title) for block in merged(spans, 6.0)]
    [(0.0, 2.0, '10 nodes, n0 to n9: 10.0 ms')]
    >>> [block.title for block in merged(spans, 0.1)][:2]
    ['n0: 1.00 ms', 'n1: 1.00 ms']
    """
    scale = COLUMNS / length
    blocks: list[DrawnBlock] = []
    narrow: list[Span] = []
    for span in spans:
        wide = span.seconds * scale >= NARROW
        if narrow and (wide or (span.finish - narrow[0].start) * scale > BLOCK):
            blocks.append(_block(narrow, scale))
            narrow = []
        if wide:
            blocks.append(_block([span], scale))
        else:
            narrow.append(span)
    return [*blocks, _block(narrow, scale)] if narrow else blocks


def exposed_span(collective: Travelled) -> tuple[float, float]:
    """When computation stood still for a collective: from when it was needed, or at the end if it never was.

    >>> exposed_span(Travelled("r", "all_reduce", "dp", 8, 0.0, 1.0, 4.0, needed=3.0, exposed=1.25))
    (3.0, 4.25)
    >>> exposed_span(Travelled("r", "all_reduce", "dp", 8, 0.0, 1.0, 4.0, needed=None, exposed=0.5))
    (3.5, 4.0)
    """
    start = collective.finish - collective.exposed if collective.needed is None else collective.needed
    return start, start + collective.exposed


def hidden(timeline: Timeline) -> float | None:
    """The share of communication that cost nothing: that computation neither stood still for nor, where that was
    measured, was stretched under. None without communication.

    >>> reduce = Travelled("r", "all_reduce", "dp", 8, 0.0, 0.0, 4.0, needed=3.0, exposed=1.0)
    >>> hidden(Timeline((), (reduce,), 4.0)), hidden(Timeline((), (), 4.0))
    (0.75, None)
    >>> hidden(Timeline((Computed("mm", 0.0, 3.0, on_core=2.0),), (reduce,), 4.0))
    0.5
    """
    if not timeline.travelling:
        return None
    return max(0.0, 1 - (timeline.exposed + stretched_beneath(timeline)) / timeline.travelling)


def stretched_beneath(timeline: Timeline) -> float:
    """The seconds by which computation was stretched while something travelled; 0 where nobody measured it.

    >>> reduce = Travelled("r", "all_reduce", "dp", 8, 0.0, 0.0, 1.0, needed=3.0, exposed=0.0)
    >>> stretched_beneath(Timeline((Computed("mm", 0.0, 2.0, on_core=1.0),), (reduce,), 2.0))
    0.5
    """
    if timeline.on_core is None:
        return 0.0
    ways = _united((sent.start, sent.finish) for sent in timeline.communication)
    total, first = 0.0, 0
    for span in timeline.computation:
        while first < len(ways) and ways[first][1] <= span.start:
            first += 1
        beneath, index = 0.0, first
        while index < len(ways) and ways[index][0] < span.finish:
            beneath += min(span.finish, ways[index][1]) - max(span.start, ways[index][0])
            index += 1
        if beneath:
            lost = max(0.0, span.finish - span.start - (span.on_core or 0.0))
            total += lost * beneath / (span.finish - span.start)
    return total


def _united(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans as few that do not overlap, in order."""
    found: list[tuple[float, float]] = []
    for start, finish in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], finish)
        else:
            found.append((start, finish))
    return found


def comparison(report: ReportData) -> tuple[list[str], list[list[Cell]]]:
    """Columns and rows of the table of sums, with the ratio if a run was both predicted and measured.

    >>> reduce = Travelled("r", "all_reduce", "dp", 8, 0.0, 0.0, 0.4, needed=0.3, exposed=0.1)
    >>> columns, rows = comparison(ReportData("step", measured=Timeline((Computed("mm", 0.0, 0.3),), (reduce,), 0.4)))
    >>> columns, rows[0], rows[3], rows[4]
    (['', 'measured'], ['step', '400.0 ms'], ['exposed', '100.0 ms'], ['hidden', '75%'])
    >>> comparison(ReportData("step", measured=Timeline((Computed("mm", 0.0, 0.4, on_core=0.3),), (), 0.4)))[1][2]
    ['of it stretched', '100.0 ms']
    """
    shown = timelines(report)
    both = len(shown) == 2
    columns = ["", *(title for title, _ in shown), *(["measured / predicted"] if both else [])]
    rows: list[list[Cell]] = []
    for label, field in (("step", "seconds"), ("computation", "busy"), ("communication", "travelling"),
                         ("exposed", "exposed")):  # fmt: skip
        if field == "travelling" and any(timeline.stretched is not None for _, timeline in shown):
            lost = [timeline.stretched for _, timeline in shown]
            rows.append(["of it stretched", *(None if value is None else format_seconds(value) for value in lost),
                         *([None] if both else [])])  # fmt: skip
        values = [getattr(timeline, field) for _, timeline in shown]
        ratio = [f"{values[1] / values[0]:.2f}x" if values[0] else None] if both else []
        rows.append([label, *(format_seconds(value) for value in values), *ratio])
    shares = [hidden(timeline) for _, timeline in shown]
    rows.append(["hidden", *(None if share is None else f"{share:.0%}" for share in shares), *([None] if both else [])])
    return columns, rows


def coverage(spans: Iterable[tuple[float, float]], length: float, cells: int) -> list[float]:
    """How much of each of `cells` equal parts of the axis the spans cover.

    >>> coverage([(0.0, 1.5), (3.5, 4.0)], length=4.0, cells=4)
    [1.0, 0.5, 0.0, 0.5]
    """
    filled = [0.0] * cells
    for start, finish in spans:
        first, last = start / length * cells, min(finish / length * cells, float(cells))
        for cell in range(int(first), min(cells, math.ceil(last))):
            filled[cell] += min(last, cell + 1) - max(first, cell)
    return filled


def placed(points: Sequence[MemoryPoint], timeline: Timeline | None) -> list[tuple[float, int]]:
    """Memory points on the time axis. A node that took no time is where the one before it is. Without a timeline,
    named points are one unit apart.

    >>> timeline = Timeline((Computed("a", 0.0, 2.0), Computed("b", 2.0, 3.0)), (), 3.0)
    >>> placed([("x", 8), ("a", 16), ("view", 16), ("b", 4)], timeline)
    [(0.0, 8), (0.0, 16), (0.0, 16), (2.0, 4)]
    >>> placed([("x", 8), ("a", 16)], None)
    [(0.0, 8), (1.0, 16)]
    """
    if timeline is None and _named(points):
        return [(float(index), size) for index, (_, size) in enumerate(points)]
    starts = {node.name: node.start for node in timeline.computation} if timeline is not None else {}
    found: list[tuple[float, int]] = []
    at = 0.0
    for place, size in points:
        at = max(at, starts.get(place, at) if isinstance(place, str) else place)
        found.append((at, size))
    return found


def ticks(length: float, unit: str = "s") -> Iterator[Tick]:
    """Marks at round numbers, four to nine of them.

    >>> [(tick.percent, tick.label) for tick in ticks(0.09)]
    [(0.0, '0'), (22.22, '20 ms'), (44.44, '40 ms'), (66.67, '60 ms'), (88.89, '80 ms')]
    """
    power = 10.0 ** math.floor(math.log10(length))
    step = next(factor * power for factor in (0.1, 0.2, 0.5, 1, 2) if length / (factor * power) <= 8)
    factor, name = _unit(length, unit)
    for index in range(int(length / step * (1 + 1e-9)) + 1):
        label = f"{round(index * step * factor, 6):g} {name}".strip() if index else "0"
        yield Tick(round(100 * index * step / length, 2), label)


def _unit(length: float, unit: str) -> tuple[float, str]:
    if unit != "s":
        return 1.0, unit
    return (1.0, "s") if length >= 2 else (1e3, "ms") if length >= 2e-3 else (1e6, "µs")


def _named(points: Sequence[MemoryPoint]) -> bool:
    return any(isinstance(place, str) for place, _ in points)


def _block(spans: list[Span], scale: float) -> DrawnBlock:
    start, finish = spans[0].start, max(span.finish for span in spans)
    # At least a column, or one could not see it; wide ones stand apart by less than one.
    width = max(1.0, (finish - start) * scale)
    gap = 0.7 if width > BLOCK else 0.0
    x = min(start * scale, COLUMNS - width)
    return DrawnBlock(spans[0].style, round(x, 1), round(width - gap, 1), _title(spans))


def _title(spans: list[Span]) -> str:
    first, last = spans[0], spans[-1]
    if len(spans) == 1:
        return f"{_short(first.name)}: {format_seconds(first.seconds)}" + (f", {first.detail}" if first.detail else "")
    noun = "node" if first.style == "computed" else "collective"
    total = sum(span.seconds for span in spans)
    return f"{plural(len(spans), noun)}, {_short(first.name)} to {_short(last.name)}: {format_seconds(total)}"


def _short(name: str, limit: int = 60) -> str:
    return name if len(name) <= limit else name[: limit - 1] + "…"


def _picture(title: str, timeline: Timeline, length: float) -> Picture:
    share = hidden(timeline)
    remark = f"step {format_seconds(timeline.seconds)}, exposed {format_seconds(timeline.exposed)}"
    remark += "" if share is None else f", {share:.0%} of communication hidden"
    # Who measured needs no second mention.
    source = "" if timeline.source == title else timeline.source
    return Picture(title, source, remark, tuple(_lanes(timeline, length)))


def _lanes(timeline: Timeline, length: float) -> Iterator[Lane]:
    still = sorted(_still(timeline.communication), key=lambda span: span.start)
    computed = [_computed(node) for node in timeline.computation]
    yield Lane("computation", tuple(merged(computed, length) + merged(still, length)))
    for label, members in _by_group(timeline.communication).items():
        parts = map(_travelled, members), _still(members)
        blocks = [merged(sorted(spans, key=lambda span: span.start), length) for spans in parts]
        yield Lane(label, tuple(block for part in blocks for block in part))


def _by_group(communication: Iterable[Travelled]) -> dict[str, list[Travelled]]:
    groups: dict[str, list[Travelled]] = {}
    for collective in communication:
        groups.setdefault(collective.group, []).append(collective)
    lanes: dict[str, list[Travelled]] = {}
    for index, (group, members) in enumerate(groups.items()):
        label = f"communication {group}" if index < GROUP_LANES else "communication, other groups"
        lanes.setdefault(label, []).extend(members)
    return lanes


def _computed(node: Computed) -> Span:
    return Span("computed", node.start, node.finish, node.name)


def _travelled(collective: Travelled) -> Span:
    late = collective.start - collective.launch
    waited = f", {format_seconds(late)} after its launch" if late > 0 else ""
    return Span("travelled", collective.start, collective.finish, collective.name, _about(collective) + waited)


def _still(communication: Iterable[Travelled]) -> Iterator[Span]:
    for collective in communication:
        if collective.exposed > 0:
            why = f"computation stands still for {_about(collective)}"
            yield Span("exposed", *exposed_span(collective), collective.name, why)


def _about(collective: Travelled) -> str:
    return f"{collective.kind} of {format_bytes(collective.bytes)} on {collective.group}"


def _memory_area(points: list[tuple[float, int]], length: float) -> MemoryArea | None:
    peak = max((size for _, size in points), default=0)
    if not peak:
        return None
    path = f"M0 {MEMORY_HEIGHT}"
    for column, (highest, last) in _by_column(points, length).items():
        path += f"H{column}V{_height(highest, peak)}"
        path += f"H{column + 1}V{_height(last, peak)}" if last != highest else ""
    return MemoryArea(f"{path}H{COLUMNS}V{MEMORY_HEIGHT}Z", f"peak {format_bytes(peak)}")


def _by_column(points: list[tuple[float, int]], length: float) -> dict[int, tuple[int, int]]:
    """For each column with points, the most that was alive in it and what it left: no peak gets lost."""
    columns: dict[int, tuple[int, int]] = {}
    alive = 0
    for at, size in points:
        column = min(COLUMNS - 1, int(at / length * COLUMNS))
        highest, _ = columns.get(column, (alive, alive))
        columns[column] = max(highest, size), size
        alive = size
    return columns


def _height(size: int, peak: int) -> float:
    return round(MEMORY_HEIGHT * (1 - size / peak), 1)
