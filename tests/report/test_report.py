"""What a report says, in each of its forms, about programs that real passes changed."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import ClassVar

import pytest
from rich.console import Console

from crossfade.errors import CrossfadeError
from crossfade.graph import collectives
from crossfade.graph.passes import Numerics, Outcome, Pass, PassRecord, PassResult, Verdict, run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse
from crossfade.report import page, terminal
from crossfade.report.diff import LineKind, unified
from crossfade.report.report import PassVerdict, Report, Table, VerdictGroup

TWO_REDUCES = """
a: f32[4] = input("a")
b: f32[8] = input("b")
used: f32[4] = c10d.all_reduce(a, "sum", "dp")
unused: f32[8] = c10d.all_reduce(b, "sum", "dp")
done: f32[4] = c10d.wait_tensor(used)
return output("y", done)
"""


@dataclass(frozen=True)
class RemoveUnusedCollectives(Pass):
    """Removes the collectives that nothing waits for, and says of the others why they stay."""

    name: ClassVar[str] = "remove-unused-collectives"
    numerics: ClassVar[Numerics] = Numerics.BITWISE

    def run(self, program: Program) -> PassResult:
        verdicts = []
        for one in collectives.find(program.graph):
            if one.waits:
                verdicts.append(Verdict.of(one.node, Outcome.LEFT, "its result is used", bytes=one.bytes))
            else:
                verdicts.append(Verdict.of(one.node, Outcome.REMOVED, "nothing waits for it", bytes=one.bytes))
                program.graph.erase_node(one.node)
        removed = sum(verdict.outcome is Outcome.REMOVED for verdict in verdicts)
        return PassResult(removed > 0, {"removed": removed}, tuple(verdicts))


@pytest.fixture
def report() -> Report:
    before = parse(TWO_REDUCES, groups={"dp": 2})
    after = run_passes(before, [RemoveUnusedCollectives(), RemoveUnusedCollectives()])
    # Times differ from run to run: fixed ones make the texts exact.
    after.history = tuple(replace(record, seconds=0.0125 * (2 * i + 1)) for i, record in enumerate(after.history))
    return Report.of(before, after, title="two reduces", facts={"mesh": "dp=2"})


def record(*verdicts: Verdict, name: str = "some-pass", changed: bool = False, **texts: str) -> PassRecord:
    return PassRecord(name, name, "bitwise", 0.001, changed, {}, verdicts, 3, 3, **texts)


def shown(report: Report, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    report.show(console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in lines)


def written(report: Report, folder: Path) -> str:
    return report.to_html(folder / "report.html").read_text(encoding="utf-8")


class Outline(HTMLParser):
    """The tags of a page in order, those left open, and its text."""

    VOID = frozenset({"meta", "input", "link", "br"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += data.split()

    @property
    def text(self) -> str:
        return " ".join(self.words)


def test_of_counts_both_programs_and_takes_the_history_of_the_second(report: Report) -> None:
    assert report.collectives_before == {"all_reduce": (2, 48)}
    assert report.collectives_after == {"all_reduce": (1, 16)}
    assert (report.nodes_before, report.nodes_after) == (6, 5)
    assert [one.counts for one in report.records] == [{"removed": 1}, {"removed": 0}]
    assert report.program.splitlines()[2] == 'used: f32[4] = c10d.all_reduce(a, "sum", "dp")'
    assert "unused" not in report.program


def test_summary_is_one_paragraph(report: Report) -> None:
    assert str(report) == (
        "two reduces: 2 collectives (48 B) became 1 (16 B), 6 nodes became 5. "
        "2 passes took 50.0 ms, 1 changed the program. 3 verdicts: 1 removed, 2 left alone."
    )


def test_summary_and_page_count_the_passes_that_changed_something(tmp_path: Path) -> None:
    report = Report("r", records=(record(changed=True), record(changed=True), record()))
    assert "3 passes took 3.00 ms, 2 changed the program." in report.summary
    assert "Pass time 3.00 ms 3 passes, 2 changed the program" in Outline(written(report, tmp_path)).text


def test_verdicts_come_with_the_name_of_their_pass(report: Report) -> None:
    name = "remove-unused-collectives"
    assert report.verdicts == (
        PassVerdict(name, Verdict("used", Outcome.LEFT, "its result is used", bytes=16)),
        PassVerdict(name, Verdict("unused", Outcome.REMOVED, "nothing waits for it", bytes=32)),
        PassVerdict(name, Verdict("used", Outcome.LEFT, "its result is used", bytes=16)),
    )


def test_groups_follow_the_order_of_outcomes_then_their_number() -> None:
    left = [Verdict(f"n{i}", Outcome.LEFT, reason, remedy=remedy, bytes=i) for i, reason, remedy in
            [(1, "too small", "raise it"), (2, "alone", ""), (3, "alone", "merge"), (4, "alone", "merge")]]  # fmt: skip
    report = Report("r", records=(record(*left), record(Verdict("m", Outcome.FUSED, "with mm"))))
    assert report.verdict_groups == (
        VerdictGroup(Outcome.FUSED, "with mm", 1, 0),
        VerdictGroup(Outcome.LEFT, "alone", 3, 9, "merge"),
        VerdictGroup(Outcome.LEFT, "too small", 1, 1, "raise it"),
    )


def test_a_report_does_not_follow_its_callers_dict() -> None:
    facts = {"mesh": "dp=2"}
    report = Report("r", facts=facts)
    facts["mesh"] = "dp=4"
    assert report.facts == {"mesh": "dp=2"}


def test_with_table_leaves_the_original_alone(report: Report) -> None:
    longer = report.with_table(Table("Speed", ["ms"], [[1.5]])).with_table(Table("Memory", ["MiB"], [[2]]))
    assert [table.title for table in longer.tables] == ["Speed", "Memory"]
    assert report.tables == ()


def test_a_table_with_a_short_row_is_refused() -> None:
    with pytest.raises(CrossfadeError) as caught:
        Table("Speed", ["ranks", "ms"], [[2, 1.5], [4]])
    assert str(caught.value) == (
        "1 cell in row 1 of table 'Speed': expected 2, one for each of ranks, ms. "
        "Remedy: give every row one cell per column, None where there is nothing to say."
    )


def test_json_round_trips_everything(report: Report, tmp_path: Path) -> None:
    report = report.with_table(Table("Mixed", ["a", "b", "c", "d"], [["é", 1, 2.5, None]], note="n"))
    path = tmp_path / "report.json"
    text = report.to_json(path)
    assert Report.from_json(text) == report
    assert Report.from_json(path) == report
    assert Report.from_json(text).verdicts[0].verdict.outcome is Outcome.LEFT
    assert Report.from_json(text).to_json() == text


def test_json_keys_are_stable(report: Report) -> None:
    keys = re.findall(r'^  "(\w+)"', report.to_json(), flags=re.MULTILINE)
    assert keys == ["format", "title", "records", "collectives_before", "collectives_after", "nodes_before",
                    "nodes_after", "facts", "tables", "program", "predicted", "measured", "memory"]  # fmt: skip
    inner = re.findall(r'^ {10}"(\w+)"', report.to_json(), flags=re.MULTILINE)
    assert inner[:6] == ["subject", "outcome", "reason", "source", "remedy", "bytes"]


@pytest.mark.parametrize(
    ("text", "found"),
    [("{", "text, which is not JSON"), ("[]", "report format none"), ('{"format": 7}', "report format 7")],
)
def test_json_of_something_else_is_refused(text: str, found: str) -> None:
    with pytest.raises(CrossfadeError, match=found):
        Report.from_json(text)


def test_terminal_shows_everything(report: Report) -> None:
    assert shown(report.with_table(Table("Step time", ["form", "ms"], [["ours", 3.25]], note="median of 5"))) == (
        "─────────────────────────────────────────── two reduces ────────────────────────────────────────────\n"
        "mesh  dp=2\n"
        "\n"
        "2 collectives (48 B) became 1 (16 B), 6 nodes became 5. 2 passes took 50.0 ms, 1 changed the\n"
        "program. 3 verdicts: 1 removed, 2 left alone.\n"
        "\n"
        "Collectives\n"
        "\n"
        "  kind         before   after   bytes before   bytes after\n"
        " ──────────────────────────────────────────────────────────\n"
        "  all_reduce        2       1           48 B          16 B\n"
        "\n"
        "  all               2       1           48 B          16 B\n"
        "\n"
        "\n"
        "What became of them, and why\n"
        "\n"
        "  outcome      number   bytes   reason                 remedy\n"
        " ─────────────────────────────────────────────────────────────\n"
        "  removed           1    32 B   nothing waits for it\n"
        "  left alone        2    32 B   its result is used\n"
        "\n"
        "\n"
        "Passes\n"
        "\n"
        "  pass                           time   nodes   numerics   counts\n"
        " ────────────────────────────────────────────────────────────────────\n"
        "  remove-unused-collectives   12.5 ms   6 → 5   bitwise    removed 1\n"
        "  remove-unused-collectives   37.5 ms   5 → 5   bitwise    removed 0\n"
        "\n"
        "\n"
        "Step time\n"
        "\n"
        "  form      ms\n"
        " ──────────────\n"
        "  ours   3.250\n"
        "\n"
        "median of 5"
    )


def test_terminal_reads_no_markup_in_what_users_wrote() -> None:
    verdict = Verdict("n", Outcome.LEFT, "[bold]f32[4][/bold]", remedy="[/red]")
    report = Report("[red]r[/red]", records=(record(verdict),), facts={"[i]k": "[i]v"})
    text = shown(report.with_table(Table("[b]t", ["[b]c"], [["[b]x"]], note="[b]n")))
    for part in ["[red]r[/red]", "[i]k  [i]v", "[bold]f32[4][/bold]", "[/red]", "[b]t", "[b]c", "[b]x", "[b]n"]:
        assert part in text


def test_terminal_says_how_many_reasons_it_cut() -> None:
    verdicts = [Verdict("n", Outcome.LEFT, f"reason {i:02}") for i in range(terminal.GROUP_LIMIT + 2)]
    text = shown(Report("r", records=(record(*verdicts),)))
    assert "reason 19" in text
    assert "reason 20" not in text
    assert "2 more reasons not shown: see to_html or to_json" in text
    assert "more reason" not in shown(Report("r", records=(record(*verdicts[:-2]),)))


def test_terminal_cuts_no_name_when_narrow() -> None:
    name = "a-pass-with-quite-a-long-name(option=26214400)"
    text = shown(Report("r", records=(record(name=name),)), width=50)
    assert "…" not in text


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


def test_a_diff_has_three_lines_of_context() -> None:
    before = [f"line {i}" for i in range(20)]
    after = [*before[:10], "new", *before[10:]]
    lines = unified("\n".join(before), "\n".join(after)).lines
    assert [line.kind for line in lines] == [LineKind.HUNK, *[LineKind.SAME] * 3, LineKind.ADDED, *[LineKind.SAME] * 3]
    assert lines[0].text == "@@ -8,6 +8,7 @@"


def test_a_diff_keeps_lines_that_look_like_its_own_signs() -> None:
    diff = unified("-- a\nx", "++ b\nx")
    assert [(line.kind, line.text) for line in diff.lines[1:]] == [
        (LineKind.REMOVED, "-- a"),
        (LineKind.ADDED, "++ b"),
        (LineKind.SAME, "x"),
    ]
