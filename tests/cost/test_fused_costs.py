"""Matmuls that travel in pieces: their operations, seconds and place in a timeline, by hand."""

from __future__ import annotations

import textwrap

import pytest
from torch import fx

from crossfade.cost.collective_matmul import Exchange, forecast
from crossfade.cost.estimate import computes, estimate
from crossfade.cost.flops import flops_of
from crossfade.cost.keys import key_of
from crossfade.cost.machine import Fabric, Link, Machine
from crossfade.cost.timeline import simulate
from crossfade.graph.collectives import Kind
from crossfade.graph.program import Program
from crossfade.graph.text import parse
from tests.cost.toy_machine import toy_machine


def gathers(form: str = "chunked", chunks: int = 2, bias: str = "None") -> Program:
    return program_of(f"""
        x: f32[2, 16, 8] = input("x")
        w: f32[8, 5] = input("w")
        v: f32[6, 8] = input("v")
        b: f32[5] = input("b")
        y = crossfade.gather_matmul(x, [w, v], [{bias}, None], [], ["bsk,kn->bsn", "bsk,nk->bsn"], 1, 4, "{form}", \
{chunks}, False, "tp")
        y0 = operator.getitem(y, 0)
        y1 = operator.getitem(y, 1)
        return output("y0", y0), output("y1", y1)
        """)


def scatters(form: str = "chunked", chunks: int = 2) -> Program:
    return program_of(f"""
        x: f32[64, 8] = input("x")
        w: f32[8, 5] = input("w")
        y: f32[16, 5] = crossfade.matmul_scatter(x, w, None, [], "mk,kn->mn", 0, "sum", 4, "{form}", {chunks}, "tp")
        return output("y", y)
        """)


def program_of(lines: str) -> Program:
    return parse(textwrap.dedent(lines), groups={"tp": 4})


def fused(program: Program) -> fx.Node:
    return next(node for node in program.graph.nodes if node.name == "y")


def test_operations_are_those_of_the_whole_products() -> None:
    assert flops_of(fused(gathers())) == 2 * (2 * 64 * 8 * 5) + 2 * (2 * 64 * 8 * 6)
    assert flops_of(fused(scatters())) == 2 * 64 * 8 * 5


@pytest.mark.parametrize(("form", "chunks"), [("chunked", 1), ("chunked", 2), ("ring", 2), ("symmetric", 1)])
def test_seconds_are_forecast_for_the_form_and_the_pieces(form: str, chunks: int) -> None:
    machine = toy_machine(overhead=0.0, memory_bandwidth=1e12)
    whole = 2 * 64 * 8 * 4
    program = gathers(form, chunks)
    seconds = (2 * 2 * 64 * 8 * 5 + 2 * 2 * 64 * 8 * 6) / 1e9
    expected = forecast(Exchange(machine, "tp", 4, whole, seconds, 16, 2, each=2), Kind.ALL_GATHER, form, chunks)
    assert estimate(program, machine).compute[fused(program)] == pytest.approx(expected.seconds)

    program = scatters(form, chunks)
    work = Exchange(machine, "tp", 4, 64 * 5 * 4, 2 * 64 * 8 * 5 / 1e9, 16)
    expected = forecast(work, Kind.REDUCE_SCATTER, form, chunks)
    assert estimate(program, machine).compute[fused(program)] == pytest.approx(expected.seconds)


def test_what_is_computed_meanwhile_counts() -> None:
    program = program_of("""
        x: f32[64, 8] = input("x")
        w: f32[8, 5] = input("w")
        a: f32[7, 9] = input("a")
        b: f32[9, 11] = input("b")
        y = crossfade.matmul_scatter_meanwhile(x, w, None, [], "mk,kn->mn", 0, "sum", 4, "ring", 2, "tp", [a, b])
        y0 = operator.getitem(y, 0)
        y1 = operator.getitem(y, 1)
        return output("y0", y0), output("y1", y1)
        """)
    machine = toy_machine(overhead=0.0, memory_bandwidth=1e12)
    work = Exchange(machine, "tp", 4, 64 * 5 * 4, 2 * 64 * 8 * 5 / 1e9, 16, meanwhile_seconds=2 * 7 * 9 * 11 / 1e9)
    expected = forecast(work, Kind.REDUCE_SCATTER, "ring", 2)
    assert estimate(program, machine).compute[fused(program)] == pytest.approx(expected.seconds)
    assert flops_of(fused(program)) == 2 * 64 * 8 * 5 + 2 * 7 * 9 * 11


