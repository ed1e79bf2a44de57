"""Contraction on sampled programs: exactly the cycles are refused, and the order is valid."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from crossfade.graph import collectives
from crossfade.graph.contraction import Contraction
from crossfade.graph.order import Order, reorder
from tests.properties.functional_programs import sample


@given(st.integers(0, 2**32))
def test_exactly_the_cycles_are_refused_and_the_order_is_valid(seed: int) -> None:
    """Against brute force: a node may join unless a search through the contracted graph finds a way back."""
    random = Random(seed)
    program = sample(random)
    order = Order(program.graph)
    contraction = Contraction(order)
    units: list[list[fx.Node]] = []
    for node in order.nodes:
        contraction.walk(node)
        if collectives.group_of(node) is None:
            continue
        joinable = [u for u in range(len(units)) if contraction.may_join(node, u)]
        exact = [u for u in range(len(units)) if not _reaches(order, units, u, node)]
        assert joinable == exact
        if joinable and random.random() < 0.6:
            unit = random.choice(joinable)
            contraction.join(node, unit)
            units[unit].append(node)
        else:
            assert contraction.open(node) == len(units)
            units.append([node])
    found = contraction.sorted(at_first=random.random() < 0.5)
    place = {node: index for index, node in enumerate(found)}
    assert len(place) == len(order.nodes)
    for unit in units:
        assert sorted(place[node] for node in unit) == list(range(place[unit[0]], place[unit[0]] + len(unit)))
    for node in order.nodes:
        assert all(place[b] < place[node] for b in order.predecessors(node, within_group=False))
    reorder(program.graph, found)
    program.graph.lint()


def _reaches(order: Order, units: list[list[fx.Node]], start: int, goal: fx.Node) -> bool:
    """Whether a node depends on a unit, by search upwards from the node."""
    unit_of = {node: unit for unit in units for node in unit}
    ids = {id(unit): index for index, unit in enumerate(units)}
    stack, seen = [goal], set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for before in order.predecessors(node, within_group=False):
            together = unit_of.get(before, [before])
            if before in unit_of and ids[id(together)] == start:
                return True
            stack += together
    return False
