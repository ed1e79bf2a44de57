"""What the first screen answers: reference lines, reasons, advice in order of milliseconds, passes that fired."""

from __future__ import annotations

from crossfade.cost.timeline import Computed, Timeline, Travelled
from crossfade.graph.passes import Outcome, Verdict
from crossfade.report.answers import Answers, bounds_of
from crossfade.report.rank_timelines import RankTimeline
from crossfade.report.report import Report
from tests.report.small_reports import record
from tests.report.small_timelines import MEASURED, PREDICTED


def sent(name: str, launch: float, start: float, finish: float, needed: float | None, exposed: float) -> Travelled:
    return Travelled(name, "all_reduce", "dp", 2048, launch, start, finish, needed, exposed)


def test_reference_lines() -> None:
    # Three seconds, one of them standing still; the link carries 1.5.
    bounds = bounds_of(MEASURED)
    assert (bounds.step, bounds.overlapped, bounds.alone) == (3.0, 2.0, 2.0)


def test_perfect_overlap_is_never_less_than_what_the_link_carries() -> None:
    timeline = Timeline((Computed("mm", 0.0, 1.0),), (sent("r", 0.0, 0.0, 5.0, 1.0, 4.0),), 5.0)
    assert bounds_of(timeline).overlapped == 5.0


def test_without_communication_neither_launches_nor_stretching_count() -> None:
    spans = Computed("r", 0.0, 0.5, 0.5), Computed("mm", 0.5, 3.0, 1.0)
    timeline = Timeline(spans, (sent("r", 0.5, 0.5, 2.0, 2.5, 0.0),), 3.0)
    assert bounds_of(timeline).alone == 1.0
    assert (timeline.on_core, timeline.stretched) == (1.5, 1.5)


def test_why_something_is_exposed() -> None:
    spans = (
        sent("first", 0.0, 0.0, 2.0, 1.0, 1.0),
        sent("queued", 0.5, 2.0, 3.0, 2.5, 0.5),
        sent("last", 3.0, 3.0, 3.25, None, 0.25),
    )
    answers = Answers(Report("r", measured=Timeline((), spans, 4.0)))
    assert [(exposure.collective.name, exposure.why) for exposure in answers.exposures] == [
        ("first", "needed 1.00 s after its launch; its way takes 2.00 s"),
        ("queued", "its link was busy with first for 1.50 s; its way takes 1.00 s"),
        ("last", "nothing is left to compute while it is under way"),
    ]


def late_rank() -> Report:
    early = Timeline((Computed("r", 0.0, 1.0),), (sent("r", 1.0, 1.0, 4.5, 2.0, 2.5),), 6.0, "measured")
    late = Timeline((Computed("r", 0.0, 3.5),), (sent("r", 3.5, 3.5, 4.5, 4.5, 0.0),), 6.0, "measured")
    members = {"dp": (0, 1)}
    return Report(
        "r", measured=early, ranks=[RankTimeline(0, early, groups=members), RankTimeline(1, late, groups=members)]
    )


def test_a_late_rank_is_named() -> None:
    answers = Answers(late_rank())
    assert answers.exposures[0].why == "rank 1 launched it last: 1.50 s of standing still are for that"
    assert [(advice.seconds, advice.what) for advice in answers.advice] == [
        (1.5, "this rank stands still for rank 1, which launches last"),
        (1.0, "collectives are ordered without knowing what they cost"),
    ]


def test_advice_is_in_the_order_of_what_it_gives() -> None:
    verdict = Verdict("r", Outcome.LEFT, "its bucket is full", remedy="a larger cap_mb")
    spans = Computed("mm", 0.0, 1.0, 0.9), Computed("add", 2.0, 3.0, 1.0)
    report = Report("r", (record(verdict),), measured=Timeline(spans, MEASURED.communication, 3.0), predicted=PREDICTED)
    assert [(round(advice.seconds, 3), advice.how) for advice in Answers(report).advice] == [
        (1.0, "a larger cap_mb"),
        (0.1, "give each rank a core more than it computes with: fewer ranks on the host, or a lower OMP_NUM_THREADS"),
    ]


def test_what_is_measured_answers_before_what_is_predicted() -> None:
    assert Answers(Report("r", predicted=PREDICTED)).how_known == "predicted"
    assert Answers(Report("r", predicted=PREDICTED, measured=MEASURED)).timeline == MEASURED


def test_a_report_without_a_timeline_answers_what_it_can() -> None:
    answers = Answers(Report("r", (record(changed=True),)))
    assert (answers.bounds, answers.exposures, answers.advice) == (None, (), ())
    assert answers.fired[0].did == "changed the program"


def test_passes_say_whether_they_fired() -> None:
    left = record(Verdict("a", Outcome.LEFT, "too small"), Verdict("b", Outcome.LEFT, "too small"))
    fired = Answers(Report("r", (left, record()))).fired
    assert [(view.did, view.left) for view in fired] == [
        ("left 2 candidates: too small", True),
        ("found nothing to do", False),
    ]
