"""Timelines in reports: exact pictures of small ones, small pictures of large ones, and the numbers beside them."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from crossfade.cost.timeline import Computed, Timeline, Travelled
from crossfade.report import draw_timeline as lanes
from crossfade.report.draw_timeline import BLOCK, COLUMNS, NARROW, Span
from crossfade.report.report import Report
from tests.report.small_timelines import MEASURED, PREDICTED, long_timeline


def page_of(report: Report, folder: Path) -> str:
    return report.to_html(folder / "report.html").read_text(encoding="utf-8")


def section_of(report: Report, folder: Path) -> str:
    found = re.search(r'<section id="timeline">.*?</section>', page_of(report, folder), flags=re.DOTALL)
    return found.group() if found else ""


def shown(report: Report, *, all: bool = False) -> list[str]:
    console = Console(file=io.StringIO(), width=100)
    report.show(console, all=all)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def rects(section: str) -> list[tuple[str, str, str, str]]:
    return re.findall(
        r'<rect class="(\w+)" x="([\d.]+)" width="([\d.]+)" y="3" height="20"><title>(.*?)</title>', section
    )


def test_page_draws_lanes_to_scale_and_marks_what_is_exposed(tmp_path: Path) -> None:
    # 400 columns a second; wide blocks leave 0.7 of a column to the next.
    about = "all_reduce of 2 KiB on dp"
    assert rects(section_of(Report("r", measured=MEASURED), tmp_path)) == [
        ("computed", "0.0", "399.3", "mm: 1.00 s"),
        ("computed", "800.0", "399.3", "add: 1.00 s"),
        ("exposed", "400.0", "399.3", f"r: 1.00 s, computation stands still for {about}"),
        ("travelled", "200.0", "599.3", f"r: 1.50 s, {about}, 250.0 ms after its launch"),
        ("exposed", "400.0", "399.3", f"r: 1.00 s, computation stands still for {about}"),
    ]


def test_page_puts_predicted_above_measured_on_one_axis(tmp_path: Path) -> None:
    section = section_of(Report("r", predicted=PREDICTED, measured=MEASURED), tmp_path)
    assert re.findall(r'aria-label="((?:pre|mea).*?)"', section) == [
        "predicted computation", "predicted communication dp", "measured computation", "measured communication dp",
    ]  # fmt: skip
    assert ("computed", "400.0", "399.3", "add: 1.00 s") in rects(section)
    ticks = re.findall(r'style="left: ([\d.]+)%">(.*?)<', section)
    assert ticks == [("0.0", "0"), ("16.67", "0.5 s"), ("33.33", "1 s"), ("50.0", "1.5 s"), ("66.67", "2 s"),
                     ("83.33", "2.5 s"), ("100.0", "3 s")]  # fmt: skip
    words = " ".join(re.sub(r"<[^>]+>", " ", section).split())
    assert "predicted a machine step 2.00 s, exposed 0.00 ms, 100% of communication hidden" in words
    assert "measured step 3.00 s, exposed 1.00 s, 33% of communication hidden" in words


def test_page_compares_and_names_what_was_waited_for(tmp_path: Path) -> None:
    section = section_of(Report("r", predicted=PREDICTED, measured=MEASURED), tmp_path)
    words = " ".join(re.sub(r"<[^>]+>", " ", section).split())
    assert "predicted measured measured / predicted step 2.00 s 3.00 s 1.50x computation 2.00 s 2.00 s 1.00x" in words
    assert "communication 500.0 ms 1.50 s 3.00x exposed 0.00 ms 1.00 s hidden 100% 33%" in words
    page = " ".join(
        re.sub(r"<[^>]+>", " ", page_of(Report("r", predicted=PREDICTED, measured=MEASURED), tmp_path)).split()
    )
    assert "exposed why r all_reduce dp 2 KiB 250.0 ms 1.50 s 1.00 s needed 750.0 ms after its launch" in page


def test_page_without_timelines_has_no_section(tmp_path: Path) -> None:
    html = page_of(Report("r"), tmp_path)
    assert 'id="timeline"' not in html
    assert 'href="#timeline"' not in html
    assert 'href="#timeline"' in page_of(Report("r", measured=MEASURED), tmp_path)


def test_page_escapes_names(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>"
    reduce = Travelled(evil, evil, evil, 1, 0.0, 0.0, 1.0, 0.5, 0.5)
    html = page_of(Report("r", measured=Timeline((Computed(evil, 0.0, 0.5),), (reduce,), 1.0, evil)), tmp_path)
    assert "alert('x')" not in html
    # Source 1; blocks 1 + 3 + 3 + 3; lane 2 times; the first screen 3; the row of each collective 3.
    assert html.count("alert(&#39;x&#39;)") == 19


def test_page_draws_memory_and_its_peak(tmp_path: Path) -> None:
    section = section_of(Report("r", measured=MEASURED, memory=[("x", 1024), ("mm", 4096), ("add", 2048)]), tmp_path)
    assert 'd="M0 56H0V0.0H800V0.0H801V28.0H1200V56Z"><title>peak 4 KiB' in section


def test_page_draws_memory_alone_by_the_order_of_nodes(tmp_path: Path) -> None:
    section = section_of(Report("r", memory=[("a", 1), ("b", 2), ("c", 1)]), tmp_path)
    assert 'd="M0 56H0V28.0H600V0.0H1199V0.0H1200V28.0H1200V56Z"' in section
    assert re.findall(r'style="left: [\d.]+%">(.*?)<', section) == ["0", "0.5", "1", "1.5", "2"]
    assert "<rect" not in section


def test_page_of_a_long_timeline_is_small(tmp_path: Path) -> None:
    long = long_timeline(100_000)
    memory = [(node.name, index) for index, node in enumerate(long.computation)]
    section = section_of(Report("r", predicted=long, measured=long, memory=memory), tmp_path)
    assert len(section) < 1_000_000
    # Two timelines of one computing lane and three groups, each also with exposed blocks.
    assert len(rects(section)) <= 2 * 8 * (COLUMNS / BLOCK + 1)


def test_groups_beyond_the_limit_share_a_lane(tmp_path: Path) -> None:
    many = [Travelled(f"r{i}", "all_reduce", f"g{i}", 8, 0.0, 0.0, 1.0, None, 0.0) for i in range(9)]
    section = section_of(Report("r", measured=Timeline((), tuple(many), 1.0)), tmp_path)
    labels = re.findall(r'aria-label="measured (.*?)"', section)
    assert labels == ["computation", *(f"communication g{i}" for i in range(6)), "communication, other groups"]
    assert len(rects(section)) == 9


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 0.01), st.floats(0, 0.02)), min_size=1, max_size=200))
def test_merging_keeps_every_span_in_place(steps: list[tuple[float, float]]) -> None:
    spans, at = [], 0.0
    for gap, seconds in steps:
        spans.append(Span("computed", at + gap, at + gap + seconds, f"n{len(spans)}"))
        at += gap + seconds
    length = max(at, 1e-3)
    blocks = lanes.merged(spans, length)
    counts = [int(found.group(1)) if (found := re.match(r"(\d+) nodes", block.title)) else 1 for block in blocks]
    assert sum(counts) == len(spans)
    assert all(block.width <= BLOCK + 0.1 for block, count in zip(blocks, counts, strict=True) if count > 1)
    scale = COLUMNS / length
    for span in spans:
        middle = (span.start + span.finish) / 2 * scale
        assert any(block.x - 0.11 <= middle <= block.x + block.width + 0.81 for block in blocks)
    wide = sum(span.seconds * scale >= NARROW for span in spans)
    assert len(blocks) <= wide + (wide + 1) + 2 * COLUMNS / BLOCK


def test_terminal_shows_lanes_and_sums() -> None:
    lines = shown(Report("r", predicted=PREDICTED, measured=MEASURED), all=True)
    start = next(index for index, line in enumerate(lines) if line.startswith("predicted"))
    assert lines[start : start + 4] == [
        "predicted  computation    " + "█" * 43,
        "           communication       " + "▄" * 11,
        "measured   computation    " + "█" * 21 + "░" * 22 + "█" * 21,
        "           communication            " + "·" + "▄" * 10 + "░" * 22,
    ]
    assert [line.split() for line in lines if line.startswith(("  step", "  exposed"))] == [
        ["step", "2.00", "s", "3.00", "s", "1.50x"],
        ["exposed", "0.00", "ms", "1.00", "s"],
    ]


def test_json_has_sums_and_spans() -> None:
    report = Report("r", predicted=PREDICTED, measured=MEASURED, memory=[("mm", 8), (2.5, 4)])
    found = json.loads(report.to_json())["measured"]
    sums = {key: found[key] for key in ("source", "seconds", "busy", "travelling", "exposed", "hidden")}
    assert sums == {"source": "measured", "seconds": 3.0, "busy": 2.0, "travelling": 1.5, "exposed": 1.0,
                    "hidden": pytest.approx(1 / 3)}  # fmt: skip
    assert found["computation"][0] == {"name": "mm", "start": 0.0, "finish": 1.0, "on_core": None}
    assert Report.from_json(report.to_json()) == report


def test_json_of_an_earlier_version_is_read() -> None:
    content = json.loads(Report("r").to_json())
    earlier = {key: value for key, value in content.items() if key not in ("predicted", "measured", "memory")}
    assert Report.from_json(json.dumps(earlier)) == Report("r")


def test_with_timelines_keeps_what_is_not_given() -> None:
    first = Report("r").with_timelines(predicted=PREDICTED, memory=[("mm", 8)])
    second = first.with_timelines(measured=MEASURED)
    assert (second.predicted, second.measured, second.memory) == (PREDICTED, MEASURED, (("mm", 8),))
    assert first.measured is None
