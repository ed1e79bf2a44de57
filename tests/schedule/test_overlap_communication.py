"""The pass: a machine's costs, verdicts, options."""

from __future__ import annotations

from dataclasses import replace

import pytest

from crossfade.cost.keys import key_of
from crossfade.cost.machine import Fabric, Link, Machine
from crossfade.errors import MemoryLimitError
from crossfade.graph.collectives import Kind
from crossfade.graph.passes import Outcome, run_passes
from crossfade.graph.program import MADE_FOR
from crossfade.graph.text import render
from crossfade.schedule.overlap_communication import OverlapCommunication
from crossfade.schedule.plan import AT_ONCE, BUSY, HIDDEN, MEMORY
from tests.schedule.toy_costs import program_of

TOY = Machine(
    "toy", {"*": Fabric(dict.fromkeys(Kind, Link(latency=1.0, bandwidth=1e30)))}, {"float32": 1e30}, 1e30, 1.0
)
"""Every collective and every operator takes a second, whatever its size."""

SUMS = """
    x: f32[64] = input("x")
    a: f32[64] = aten.exp(x)
    s: f32[64] = c10d.all_reduce(a, "sum", "dp")
    w: f32[64] = c10d.wait_tensor(s)
    b: f32[64] = aten.exp(w)
    c: f32[64] = aten.neg(x)
    t: f32[64] = c10d.all_reduce(b, "sum", "dp")
    v: f32[64] = c10d.wait_tensor(t)
    return output("c", c), output("v", v)
"""

GATHERS = """
    p: f32[64] = parameter("p")
    q: f32[64] = parameter("q")
    g: f32[128] = c10d.all_gather_into_tensor(p, 2, "dp")
    w: f32[128] = c10d.wait_tensor(g)
    a: f32[] = aten.sum(w)
    h: f32[128] = c10d.all_gather_into_tensor(q, 2, "dp")
    v: f32[128] = c10d.wait_tensor(h)
    c: f32[] = aten.sum(v)
    return output("a", a), output("c", c)
"""


def test_verdicts_say_what_is_hidden_and_why_the_rest_is_not() -> None:
    done = run_passes(program_of(SUMS), [OverlapCommunication(TOY)])
    record = done.history[0]
    assert [line.partition(":")[0] for line in render(done).splitlines()[1:-1]] == ["a", "s", "w", "b", "t", "c", "v"]
    assert record.counts == {"hidden": 1, "exposed": 1}
    exposed, hidden = record.verdicts
    assert (hidden.subject, hidden.outcome, hidden.reason) == ("t", Outcome.HIDDEN, HIDDEN)
    assert (hidden.detail, hidden.bytes) == ("travels 1000.000 ms", 256)
    assert (exposed.subject, exposed.outcome, exposed.reason) == ("s", Outcome.EXPOSED, AT_ONCE)
    assert exposed.detail == "travels 1000.000 ms, exposed 1000.000 ms"


def test_O2_a_memory_limit_is_told_as_the_reason() -> None:
    free, bound = (run_passes(program_of(GATHERS), [OverlapCommunication(TOY, limit)]) for limit in (None, 900))
    assert [verdict.reason for verdict in free.history[0].verdicts] == [AT_ONCE, HIDDEN]
    held = bound.history[0].verdicts[1]
    assert (held.reason, held.remedy) == (MEMORY, "raise memory_limit")


def test_O2_a_limit_that_no_order_keeps_is_refused() -> None:
    with pytest.raises(MemoryLimitError, match=r"the program's live bytes reach 520.*at least 520"):
        run_passes(program_of(GATHERS), [OverlapCommunication(TOY, memory_limit=519)])


def test_O4_measured_seconds_decide() -> None:
    """A small sum hides half of a gather: measured to take longer, all of it."""
    program = program_of(GATHERS)
    summing = next(node for node in program.graph.nodes if node.name == "a")
    half = OverlapCommunication(replace(TOY, overhead=0.5))
    whole = replace(half, measured=((key_of(summing), 2.0),))
    first, second = (run_passes(program, [pass_]).history[0].verdicts[1] for pass_ in (half, whole))
    assert (first.reason, first.detail) == (BUSY, "travels 1000.000 ms, exposed 500.000 ms")
    assert second.reason == HIDDEN


def test_O4_options_are_spelled_short() -> None:
    assert OverlapCommunication().spelling == "overlap-communication"
    assert OverlapCommunication(memory_limit=900).spelling == "overlap-communication(memory_limit=900)"
    assert OverlapCommunication(TOY).spelling == "overlap-communication"


def test_an_exposed_gradient_says_what_16_bits_would_save() -> None:
    """Not what is sent so already, nor what is no gradient's, nor where conversions take longer."""
    text = """
        x: f32[262144] = input("x")
        s: f32[262144] = c10d.all_reduce(x, "avg", "dp")
        w: f32[262144] = c10d.wait_tensor(s)
        h: bf16[262144] = aten._to_copy(x, dtype=bf16)
        t: bf16[262144] = c10d.all_reduce(h, "avg", "dp")
        v: bf16[262144] = c10d.wait_tensor(t)
        return output("w", w), output("v", v)
    """

    def details(memory_bandwidth: float, made_for: str | None) -> list[bool]:
        link = Link(latency=0.0, bandwidth=1e6)
        machine = Machine("slow", {"*": Fabric(dict.fromkeys(Kind, link))}, {"float32": 1e30}, memory_bandwidth, 0.0)
        program = program_of(text)
        for node in program.graph.nodes:
            if made_for and node.name in "st":
                node.meta[MADE_FOR] = made_for
        done = run_passes(program, [OverlapCommunication(machine)])
        return ["reduce_dtype=torch.bfloat16 would save" in verdict.detail for verdict in done.history[0].verdicts]

    assert details(1e12, "layer.weight") == [True, False]
    assert details(1e12, None) == [False, False]
    assert details(1e5, "layer.weight") == [False, False]
