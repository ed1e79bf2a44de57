"""Units of nodes that become one: who may join, where they stand, and that all ranks launch alike."""

from __future__ import annotations

import textwrap

import pytest
import torch
from torch import fx

from crossfade.errors import RewriteError
from crossfade.graph import collectives
from crossfade.graph.contraction import Contraction
from crossfade.graph.order import Order
from crossfade.graph.text import parse, resolve_operator

CROSSED = """
    x: f32[4] = input("x")
    a1: f32[4] = c10d.all_reduce(x, "sum", "dp")
    wa1: f32[4] = c10d.wait_tensor(a1)
    b1: f32[4] = c10d.all_reduce(x, "sum", "tp")
    wb1: f32[4] = c10d.wait_tensor(b1)
    n: f32[4] = aten.neg(wa1)
    b2: f32[4] = c10d.all_reduce(n, "sum", "tp")
    wb2: f32[4] = c10d.wait_tensor(b2)
    e: f32[4] = aten.exp(wb1)
    a2: f32[4] = c10d.all_reduce(e, "sum", "dp")
    wa2: f32[4] = c10d.wait_tensor(a2)
    return output("a", wa2), output("b", wb2)
"""


def contracted(text: str, *units: tuple[str, ...]) -> Contraction:
    """A contraction with the given units; every other collective alone."""
    program = parse(textwrap.dedent(text), groups={"dp": 2, "tp": 2})
    contraction = Contraction(Order(program.graph))
    opened: dict[tuple[str, ...], int] = {}
    for node in program.graph.nodes:
        contraction.walk(node)
        unit = next((unit for unit in units if node.name in unit), None)
        if unit in opened:
            contraction.join(node, opened[unit])
        elif collectives.group_of(node) is not None:
            number = contraction.open(node)
            if unit is not None:
                opened[unit] = number
    return contraction


def names(contraction: Contraction) -> str:
    return " ".join(node.name for node in contraction.sorted())


def test_what_used_a_result_early_comes_after_the_unit() -> None:
    assert names(contracted(CROSSED, ("a1", "a2"))) == "x b1 wb1 e a1 a2 wa1 n b2 wb2 wa2 output"


def test_two_units_that_need_one_another_are_refused() -> None:
    with pytest.raises(RewriteError, match="a2 put together with a1, on which it depends"):
        contracted(CROSSED, ("a1", "a2"), ("b1", "b2"))


def test_the_order_within_a_group_is_no_dependence() -> None:
    text = CROSSED.replace('"tp"', '"dp"')
    assert names(contracted(text, ("a1", "a2"))) == "x b1 wb1 e a1 a2 wa1 n b2 wb2 wa2 output"


def test_launches_do_not_follow_what_stands_between_them() -> None:
    """The same collectives in the same order, other computation in between: the same sequence of launches."""
    text = """
        x: f32[4] = input("x")
        a: f32[4] = c10d.all_reduce(x, "sum", "dp")
        wa: f32[4] = c10d.wait_tensor(a)
        {first}
        b: f32[4] = c10d.all_reduce(e, "sum", "dp")
        wb: f32[4] = c10d.wait_tensor(b)
        {second}
        c: f32[4] = c10d.all_reduce(x, "sum", "dp")
        wc: f32[4] = c10d.wait_tensor(c)
        return output("a", wa), output("b", wb), output("c", wc), output("n", n)
    """
    lines = ("e: f32[4] = aten.exp(x)", "n: f32[4] = aten.neg(wa)")
    both = [text.format(first="\n        ".join(lines), second=""), text.format(first=lines[0], second=lines[1])]
    found = []
    for program_text in both:
        contraction = contracted(program_text, ("a", "c"))
        found.append([node.name for node in contraction.sorted() if collectives.is_collective(node)])
    assert found[0] == found[1] == ["a", "c", "b"]


def test_chains_contracted_step_by_step_stay_in_step() -> None:
    """Eight chains of 250 all-reduces: each step's eight are one unit, and nothing has to move."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4)
    chains = [x] * 8
    for _ in range(250):
        starts = [graph.call_function(resolve_operator("c10d.all_reduce"), (last, "sum", "dp")) for last in chains]
        chains = [graph.call_function(resolve_operator("c10d.wait_tensor"), (start,)) for start in starts]
    graph.output(tuple(chains))
    contraction = Contraction(Order(graph))
    unit = -1
    for node in contraction.order.nodes:
        contraction.walk(node)
        if collectives.group_of(node) is not None:
            if len(contraction.unit_of) % 8:
                contraction.join(node, unit)
            else:
                assert unit < 0 or not contraction.may_join(node, unit), "a step needs the one before"
                unit = contraction.open(node)
    assert contraction.sequence() == list(range(250))
    assert contraction.sorted() == contraction.order.nodes
