"""What a report says about programs that real passes changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from crossfade.errors import CrossfadeError
from crossfade.graph.passes import Outcome, Verdict
from crossfade.report.report import PassVerdict, Report, Table, VerdictGroup
from tests.report.small_reports import Outline, record, written


def test_of_counts_both_programs_and_takes_the_history_of_the_second(report: Report) -> None:
    assert report.collectives_before == {"all_reduce": (2, 48)}
    assert report.collectives_after == {"all_reduce": (1, 16)}
    assert (report.nodes_before, report.nodes_after) == (6, 5)
    assert [record.counts for record in report.records] == [{"removed": 1}, {"removed": 0}]
    assert report.program.splitlines()[2] == 'used: f32[4] = c10d.all_reduce(a, "sum", "dp")'
    assert "unused" not in report.program


def test_summary_is_one_paragraph(report: Report) -> None:
    assert str(report) == (
        "two reduces: 2 collectives (48 B) became 1 (16 B), 6 nodes became 5. "
        "2 passes took 50.0 ms, 1 changed the program. 3 verdicts: 1 removed, 2 left alone."
    )


def test_summary_tells_the_time_of_verifying_and_printing_apart() -> None:
    report = Report("r", records=(record(looking=0.25), record(looking=0.5)))
    assert "2 passes took 2.00 ms and 750.0 ms to verify and print, 0 changed the program." in report.summary


def test_summary_and_page_count_the_passes_that_changed_something(tmp_path: Path) -> None:
    report = Report("r", records=(record(changed=True), record(changed=True), record()))
    assert "3 passes took 3.00 ms, 2 changed the program." in report.summary
    assert "2 of 3 changed the program" in Outline(written(report, tmp_path)).text


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
