"""Where launches and waits go: gathers when they are due, the rest at once unless something urgent would wait."""

from __future__ import annotations

import pytest

from crossfade.schedule.headroom import Headroom
from crossfade.schedule.place import Placing, lane_of
from crossfade.schedule.problem import SchedulingProblem
from tests.schedule.scheduled_programs import CHAIN, QUEUED
from tests.schedule.toy_costs import problem_of_text, spelled

GATHER_AND_SUM = """
    p: f32[64] = parameter("p")
    x: f32[128] = input("x")
    s: f32[128] = c10d.all_reduce(x, "sum", "dp")
    d: f32[128] = c10d.wait_tensor(s)
    g: f32[128] = c10d.all_gather_into_tensor(p, 2, "dp")
    w: f32[128] = c10d.wait_tensor(g)
    a: f32[128] = aten.exp(x)
    b: f32[128] = aten.exp(a)
    c: f32[128] = aten.mul.Tensor(b, w)
    return output("c", c), output("d", d)
"""


def placed(problem: SchedulingProblem) -> str:
    return spelled(problem, Placing(problem, lane_of(problem, problem.movable)).run())


@pytest.mark.parametrize(
    ("travel", "expected"),
    [
        (4.0, "s a g b w c d"),  # needed after 8 seconds, safe with 5: due once 3 are done
        (4.8, "s a g b w c d"),  # the next node ends after 2 seconds, which is just not too late
        (4.9, "g s a b w c d"),
    ],
)
def test_a_gather_is_launched_when_after_the_next_node_would_be_too_late(travel: float, expected: str) -> None:
    problem = problem_of_text(GATHER_AND_SUM, {"g": travel, "s": 1, "a": 2, "b": 6, "c": 4})
    assert placed(problem) == expected


@pytest.mark.parametrize(("travel", "expected"), [(1, "s a g b w c d"), (6, "g s a b w c d")])
def test_a_sum_goes_at_once_unless_a_gather_would_be_late_behind_it(travel: float, expected: str) -> None:
    """The gather is not due before the first node in either case: its latest start is after 5.5 and 2 seconds."""
    problem = problem_of_text(GATHER_AND_SUM, {"g": 2, "s": travel, "a": 2, "b": 6, "c": 4})
    assert placed(problem) == expected


def test_a_busy_link_is_kept_for_what_is_more_urgent_and_about_to_be_ready() -> None:
    seconds = {"g0": 1, "s0": 4, "g1": 1, "s1": 4, "n": 1, "s2": 1}
    assert placed(problem_of_text(QUEUED, {**seconds, "c": 6})) == "g0 s0 g1 n s2 s1 w2 c w0 w1"
    assert placed(problem_of_text(QUEUED, {**seconds, "c": 0})) == "g0 s0 g1 s1 n s2 w2 c w0 w1"


def test_without_prefetch_or_headroom_a_gather_goes_just_before_its_use_and_is_held_back() -> None:
    problem = problem_of_text(GATHER_AND_SUM, {"g": 4, "s": 1, "a": 2, "b": 6, "c": 4})
    lane = lane_of(problem, problem.movable)
    assert spelled(problem, Placing(problem, lane, prefetch=False).run()) == "s a b g w c d"
    placing = Placing(problem, lane, headroom=Headroom([0] * (len(lane) + 1), limit=0))
    assert spelled(problem, placing.run()) == "s a b g w c d"
    assert [problem.nodes[start].name for start in placing.held_back] == ["g"]


def test_a_launch_that_needs_another_collective_stays_in_the_lane() -> None:
    problem = problem_of_text(CHAIN, {"s": 1, "t": 1, "y": 1, "a": 2, "b": 2, "c": 2})
    assert spelled(problem, lane_of(problem, problem.movable)) == "t y a b c"
