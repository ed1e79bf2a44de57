"""Timelines computed by hand: lanes, links, slow-downs, exposure."""

from __future__ import annotations

import textwrap

import pytest

from crossfade.cost.timeline import Costs, Timeline, simulate
from crossfade.graph.text import parse

TWO_GROUPS = """
    x: f32[4] = input("x")
    a: f32[4] = c10d.all_reduce(x, "sum", "dp")
    b: f32[4] = c10d.all_reduce(x, "sum", "tp")
    c: f32[4] = c10d.all_reduce(x, "sum", "dp")
    y: f32[4] = aten.neg(x)
    aw: f32[4] = c10d.wait_tensor(a)
    bw: f32[4] = c10d.wait_tensor(b)
    cw: f32[4] = c10d.wait_tensor(c)
    return output("y", y), output("a", aw), output("b", bw), output("c", cw)
    """


def run(
    text: str, compute: dict[str, float], travel: dict[str, float], slows: dict[str, float] | None = None
) -> Timeline:
    program = parse(textwrap.dedent(text), groups={"dp": 2, "tp": 2})
    node = {node.name: node for node in program.graph.nodes}
    costs = Costs({node[k]: v for k, v in compute.items()}, {node[k]: v for k, v in travel.items()}, slows or {})
    return simulate(program, costs)


def spans(timeline: Timeline) -> dict[str, tuple[float, float, float]]:
    return {span.name: (span.start, span.finish, span.exposed) for span in timeline.communication}


def test_groups_travel_side_by_side_and_a_group_in_turn() -> None:
    found = run(TWO_GROUPS, {"y": 1.0}, {"a": 2.0, "b": 5.0, "c": 2.0})
    assert spans(found) == {"a": (0.0, 2.0, 1.0), "b": (0.0, 5.0, 3.0), "c": (2.0, 4.0, 0.0)}
    assert (found.seconds, found.exposed, found.busy, found.travelling) == (5.0, 4.0, 1.0, 9.0)


def test_launching_keeps_computation_busy_before_it_travels() -> None:
    found = run(TWO_GROUPS, {"a": 0.5, "b": 0.25, "y": 1.0}, {"a": 1.0, "b": 1.0, "c": 1.0})
    assert spans(found) == {"a": (0.5, 1.5, 0.0), "b": (0.75, 1.75, 0.0), "c": (1.5, 2.5, 0.75)}
    assert [(span.name, span.start, span.finish) for span in found.computation] == [
        ("a", 0.0, 0.5),
        ("b", 0.5, 0.75),
        ("y", 0.75, 1.75),
    ]


def test_computation_is_slower_by_all_that_travels_and_only_meanwhile() -> None:
    # Until 2 s two travel (2 times as long: 1 s of work), until 4 s one (1.5 times: 4/3 s), then none (2/3 s).
    found = run(TWO_GROUPS, {"y": 3.0}, {"a": 2.0, "b": 4.0, "c": 0.0}, {"dp": 0.5, "tp": 0.5})
    assert found.computation[0].finish == pytest.approx(4 + 2 / 3)


def test_work_that_ends_while_something_travels_is_slower_throughout() -> None:
    found = run(TWO_GROUPS, {"y": 1.0}, {"a": 9.0, "b": 0.0, "c": 0.0}, {"dp": 0.25})
    assert found.computation[0].finish == 1.25


def test_a_group_that_slows_nothing_slows_nothing() -> None:
    assert run(TWO_GROUPS, {"y": 1.0}, {"a": 9.0, "b": 9.0, "c": 0.0}, {"tp": 0.0}).computation[0].finish == 1.0


def test_the_end_stands_still_for_what_nobody_waited_for_once() -> None:
    found = run(
        """
        x: f32[4] = input("x")
        a: f32[4] = c10d.all_reduce(x, "sum", "dp")
        b: f32[4] = c10d.all_reduce(x, "sum", "tp")
        y: f32[4] = aten.neg(x)
        return output("y", y)
        """,
        {"y": 1.0},
        {"a": 3.0, "b": 5.0},
    )
    assert spans(found) == {"a": (0.0, 3.0, 2.0), "b": (0.0, 5.0, 2.0)}
    assert (found.seconds, found.busy + found.exposed) == (5.0, 5.0)
    assert [span.needed for span in found.communication] == [None, None]


def test_elements_of_a_coalesced_collective_wait_for_all_of_it_once() -> None:
    found = run(
        """
        x: f32[4] = input("x")
        a: (f32[4], f32[4]) = c10d.all_reduce_coalesced([x, x], "sum", "dp")
        p: f32[4] = a[0]
        q: f32[4] = a[1]
        pw: f32[4] = c10d.wait_tensor(p)
        y: f32[4] = aten.neg(pw)
        qw: f32[4] = c10d.wait_tensor(q)
        return output("y", y), output("q", qw)
        """,
        {"y": 1.0},
        {"a": 3.0},
    )
    assert spans(found) == {"a": (0.0, 3.0, 3.0)}
    assert (found.seconds, found.communication[0].bytes, found.communication[0].needed) == (4.0, 32, 0.0)


def test_waiting_for_an_ordinary_tensor_costs_nothing() -> None:
    found = run(
        """
        x: f32[4] = input("x")
        w: f32[4] = c10d.wait_tensor(x)
        return output("w", w)
        """,
        {},
        {},
    )
    assert (found.seconds, found.communication) == (0.0, ())
