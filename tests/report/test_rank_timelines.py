"""Ranks on one clock: clocks that differ are corrected, who waited for whom, and times that add up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import crossfade as cf
from crossfade import Ranks
from crossfade.cost.timeline import Computed, Timeline, Travelled
from crossfade.report.rank_timelines import RankComparison, RankTimeline
from crossfade.report.report import Report

PAIR = {"dp": (0, 1)}


def run(launch: float, needed: float, finish: float, end: float, group: str = "dp") -> Timeline:
    """Computes, launches one collective, computes until it is needed, waits, computes until the end."""
    exposed = max(0.0, finish - needed)
    sent = Travelled("r", "all_reduce", group, 2048, launch, launch, finish, needed, exposed)
    spans = Computed("r", 0.0, launch), Computed("mm", launch, needed), Computed("add", needed + exposed, end)
    return Timeline(spans, (sent,), end, "measured")


# Rank 1 begins a second late and launches 2.5 s after rank 0, which needs the result at 2 and has it at 4.5.
EARLY, LATE = run(1.0, 2.0, 4.5, 6.0), run(2.5, 3.5, 3.5, 5.0)
SKEWED = RankTimeline(0, EARLY, 100.0, "a", PAIR), RankTimeline(1, LATE, 101.0, "a", PAIR)


def test_a_meeting_says_who_stood_still_for_whom() -> None:
    (met,) = RankComparison.of(SKEWED).meetings
    assert met.launches == {0: 1.0, 1: 3.5}
    assert (met.skew, met.last) == (2.5, 1)
    assert met.waited == {0: 1.5, 1: 0.0}  # from when it was needed until rank 1 launched; the last second is its way
    assert met.exposed == {0: 2.5, 1: 0.0}


def test_the_time_of_each_rank_adds_up() -> None:
    compared = RankComparison.of(SKEWED)
    assert compared.seconds == 6.0
    for sums in compared.sums:
        assert sums.computing + sums.exposed + sums.idle == pytest.approx(compared.seconds)
    first, second = compared.sums
    assert (first.exposed, first.idle, second.idle) == (2.5, 0.0, 1.0)
    assert compared.slowest is not None
    assert (compared.slowest.rank, compared.slowest.waited_for) == (1, 1.5)


@pytest.mark.parametrize("wrong_by", [-50.0, -2.0, 0.0, 0.5, 3600.0])
def test_collectives_correct_clocks_that_differ(wrong_by: float) -> None:
    """No result is there before all have launched: that bounds where rank 1 can have begun."""
    other = RankTimeline(1, LATE, 101.0 + wrong_by, "b", PAIR)
    starts = RankComparison.of([SKEWED[0], other]).starts
    begun = starts[1] - starts[0]
    assert begun + 2.5 <= 4.5  # rank 1 launched before rank 0 had the result
    assert begun + 3.5 >= 1.0  # and had it after rank 0 had launched
    if -2.0 <= wrong_by <= 0.5:
        assert begun == pytest.approx(min(max(1.0 + wrong_by, -2.5), 2.0))


def test_groups_of_the_same_name_with_other_members_do_not_meet() -> None:
    ranks = [RankTimeline(rank, EARLY, 0.0, "a", {"dp": (rank % 2, rank % 2 + 2)}) for rank in range(4)]
    met = RankComparison.of(ranks).meetings
    assert sorted(sorted(meeting.launches) for meeting in met) == [[0, 2], [1, 3]]


def test_a_rank_that_is_alone_meets_nobody() -> None:
    compared = RankComparison.of([RankTimeline(0, EARLY, 0.0, "a", {"dp": (0,)})])
    assert compared.meetings == ()
    assert compared.slowest is None


def test_json_keeps_the_ranks() -> None:
    report = Report("r", measured=EARLY, ranks=SKEWED, alive=[("mm", 8)], modules={"mm": "forward head"})
    again = Report.from_json(report.to_json())
    assert again == report
    assert again.ranks[1].groups == PAIR


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def profiled() -> tuple[int, Timeline, Report]:
    torch.manual_seed(0)
    model = Uneven()
    step = cf.compile_step(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), {"dp": 2})
    batch = torch.randn(8, 64), torch.randn(8, 64)
    step(*batch)
    timeline = step.profile(*batch)
    return dist.get_rank(), timeline, step.report


def test_a_profiled_step_has_all_ranks_on_the_first(ranks: Callable[[int], Ranks]) -> None:
    (_, first, report), (_, second, other) = ranks(2).run(profiled)
    assert [rank.rank for rank in report.ranks] == [0, 1]
    assert [rank.timeline for rank in report.ranks] == [first, second]
    assert [rank.rank for rank in other.ranks] == [1]
    assert (report.measured, other.measured) == (first, second)
    compared = report.compared_ranks
    names = [sent.name for sent in first.communication]
    assert len(names) > 0
    assert sorted(met.name for met in compared.meetings) == sorted(names)
    for sums, start in zip(compared.sums, compared.starts, strict=True):
        assert 0.0 <= start < compared.seconds < start + 60
        assert sums.stretched is not None
        parts = sums.computing + sums.stretched + sums.exposed + sums.idle
        assert parts == pytest.approx(compared.seconds, rel=0.02)
    assert {"forward blocks.0", "backward blocks.2"} <= set(report.modules.values())
    assert report.memory and report.alive


def test_the_way_of_a_collective_is_that_of_the_rank_which_came_last() -> None:
    assert RankComparison.of(SKEWED).ways == {"r": 1.0}
    assert RankComparison.of(SKEWED[:1]).ways == {}
