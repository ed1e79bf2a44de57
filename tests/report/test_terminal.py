"""Reports on the terminal, exactly."""

from __future__ import annotations

import re

import pytest

from crossfade.graph.passes import Outcome, Verdict
from crossfade.report.rank_timelines import RankTimeline
from crossfade.report.report import Report, Table
from tests.report.small_reports import record, shown
from tests.report.small_timelines import MEASURED, long_report


def test_terminal_says_what_counts(report: Report) -> None:
    assert shown(report.with_table(Table("Step time", ["form", "ms"], [["ours", 3.25]], note="median of 5"))) == (
        "─────────────────────────────────────────── two reduces ────────────────────────────────────────────\n"
        "collectives  2 (48 B) became 1 (16 B)\n"
        "step         not timed: step.profile(batch) measures it, a machine predicts it\n"
        "passes       1 of 2 changed the program: remove-unused-collectives\n"
        "Step time\n"
        "form     ms\n"
        "ours  3.250\n"
        "more         3 verdicts, 2 passes; show(all=True), --all and the page have them"
    )


def test_terminal_says_how_long_a_step_is_and_why() -> None:
    assert shown(Report("r", measured=MEASURED, ranks=[RankTimeline(0, MEASURED)]), width=90).splitlines()[1:] == [
        "collectives  0 (0 B) became 0 (0 B)",
        "step         3.00 s measured; perfect overlap 2.00 s; no communication 2.00 s",
        "exposed      1.00 s of 1.50 s, 33% hidden",
        "             1.00 s r, all_reduce of 2 KiB on dp: needed 750.0 ms after its launch; its",
        "             way takes 1.50 s",
        'to do        ≤ 1.00 s: plan for the machine: machine="calibrate", or a preset',
        "measured   computation    " + "█" * 21 + "░" * 22 + "█" * 21,
        "           communication            " + "·" + "▄" * 10 + "░" * 22,
    ]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
def test_the_short_form_has_at_most_25_lines(width: int) -> None:
    table = Table("Step time", ["form", "ms"], [["ours", 3.25]] * 6)
    text = shown(long_report().with_table(table).with_table(table).with_table(table), width=width)
    assert len(text.splitlines()) <= 25
    words = set(re.split(r"\s+", text))
    assert {"all_reduce_0,", "pass-0,"} <= words or (width < 80 and "all_reduce_0," in words)


@pytest.mark.parametrize("width", [30, 50, 80])
def test_no_name_is_broken(width: int) -> None:
    spelling = "a-pass-with-quite-a-long-name(option=26214400,other_option=True)"
    verdict = Verdict("a_collective_with_a_name", Outcome.LEFT, "some_reason_in_one_word_of_forty_letters")
    report = Report("r", records=(record(verdict, name=spelling, changed=True),))
    for text in (shown(report, width=width), shown(report, width=width, all=True)):
        assert spelling in text
    assert verdict.reason in shown(report, width=width, all=True)


def test_terminal_shows_everything(report: Report) -> None:
    table = Table("Step time", ["form", "ms"], [["ours", 3.25]], note="median of 5")
    assert shown(report.with_table(table), all=True) == (
        "─────────────────────────────────────────── two reduces ────────────────────────────────────────────\n"
        "mesh            dp=2\n"
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
    text = shown(report.with_table(Table("[b]t", ["[b]c"], [["[b]x"]], note="[b]n")), all=True)
    for part in [
        "[red]r[/red]",
        "[i]k            [i]v",
        "[bold]f32[4][/bold]",
        "[/red]",
        "[b]t",
        "[b]c",
        "[b]x",
        "[b]n",
    ]:
        assert part in text