def test_products_of_few_operations_cost_their_bytes() -> None:
    # no link to speak of, 1 MB/s of memory: x is 4096 bytes whole, w 160, v 192, the results 2560 and 3072, b 20
    fast = Fabric(dict.fromkeys(Kind, Link(0.0, 1e15)))
    machine = toy_machine(fabrics={"*": fast}, overhead=0.0)
    program = gathers("ring", 1, bias="b")
    read = (4096 + 160 + 2560 + 20 + 4096 + 192 + 3072) / 1e6
    assert estimate(program, machine).compute[fused(program)] == pytest.approx(read * (1 + 8 / 32))


def test_measured_seconds_of_the_plain_calls_count() -> None:
    fast = Fabric(dict.fromkeys(Kind, Link(0.0, 1e15)))
    machine = toy_machine(fabrics={"*": fast}, overhead=0.0)
    plain = program_of("""
        x: f32[128, 8] = input("x")
        w: f32[8, 5] = input("w")
        v: f32[6, 8] = input("v")
        b: f32[5] = input("b")
        t: f32[8, 6] = aten.t(v)
        with_bias: f32[128, 5] = aten.addmm(b, x, w)
        without: f32[128, 6] = aten.mm(x, t)
        return output("a", with_bias), output("b", without)
        """)
    known = {key_of(node): seconds for node, seconds in zip(list(plain.graph.nodes)[5:7], (3.0, 4.0), strict=True)}
    program = gathers("ring", 1, bias="b")
    assert estimate(program, machine, known).compute[fused(program)] == pytest.approx(7 * 1.25)

    linear = program_of("""
        x: f32[2, 64, 8] = input("x")
        v: f32[6, 8] = input("v")
        y: f32[2, 64, 6] = aten.linear(x, v)
        return output("y", y)
        """)
    known = {key_of(list(linear.graph.nodes)[2]): 4.0}
    analytic, measured = (estimate(gathers("ring", 1), machine, table) for table in ({}, known))
    second = (4096 + 192 + 3072) / 1e6
    gained = [sum(costs.compute.values()) for costs in (analytic, measured)]
    assert gained[1] - gained[0] == pytest.approx((4.0 - second) * 1.25)


def test_it_is_not_for_one_rank_to_measure() -> None:
    assert not computes(fused(gathers()))
    assert not computes(fused(scatters()))


def slow_link() -> Machine:
    """A second for each rank's part of the scattered product, and a matmul of two."""
    fabric = Fabric(dict.fromkeys(Kind, Link(0.0, 64 * 5)))
    return toy_machine(
        fabrics={"*": fabric}, flops={"float32": 2 * 64 * 8 * 5 / 2}, overhead=0.0, memory_bandwidth=1e12
    )


def test_a_timeline_tells_what_travels_inside_and_what_it_holds_up() -> None:
    program = scatters("ring", 1)
    # blocks of half a second, half as much again for so few rows: 0.75 each
    timeline = simulate(program, estimate(program, slow_link()))
    # sent at 0.75, arrives at 1.75; 1.5; 1.75 to 2.75; then 3.75; own until 3.5
    assert timeline.seconds == pytest.approx(3.75)
    assert timeline.busy == pytest.approx(4 * 0.75)
    assert timeline.exposed == pytest.approx(0.75)
    (travelled,) = timeline.communication
    assert (travelled.name, travelled.kind, travelled.group, travelled.bytes) == ("y", "reduce_scatter", "tp", 1280)
    assert (travelled.start, travelled.finish, travelled.needed) == pytest.approx((0.0, 3.0, 3.0))


def test_timelines_of_collectives_within_and_beside_are_in_order() -> None:
    program = program_of("""
        x: f32[64, 8] = input("x")
        w: f32[8, 5] = input("w")
        y: f32[16, 5] = crossfade.matmul_scatter(x, w, None, [], "mk,kn->mn", 0, "sum", 4, "ring", 1, "tp")
        start: f32[16, 5] = c10d.all_reduce(y, "sum", "tp")
        done: f32[16, 5] = c10d.wait_tensor(start)
        return output("z", done)
        """)
    timeline = simulate(program, estimate(program, slow_link()))
    assert [span.name for span in timeline.communication] == ["y", "start"]
    assert timeline.communication[1].launch == pytest.approx(3.75)
