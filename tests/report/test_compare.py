"""Two reports side by side: every number that differs, and nothing that does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from crossfade.cost.timeline import Computed, Timeline
from crossfade.report.page import render_comparison
from crossfade.report.report import Report
from tests.report.small_reports import Outline
from tests.report.small_timelines import MEASURED, REDUCE


def pair() -> tuple[Report, Report]:
    before = Report(
        "r", measured=MEASURED, facts={"torch": "2.13", "mesh": "dp=2"}, program="a\nb", modules={"mm": "up"}
    )
    quicker = replace(REDUCE, finish=1.25, exposed=0.25)
    after = Timeline((Computed("mm", 0.0, 1.0), Computed("add", 1.25, 2.25)), (quicker,), 2.25, "measured")
    return before, replace(before, measured=after, facts={"torch": "2.15", "mesh": "dp=2"}, program="a\nc")


def test_what_differs_is_there_and_nothing_else() -> None:
    comparison = pair()[0].compared_with(pair()[1])
    assert comparison.verdict == "A step is shorter: 3.00 s became 2.25 s (-25%)."
    assert {table.title: table.rows for table in comparison.tables} == {
        "Sums": (
            ("step", "3.00 s", "2.25 s", "-25%"),
            ("communication", "1.50 s", "750.0 ms", "-50%"),
            ("exposed", "1.00 s", "250.0 ms", "-75%"),
            ("hidden", "33%", "67%", "+100%"),
        ),
        "Exposed": (("r", "all_reduce of 2 KiB on dp", "1.00 s", "250.0 ms"),),
        "Where and how": (("torch", "2.13", "2.15"),),
    }
    assert (comparison.program.added, comparison.program.removed) == (1, 1)


def test_equal_reports_do_not_differ() -> None:
    before, _ = pair()
    comparison = before.compared_with(before)
    assert comparison.tables == ()
    assert comparison.verdict == "A step takes 3.00 s in both."


def test_the_page_of_a_comparison_is_whole_and_escapes(tmp_path: Path) -> None:
    before, after = pair()
    evil = "<script>alert('x')</script>"
    html = render_comparison(replace(before, facts={evil: "1"}).compared_with(replace(after, title=evil)))
    outline = Outline(html)
    assert "alert('x')" not in html
    assert outline.open == []
    assert "A step is shorter: 3.00 s became 2.25 s (-25%)." in outline.text
    assert "default-src 'none'" in html
