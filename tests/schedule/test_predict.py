"""What an order would do, against numbers counted by hand."""

from __future__ import annotations

import pytest

from crossfade.cost.timeline import simulate
from crossfade.schedule.predict import PredictedTravel, live_bytes, peak_of, predict
from crossfade.schedule.problem import scheduling_problem
from tests.schedule.scheduled_programs import CHAIN, SHARED_LINK, SHARED_LINK_SECONDS
from tests.schedule.toy_costs import costs_of, problem_of_text, program_of

NOBODY_WAITS = """
    x: f32[4] = input("x")
    s: f32[4] = c10d.all_reduce(x, "sum", "dp")
    t: f32[4] = c10d.all_reduce(x, "sum", "dp")
    u: f32[4] = c10d.all_reduce(x, "sum", "tp")
    a: f32[4] = aten.exp(x)
    w: f32[4] = c10d.wait_tensor(s)
    b: f32[4] = aten.exp(w)
    return output("a", a), output("b", b)
"""


def test_links_carry_in_turn_and_the_end_waits_for_what_nobody_waited_for() -> None:
    problem = problem_of_text(NOBODY_WAITS, {"s": 3, "t": 3, "u": 5, "a": 1, "b": 1})
    found = predict(problem, problem.movable)
    assert {problem.nodes[start].name: travel for start, travel in found.travels.items()} == {
        "s": PredictedTravel(launch=0, start=0, finish=3, needed=1, exposed=2),
        "t": PredictedTravel(launch=0, start=3, finish=6, needed=4, exposed=1),
        "u": PredictedTravel(launch=0, start=0, finish=5, needed=4, exposed=1),
    }
    assert (found.seconds, found.exposed) == (6, 4)


@pytest.mark.parametrize("slows", [{}, {"dp": 0.5}, {"dp": 0.5, "tp": 1.0}], ids=str)
@pytest.mark.parametrize("text", [NOBODY_WAITS, CHAIN])
def test_it_is_what_the_simulation_of_the_program_says(text: str, slows: dict[str, float]) -> None:
    program = program_of(text)
    costs = costs_of(program, {"s": 3, "t": 2, "a": 4, "b": 1}, slows)
    problem = scheduling_problem(program, costs)
    found, timeline = predict(problem, problem.movable), simulate(program, costs)
    assert (found.seconds, found.exposed) == (timeline.seconds, timeline.exposed)
    times = {span.name: (span.launch, span.start, span.finish, span.exposed) for span in timeline.communication}
    assert times == {
        problem.nodes[start].name: (travel.launch, travel.start, travel.finish, travel.exposed)
        for start, travel in found.travels.items()
    }


def test_live_bytes_begin_with_a_value_and_end_after_its_last_use() -> None:
    problem = problem_of_text(SHARED_LINK, SHARED_LINK_SECONDS)
    live = dict(
        zip((problem.nodes[node].name for node in problem.movable), live_bytes(problem, problem.movable), strict=True)
    )
    assert live["h2"] == 512  # gathered
    assert live["b2"] == 2 * 512  # read and made
    assert live["r2"] == 512 + 256  # the gathered value is gone
    assert peak_of(problem, problem.movable) == max(live.values())
