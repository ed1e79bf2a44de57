"""Which parameters are kept whole: those used first, as many as the forward stands still for."""

from __future__ import annotations

import textwrap

from crossfade.compile.kept_whole import parameters_to_keep_whole
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
