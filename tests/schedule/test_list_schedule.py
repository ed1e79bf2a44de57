"""List schedules from the front and from the end: exact orders."""

from __future__ import annotations

import pytest

from crossfade.schedule.list_schedule import schedule_backward, schedule_forward
from tests.schedule.scheduled_programs import CHAIN, DDP, DDP_SECONDS, URGENT
from tests.schedule.toy_costs import problem_of_text, spelled

CHAIN_SECONDS = {"s": 1, "t": 1, "y": 1, "a": 2, "b": 2, "c": 2}


@pytest.mark.parametrize(
    ("text", "seconds", "expected"),
    [
        (CHAIN, CHAIN_SECONDS, "s a ws v t b wt y c"),
        (DDP, DDP_SECONDS, "a1 a2 d1 g2 s2 g1 r2 s1 u2 r1 u1"),
    ],
    ids=["chain", "ddp"],
)
def test_forward_runs_what_is_ready_while_others_travel(text: str, seconds: dict[str, float], expected: str) -> None:
    problem = problem_of_text(text, seconds)
    assert spelled(problem, schedule_forward(problem, range(len(problem.nodes)))) == expected


@pytest.mark.parametrize(
    ("text", "seconds", "expected"),
    [
        (CHAIN, CHAIN_SECONDS, "s ws v t wt y a b c"),
        (DDP, DDP_SECONDS, "a1 a2 g2 s2 d1 g1 s1 r2 r1 u1 u2"),
    ],
    ids=["chain", "ddp"],
)
def test_backward_runs_everything_as_late_as_it_may(text: str, seconds: dict[str, float], expected: str) -> None:
    problem = problem_of_text(text, seconds)
    assert spelled(problem, schedule_backward(problem, range(len(problem.nodes)))) == expected


def test_the_smaller_rank_goes_first_on_the_lane_and_on_the_link() -> None:
    problem = problem_of_text(URGENT, {"g1": 1, "g2": 1, "n": 1, "s1": 5, "s2": 5, "s3": 5, "c": 1})
    forward = schedule_forward(problem, range(len(problem.nodes)))
    turned = schedule_forward(problem, [-node for node in range(len(problem.nodes))])
    assert spelled(problem, forward).split()[:4] == ["g1", "s1", "g2", "n"]
    assert spelled(problem, turned).split()[:4] == ["n", "s3", "g2", "g1"]
    assert sorted(forward) == sorted(turned) == problem.movable
