"""Order, verify and text on sampled programs, held against brute force and against execution."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from crossfade.graph.effects import alias_roots, is_random, written_inputs
from crossfade.graph.order import Order, Reachability, reorder
from crossfade.graph.passes import fingerprint
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify
from tests.properties.sampled_programs import Machine, Sampled, sampled_programs


@given(sampled_programs(), st.randoms(use_true_random=False))
def test_any_sorted_order_computes_the_same(sampled: Sampled, random):
    program = sampled.program
    verify(program)
    expected = Machine().run(program, list(program.graph.nodes))
    order = Order(program.graph)
    assert order.sorted() == order.nodes
    keys = {node: random.random() for node in order.nodes}
    for key in (keys.__getitem__, lambda node: -order.position[node]):
        nodes = order.sorted(key)
        assert sorted(nodes, key=order.position.__getitem__) == order.nodes
        assert Machine().run(program, nodes) == expected
        moved = program.copy()
        twin = dict(zip(program.graph.nodes, moved.graph.nodes, strict=True))
        assert reorder(moved.graph, [twin[node] for node in nodes]) == (nodes != order.nodes)
        verify(moved)


@given(sampled_programs())
def test_moves_agree_with_brute_force(sampled: Sampled):
    order = Order(sampled.program.graph)
    nodes = order.nodes
    for index, node in enumerate(nodes):
        if node.op != "call_function":
            continue
        above = [n for n in nodes[:index] if n.op == "placeholder" or sampled.must_follow(n, node)]
        below = [n for n in nodes[index + 1 :] if n.op == "output" or sampled.must_follow(node, n)]
        for other in nodes[:index]:
            found = order.may_rise_above(node, other)
            in_the_way = [n for n in above if order.position[n] >= order.position[other]]
            assert (found and found.node) == (in_the_way[-1] if in_the_way else None)
        for other in nodes[index + 1 :]:
            found = order.may_sink_below(node, other)
            in_the_way = [n for n in below if order.position[n] <= order.position[other]]
            assert (found and found.node) == (in_the_way[0] if in_the_way else None)


@given(sampled_programs(), st.randoms(use_true_random=False))
def test_reachability_agrees_with_brute_force(sampled: Sampled, random):
    order = Order(sampled.program.graph)
    nodes = order.nodes
    reached: dict = {}
    for index, node in enumerate(nodes):
        direct = [before for before in nodes[:index] if sampled.must_follow(before, node)]
        reached[node] = set(direct).union(*(reached[before] for before in direct))
    marked = [node for node in nodes if random.random() < 0.5]
    reach = Reachability(order, marked)
    for target in nodes:
        assert {source for source in marked if reach.reaches(source, target)} == reached[target] & set(marked)


@given(sampled_programs())
def test_effects_agree_with_the_samplers_account(sampled: Sampled):
    nodes = list(sampled.program.graph.nodes)
    roots = alias_roots(nodes)
    for node, effects in sampled.effects.items():
        assert is_random(node) == effects.random
        if not effects.group and "wait" not in node.name:
            assert len({roots[target] for target in written_inputs(node)}) == len(effects.writes)


@given(sampled_programs())
def test_text_round_trips(sampled: Sampled):
    program = sampled.program
    again = parse(render(program), groups=program.groups)
    assert render(again) == render(program)
    assert fingerprint(again) == fingerprint(program)
    assert fingerprint(program.copy()) == fingerprint(program)
