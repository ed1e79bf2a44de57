"""Reports on the terminal, exactly."""

from __future__ import annotations

from crossfade.graph.passes import Outcome, Verdict
from crossfade.report import terminal
from crossfade.report.report import Report, Table
from tests.report.small_reports import record, shown


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
