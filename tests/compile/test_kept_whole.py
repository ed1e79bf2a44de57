"""Which parameters are kept whole: those used first, as many as the forward stands still for."""

from __future__ import annotations

import textwrap

import pytest

from crossfade.compile.kept_whole import _Parameter, _Step, parameters_to_keep_whole
from crossfade.cost.machine import Fabric, Link, Machine
from crossfade.graph.collectives import Kind
from crossfade.graph.program import Program
from crossfade.graph.text import parse

LAYERS = 8


def layers(tokens: int = 8, width: int = 64, trained: int = LAYERS) -> Program:
    """A forward of matmuls and its backward, in which the last `trained` layers have gradients."""
    square, rows = f"f32[{width}, {width}]", f"f32[{tokens}, {width}]"
    lines = [f'w{i}: {square} = parameter("w{i}")' for i in range(LAYERS)]
    lines.append(f'x0: {rows} = input("x")')
    lines += [f"x{i + 1}: {rows} = aten.mm(x{i}, w{i})" for i in range(LAYERS)]
    lines.append(f"g{LAYERS}: {rows} = aten.neg(x{LAYERS})")
    for i in reversed(range(LAYERS - trained, LAYERS)):
        lines.append(f"v{i}: {square} = aten.t(w{i})")
        lines.append(f"t{i}: f32[{width}, {tokens}] = aten.t(x{i})")
        lines.append(f"d{i}: {square} = aten.mm(t{i}, g{i + 1})")
        lines.append(f"g{i}: {rows} = aten.mm(g{i + 1}, v{i})")
    results = [f'gradient("w{i}", d{i})' for i in range(LAYERS - trained, LAYERS)]
    lines.append("return " + ", ".join(results))
    return parse(textwrap.dedent("\n".join(lines)))


def machine(bandwidth: float, slows: float = 0.0) -> Machine:
    """A machine that multiplies 8 by 64 by 64 in a second, where a link of bandwidth 1 takes 8 to gather 64 by 64."""
    fabric = Fabric(dict.fromkeys(Kind, Link(latency=0.0, bandwidth=bandwidth * 1024)), slows_compute=slows)
    return Machine("toy", {"*": fabric}, {"float32": 2.0 * 8 * 64 * 64}, memory_bandwidth=1e12)


def test_nothing_where_the_forward_does_not_stand_still():
    assert parameters_to_keep_whole(layers(), machine(bandwidth=100)) == []


def test_those_used_first_where_it_does():
    """To gather one takes 1.6 seconds, to multiply by it one: what is needed after 7 seconds may be the fourth."""
    kept = parameters_to_keep_whole(layers(), machine(bandwidth=5))
    assert kept == ["w0", "w1", "w2", "w3"]


def test_nothing_where_the_link_is_busy_throughout_anyway():
    assert parameters_to_keep_whole(layers(), machine(bandwidth=1)) == []


def test_fewer_where_gradients_travel_themselves():
    """With many tokens: those used first have the last gradients, and nothing is left to hide their gathers under."""
    kept = parameters_to_keep_whole(layers(tokens=512), machine(bandwidth=5 * 8 / 512))
    assert kept == ["w0", "w1", "w2"]


def test_what_is_never_updated_costs_nothing_to_keep_whole():
    """Where one alone would be kept of those that are."""
    assert parameters_to_keep_whole(layers(), machine(bandwidth=8)) == ["w0"]
    assert parameters_to_keep_whole(layers(trained=4), machine(bandwidth=8)) == ["w0", "w1", "w2", "w3"]


def test_a_step_is_read_off_its_program():
    """Factors travel: no gradient's product, a second each, is among what must be computed in order."""
    step = _Step.of(layers(), machine(bandwidth=5), {}, "dp", 2)
    first, last = step.parameters[0], step.parameters[-1]
    assert [parameter.name for parameter in step.parameters] == [f"w{i}" for i in range(LAYERS)]
    assert (first.bytes, first.needed, last.needed) == (4 * 64 * 64, 0.0, pytest.approx(7, rel=1e-3))
    assert last.ready == pytest.approx(8, rel=1e-3) and first.ready == pytest.approx(15, rel=1e-3)
    assert first.gather == pytest.approx(1.6)
    assert (step.in_order, step.at_the_end) == (pytest.approx(16, rel=1e-3), pytest.approx(8, rel=1e-3))


def test_gradients_that_travel_themselves_are_computed_in_order():
    step = _Step.of(layers(tokens=512), machine(bandwidth=5 * 8 / 512), {}, "dp", 2)
    assert step.in_order == pytest.approx(64 * 24, rel=1e-3)
    assert step.at_the_end == pytest.approx(0, abs=1e-3)
    assert step.parameters[0].exchange == step.parameters[0].gather


def test_the_first_share_counts_a_parameter_that_is_more_than_half_in_it():
    parameters = [_Parameter(name, 10, 0.0, ready, 1.0, 1.0) for name, ready in (("a", 5.0), ("b", None), ("c", 4.0))]
    step = _Step(parameters, 9.0, 0.0, 0.0)
    assert step.first(0) == []
    assert step.first(2) == []  # 3.75 of 30 bytes
    assert step.first(3) == ["a", "b"]  # 5.6 bytes; what is never updated counts nothing
    assert step.first(8) == ["a", "b", "c"]  # 15 bytes


def test_the_seconds_of_a_step_are_those_of_its_two_lanes():
    """Two parameters of 3 seconds each on the link, used at 0 and 2, their gradients ready at 6 and 4."""
    parameters = [_Parameter("a", 10, 0.0, 6.0, 3.0, 1.0), _Parameter("b", 10, 2.0, 4.0, 3.0, 1.0)]
    step = _Step(parameters, in_order=6.0, at_the_end=0.0, slows_compute=0.0)
    assert step.seconds([]) == 3 + (2 + 1) + 4 + 1  # a is waited for, then b for a second; a's gradient travels last
    assert step.seconds(["a"]) == 2 + 1 + 4 + 1 + 3  # b is waited for; a's gradient and a itself travel last
    assert step.seconds(["a", "b"]) == 4 + (1 + 3) + 1 + 3  # nothing is waited for but the link at the end
