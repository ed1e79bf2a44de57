"""Reports as a page: everything is there, escaped, and nothing is loaded."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from crossfade.cost.timeline import Computed, Timeline
from crossfade.graph.passes import Outcome, PassRecord, Verdict
from crossfade.report import page
from crossfade.report.rank_timelines import RankTimeline
from crossfade.report.report import Report, Table
from tests.report.small_reports import Outline, packed_texts, record, written
from tests.report.small_timelines import MEASURED, PREDICTED, long_report


def test_page_shows_every_part(report: Report, tmp_path: Path) -> None:
    outline = Outline(written(report.with_table(Table("Step time", ["ms"], [[3.25]], note="of 5")), tmp_path))
    for part in [
        "two reduces",
        "mesh dp=2",
        "How long is a step? not timed",
        "What is exposed, and why? Not known without a timeline.",
        "Did the passes that were asked for fire? 1 of 2 changed the program remove-unused-collectives",
        "all_reduce 2 1 48 B 16 B",
        "removed 1 32 B nothing waits for it",
        "unused 32 B remove-unused-collectives",
        "1 remove-unused-collectives 6 → 5 nodes 12.5 ms bitwise removed 1 2 verdicts Diff +0 \u22121",
        "1 pass changed nothing 2 remove-unused-collectives 5 nodes 37.5 ms bitwise removed 0 1 verdict",
        "Step time ms 3.250 of 5",
        "Show 5 lines",
    ]:
        assert part in outline.text
    assert outline.open == []


def test_page_bars_are_relative_to_the_largest(report: Report, tmp_path: Path) -> None:
    widths = re.findall(r'style="width: ([\d.]+)%"', written(report, tmp_path))
    assert widths == ["100.0", "50.0", "100.0", "33.33", "25.0", "75.0"]


def test_page_groups_verdicts_folded_and_each_leads_to_its_pass(report: Report, tmp_path: Path) -> None:
    tags = Outline(written(report, tmp_path)).tags
    groups = [attrs for tag, attrs in tags if tag == "details" and attrs.get("class") == "group"]
    assert [(group["data-outcome"], group["data-number"]) for group in groups] == [
        ("removed", "1"),
        ("left alone", "2"),
    ]
    assert not any("open" in group for group in groups)
    buttons = [attrs["data-outcome"] for tag, attrs in tags if tag == "button" and "data-outcome" in attrs]
    assert buttons == ["removed", "left alone"]
    links = [attrs["href"] for tag, attrs in tags if tag == "a" and str(attrs["href"]).startswith("#pass-")]
    assert links == ["#pass-1", "#pass-1", "#pass-1", "#pass-2"]  # the first from the first screen
    assert [attrs["id"] for tag, attrs in tags if tag == "article"] == ["pass-1", "pass-2"]


def test_page_says_how_many_verdicts_of_one_kind_it_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "VERDICT_LIMIT", 2)
    verdicts = [Verdict(f"n{i}", Outcome.LEFT, "too small") for i in range(5)]
    text = Outline(written(Report("r", records=(record(*verdicts),)), tmp_path)).text
    assert "n1" in text and "n2" not in text
    assert "3 more verdicts of this kind; the JSON form has them all." in text


def test_page_tells_how_long_a_step_is_and_could_be(tmp_path: Path) -> None:
    text = Outline(written(Report("r", predicted=PREDICTED, measured=MEASURED), tmp_path)).text
    assert "How long is a step? 3.00 s measured as it is 3.00 s perfect overlap 2.00 s no communication 2.00 s" in text
    assert (
        "What is exposed, and why? 1.00 s 33% of the step 1.00 s r , all_reduce of 2 KiB on dp needed 750.0 ms" in text
    )


def test_page_has_all_ranks(tmp_path: Path) -> None:
    ranks = [RankTimeline(rank, MEASURED, 10.0 + rank / 2, "a", {"dp": (0, 1)}) for rank in range(2)]
    html = written(Report("r", measured=MEASURED, ranks=ranks), tmp_path)
    text = Outline(html).text
    assert "rank 0 2.00 s 1.00 s 500.0 ms 1.50 s 0.00 ms" in text
    assert "r all_reduce of 2 KiB dp 500.0 ms rank 1 nobody" in text
    tracks = packed_texts(html)["timeline-data"]["tracks"]
    assert [(track["title"], track["start"]) for track in tracks] == [("rank 0", 0), ("rank 1", 5_000_000)]


def test_page_links_lead_somewhere(report: Report, tmp_path: Path) -> None:
    tags = Outline(written(report.with_table(Table("T", ["c"], [["x"]])), tmp_path)).tags
    targets = {attrs["href"] for tag, attrs in tags if tag == "a"}
    assert targets <= {f"#{attrs['id']}" for _, attrs in tags if "id" in attrs}
    assert "#table-1" in targets


def test_page_escapes_everything_of_the_users(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>\"'&"
    verdict = Verdict(evil, Outcome.LEFT, evil, source=evil, remedy=evil)
    bad = PassRecord(evil, evil, evil, 0.1, True, {evil: 1}, (verdict,), 1, 1, before=evil, after=evil + "2")
    counts = {evil: (1, 1)}
    report = Report(evil, (bad,), counts, counts, 1, 1, {evil: evil}, (Table(evil, [evil], [[evil]], evil),), evil)
    timeline = Timeline((Computed(evil, 0.0, 1.0),), (), 1.0, evil)
    report = replace(report, measured=timeline, modules={evil: evil}, alive=[(evil, 8)], memory=[(evil, 8)])
    html = written(report, tmp_path)
    outline = Outline(html)
    # The page's own, and three packed texts: the program, a diff, the timeline.
    assert [attrs.get("type") for tag, attrs in outline.tags if tag == "script"] == ["text/plain"] * 3 + [None]
    assert "alert('x')" not in html
    assert evil in outline.text
    assert outline.open == []
    texts = packed_texts(html)
    assert texts["program-text"] == [["", evil]]
    assert ["removed", evil] in texts["diff-1"]
    assert texts["timeline-data"]["names"] == [evil]


def test_page_loads_nothing(report: Report, tmp_path: Path) -> None:
    html = written(report, tmp_path)
    assert html.startswith("<!doctype html>")
    assert "default-src 'none'" in html
    assert not re.search(r"https?:|src=|@import|url\(|<link|fetch\(", html)


def test_page_of_an_empty_report_says_so(tmp_path: Path) -> None:
    text = Outline(written(Report("nothing"), tmp_path)).text
    nothing = ["The program had no collectives, and has none now.", "No pass gave a verdict."]
    for part in [*nothing, "share of the time. No passes ran.", "No text was kept.", "fire? none ran"]:
        assert part in text


def test_page_says_why_a_changed_pass_has_no_diff(tmp_path: Path) -> None:
    html = written(Report("r", records=(record(changed=True),)), tmp_path)
    assert "No diff: texts were not kept (asked not to, or a program over 20,000 nodes)." in html


def test_page_colours_a_diff(tmp_path: Path) -> None:
    changed = record(changed=True, before="a = 1\nb = 2", after="a = 1\nb < 3")
    html = written(Report("r", records=(changed,)), tmp_path)
    assert packed_texts(html)["diff-1"] == [
        ["hunk", "@@ -1,2 +1,2 @@"], ["same", "a = 1"], ["removed", "b = 2"], ["added", "b < 3"],
    ]  # fmt: skip


def test_page_marks_collectives_in_the_program(report: Report, tmp_path: Path) -> None:
    runs = packed_texts(written(report, tmp_path))["program-text"]
    assert [(kind, text.splitlines()[0]) for kind, text in runs] == [
        ("", 'a: f32[4] = input("a")'),
        ("comm", 'used: f32[4] = c10d.all_reduce(a, "sum", "dp")'),
        ("", 'return output("y", done)'),
    ]


def test_page_says_how_much_of_a_long_program_it_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PROGRAM_LINE_LIMIT", 2)
    html = written(Report("r", program="one\ntwo\nthree"), tmp_path)
    assert packed_texts(html)["program-text"] == [
        ["", "one\ntwo"],
        ["cut", "1 more line cut; the JSON form has them all"],
    ]


def test_page_says_how_much_of_a_long_diff_it_cut(tmp_path: Path) -> None:
    changed = record(changed=True, before="", after="\n".join(map(str, range(3000))))
    lines = packed_texts(written(Report("r", records=(changed,)), tmp_path))["diff-1"]
    assert len(lines) == 2001
    assert lines[-1] == ["cut", "1,001 more lines cut"]


def test_page_of_a_step_of_24_layers_is_below_3_mb(tmp_path: Path) -> None:
    html = written(long_report(), tmp_path)
    assert len(html) < 3_000_000
