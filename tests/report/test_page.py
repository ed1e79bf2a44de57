"""Reports as a page: everything is there, escaped, and nothing is loaded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from crossfade.graph.passes import Outcome, PassRecord, Verdict
from crossfade.report import page
from crossfade.report.report import Report, Table
from tests.report.small_reports import Outline, record, written


def test_page_shows_every_part(report: Report, tmp_path: Path) -> None:
    outline = Outline(written(report.with_table(Table("Step time", ["ms"], [[3.25]], note="of 5")), tmp_path))
    for part in [
        "two reduces",
        "mesh dp=2",
        "Collectives 2 → 1 -50%",
        "Bytes 48 B → 16 B -67%",
        "Nodes 6 → 5 -17%",
        "Pass time 50.0 ms 2 passes, 1 changed the program",
        "unused removed 32 B nothing waits for it remove-unused-collectives",
        "1 remove-unused-collectives 6 → 5 nodes 12.5 ms bitwise removed 1 2 verdicts Diff +0 \u22121",
        "2 remove-unused-collectives 5 nodes 37.5 ms bitwise removed 0 1 verdict It changed nothing.",
        "Step time ms 3.250 of 5",
        "Show 5 lines a: f32[4]",
    ]:
        assert part in outline.text
    assert outline.open == []


def test_page_bars_are_relative_to_the_largest(report: Report, tmp_path: Path) -> None:
    widths = re.findall(r'style="width: ([\d.]+)%"', written(report, tmp_path))
    assert widths == ["100.0", "50.0", "100.0", "33.33", "25.0", "75.0"]


def test_page_verdicts_can_be_filtered_and_lead_to_their_pass(report: Report, tmp_path: Path) -> None:
    tags = Outline(written(report, tmp_path)).tags
    assert [attrs["data-outcome"] for tag, attrs in tags if tag == "button"] == ["removed", "left alone"]
    rows = [attrs["data-outcome"] for tag, attrs in tags if tag == "tr" and "data-outcome" in attrs]
    assert rows == ["left alone", "removed", "left alone"]
    links = [attrs["href"] for tag, attrs in tags if tag == "a" and str(attrs["href"]).startswith("#pass-")]
    assert links == ["#pass-1", "#pass-1", "#pass-2"]
    assert [attrs["id"] for tag, attrs in tags if tag == "article"] == ["pass-1", "pass-2"]


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
    html = written(report, tmp_path)
    outline = Outline(html)
    assert [tag for tag, _ in outline.tags].count("script") == 1
    assert "alert('x')" not in html
    # Head 2, facts 2, navigation 1, collectives 1, group 2, verdict 5, pass 3 and its diff 2, table 4, program 1.
    assert outline.text.count(evil) == 23
    assert outline.open == []


def test_page_loads_nothing(report: Report, tmp_path: Path) -> None:
    html = written(report, tmp_path)
    assert html.startswith("<!doctype html>")
    assert "default-src 'none'" in html
    assert not re.search(r"https?:|src=|@import|url\(|<link|fetch\(", html)


def test_page_of_an_empty_report_says_so(tmp_path: Path) -> None:
    text = Outline(written(Report("nothing"), tmp_path)).text
    nothing = ["The program had no collectives, and has none now.", "No pass gave a verdict."]
    for part in [*nothing, "share of the time. No passes ran.", "No text was kept."]:
        assert part in text


def test_page_says_why_a_changed_pass_has_no_diff(tmp_path: Path) -> None:
    html = written(Report("r", records=(record(changed=True),)), tmp_path)
    assert "No diff: texts were not kept (asked not to, or a program over 20,000 nodes)." in html


def test_page_colours_a_diff(tmp_path: Path) -> None:
    changed = record(changed=True, before="a = 1\nb = 2", after="a = 1\nb < 3")
    html = written(Report("r", records=(changed,)), tmp_path)
    assert (
        '<pre class="code diff"><code><span class="hunk">@@ -1,2 +1,2 @@</span><span class="same">a = 1</span>'
        '<span class="removed">b = 2</span><span class="added">b &lt; 3</span></code></pre>'
    ) in html


def test_page_marks_collectives_in_the_program(report: Report, tmp_path: Path) -> None:
    assert (
        'b&#34;)</span><span class="comm">used: f32[4] = c10d.all_reduce(a, &#34;sum&#34;, &#34;dp&#34;)\n'
        "done: f32[4] = c10d.wait_tensor(used)</span><span>return"
    ) in written(report, tmp_path)


def test_page_says_how_much_of_a_long_program_it_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PROGRAM_LINE_LIMIT", 2)
    html = written(Report("r", program="one\ntwo\nthree"), tmp_path)
    assert '<span>one\ntwo</span><span class="cut">1 more line cut; the JSON form has them all</span>' in html
    assert "three" not in html


def test_page_says_how_much_of_a_long_diff_it_cut(tmp_path: Path) -> None:
    after = "\n".join(f"line {i}" for i in range(2500))
    html = written(Report("r", records=(record(changed=True, before="line 0", after=after),)), tmp_path)
    # 2,501 lines in all: the hunk's header, one that stayed and 2,499 new ones.
    assert html.count('<span class="added">') == 1998
    assert '<span class="cut">501 more lines cut</span>' in html
    assert "+2,499" in html
