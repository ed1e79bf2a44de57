"""A program as a scheduling problem: flights, what follows a wait, the longest ways, and what no order can beat."""

from __future__ import annotations

from crossfade.schedule.problem import Flight, SchedulingProblem
from tests.schedule.scheduled_programs import COALESCED, DDP, DDP_SECONDS, SHARED_LINK, SHARED_LINK_SECONDS
from tests.schedule.toy_costs import problem_of_text


def by_name(problem: SchedulingProblem, values: list[float]) -> dict[str, float]:
    return {node.name: value for node, value in zip(problem.nodes, values, strict=True)}


def test_gathers_grow_memory_and_scatters_let_go_of_it() -> None:
    problem = problem_of_text(SHARED_LINK, SHARED_LINK_SECONDS)
    flights = {problem.nodes[start].name: flight for start, flight in problem.flights.items()}
    assert {name: (flight.grows, flight.shrinks, flight.made) for name, flight in flights.items()} == {
        "h2": (True, False, 512),
        "r2": (False, True, 256),
        "h1": (True, False, 512),
        "r1": (False, True, 256),
    }
    assert problem.links == ["dp"]


def test_a_coalesced_collective_is_a_flight_with_elements() -> None:
    problem = problem_of_text(COALESCED, {"both": 2, "a": 1, "b": 1, "c": 3, "y": 1})
    assert problem.flights == {3: Flight(3, (6, 7), (4, 5), 0, 2, grows=False, shrinks=False, made=512)}
    assert [start for start in problem.flight_at if start != -1] == [3, 3]
    assert not any(problem.loose)  # the elements belong to the start, not to a wait


def test_only_what_takes_a_waits_result_apart_follows_it() -> None:
    problem = problem_of_text(
        """
        x: f32[64] = input("x")
        of_input: f32[8, 8] = aten.view(x, [8, 8])
        s: f32[8, 8] = c10d.all_reduce(of_input, "sum", "dp")
        w: f32[8, 8] = c10d.wait_tensor(s)
        view: f32[64] = aten.view(w, [64])
        half: f32[32] = aten.slice.Tensor(view, 0, 0, 32)
        computed: f32[64] = aten.neg(view)
        of_computed: f32[8, 8] = aten.view(computed, [8, 8])
        return output("half", half), output("y", of_computed)
        """,
        {"s": 1, "computed": 1},
    )
    loose = by_name(problem, problem.loose)
    assert [name for name, follows in loose.items() if follows] == ["view", "half"]


def test_the_longest_ways_go_over_computation_and_travel() -> None:
    problem = problem_of_text(DDP, DDP_SECONDS)
    heads, tails = by_name(problem, problem.heads), by_name(problem, problem.tails)
    assert (heads["a2"], heads["g2"], heads["r2"], heads["u1"]) == (4, 6, 6 + 3, 2 + 2 + 2 + 2 + 3 + 1)
    assert (tails["u2"], tails["s2"], tails["g2"], tails["a1"]) == (1, 3 + 1, 2 + 4, 2 + 2 + 2 + 2 + 3 + 1)


def test_no_order_beats_a_link_that_carries_all_after_the_first_is_ready() -> None:
    """The first all-reduce is ready after 6 seconds, both travel for 3, and an update follows."""
    problem = problem_of_text(DDP, DDP_SECONDS)
    assert problem.busy == 12
    assert problem.least_seconds == 6 + 3 + 3 + 1
