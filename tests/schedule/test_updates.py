"""Updates behind the reads of what they replace: no order takes them out of the memory they could be written to."""

from __future__ import annotations

import textwrap

import pytest
from torch import fx

from crossfade.cost.timeline import Costs
from crossfade.finish.update_in_place import UpdateInPlace
from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse
from crossfade.schedule.plan import apply_schedule, plan_schedule
from crossfade.schedule.updates import reads_before_updates

DECAY = """
    x: f32[4] = input("x")
    p: f32[4] = parameter("p")
    start: f32[4] = c10d.all_reduce(x, "sum", "dp")
    done: f32[4] = c10d.wait_tensor(start)
    a: f32[4] = aten.mul.Tensor(done, p)
    decayed: f32[4] = aten.mul.Tensor(p, 0.5)
    free: f32[4] = aten.exp(x)
    new: f32[4] = aten.add.Tensor(decayed, a)
    return output("free", free), update("p", new)
    """


def program_of(lines: str) -> Program:
    return parse(textwrap.dedent(lines), groups={"dp": 2})


def named(program: Program) -> dict[str, fx.Node]:
    return {node.name: node for node in program.graph.nodes}


def test_a_decay_is_no_filling_for_communication_while_its_parameter_is_read() -> None:
    program = program_of(DECAY)
    node = named(program)
    costs = Costs({node[name]: 1e-3 for name in ("a", "decayed", "free", "new")}, {node["start"]: 5e-3}, {})
    schedule = plan_schedule(program, costs)
    assert apply_schedule(program, schedule)
    order = [node.name for node in program.graph.nodes]
    assert order.index("free") < order.index("done") < order.index("a") < order.index("decayed")
    lowered = named(run_passes(program, [UpdateInPlace()]))
    assert [str(lowered[name].target) for name in ("decayed", "new")] == ["aten.mul_.Tensor", "aten.add_.Tensor"]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (DECAY, {"decayed": ["a"], "new": []}),
        (DECAY.replace("aten.exp(x)", "aten.exp(decayed)"), {"decayed": ["a"], "new": ["free"]}),
        (
            """
            p: f32[4] = parameter("p")
            g: f32[8] = c10d.all_gather_into_tensor(p, 2, "dp")
            w: f32[8] = c10d.wait_tensor(g)
            decayed: f32[4] = aten.mul.Tensor(p, 0.5)
            return output("w", w), update("p", decayed)
            """,
            {"decayed": ["g", "w"]},
        ),
        (
            """
            p: f32[4] = parameter("p")
            q: f32[4] = parameter("q")
            g: (f32[8], f32[8]) = c10d.all_gather_into_tensor_coalesced([p, q], 2, "dp")
            first: f32[8] = g[0]
            second: f32[8] = g[1]
            u: f32[8] = c10d.wait_tensor(first)
            v: f32[8] = c10d.wait_tensor(second)
            decayed: f32[4] = aten.mul.Tensor(p, 0.5)
            return output("u", u), output("v", v), update("p", decayed)
            """,
            {"decayed": ["g", "v"]},
        ),
        (
            """
            p: f32[4] = parameter("p")
            decayed: f32[4] = aten.mul.Tensor(p, 0.5)
            late: f32[4] = aten.exp(p)
            return output("late", late), update("p", decayed)
            """,
            {"decayed": []},
        ),
        (
            """
            p: f32[4] = parameter("p")
            read: f32[4] = aten.exp(p)
            new: f32[4] = aten.cat([read], 0)
            return update("p", new)
            """,
            {},
        ),
    ],
    ids=["read", "read on the way", "gathered", "gathered with others", "read later", "not in place"],
)
def test_what_an_update_stays_behind(lines: str, expected: dict[str, list[str]]) -> None:
    found = reads_before_updates(program_of(lines))
    assert {node.name: [reader.name for reader in before] for node, before in found.items()} == expected
