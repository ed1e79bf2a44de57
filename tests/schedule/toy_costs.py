"""Small programs with costs by name, and what is asked of their schedules."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from crossfade.cost.timeline import Costs, simulate
from crossfade.graph.program import Program
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify
from crossfade.schedule.plan import Schedule, apply_schedule, plan_schedule
from crossfade.schedule.problem import SchedulingProblem, scheduling_problem

GROUPS = {"dp": 2, "tp": 2}


def program_of(text: str) -> Program:
    return parse(textwrap.dedent(text), groups=GROUPS)


def costs_of(program: Program, seconds: dict[str, float], slows: dict[str, float] | None = None) -> Costs:
    """Seconds by node name; those of a collective's start are its travel, all others computation."""
    nodes = {node.name: node for node in program.graph.nodes}
    starts = {name for name in seconds if "c10d" in str(nodes[name].target)}
    compute = {nodes[name]: value for name, value in seconds.items() if name not in starts}
    return Costs(compute, {nodes[name]: seconds[name] for name in starts}, slows or {})


def scheduled(text: str, seconds: dict[str, float], memory_limit: int | None = None) -> tuple[Schedule, str]:
    """The schedule of a program, and the program's nodes after it, without inputs and output."""
    program = program_of(text)
    costs = costs_of(program, seconds)
    schedule = plan_schedule(program, costs, memory_limit)
    apply_schedule(program, schedule)
    verify(program)
    timeline = simulate(program, costs)
    assert abs(timeline.seconds - schedule.seconds) < 1e-9
    assert {span.name: span.exposed for span in timeline.communication} == {
        outlook.name: outlook.exposed for outlook in schedule.collectives
    }
    body = render(program).splitlines()[len(program.inputs) : -1]
    return schedule, " ".join(line.partition(":")[0] for line in body)


def problem_of_text(text: str, seconds: dict[str, float]) -> SchedulingProblem:
    program = program_of(text)
    return scheduling_problem(program, costs_of(program, seconds))


def spelled(problem: SchedulingProblem, order: Sequence[int]) -> str:
    """The names of an order's nodes."""
    return " ".join(problem.nodes[node].name for node in order)
