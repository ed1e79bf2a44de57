"""A graph's nodes sorted and put in another order, and which of them depend on which."""

from __future__ import annotations

import pytest

from crossfade.errors import RewriteError
from crossfade.graph.order import Order, Reachability, reorder
from tests.graph.ordered_programs import (
    GROUPS_APART,
    IN_PLACE_COALESCED,
    MUTATED_INPUT,
    NO_INPUTS,
    RANDOM,
    READ_UNTIL_WAIT,
    SIDE_EFFECTS,
    named,
    names,
    program_of,
)


def test_sorted_without_key_is_the_order_as_it_stood():
    for text in (MUTATED_INPUT, GROUPS_APART, IN_PLACE_COALESCED, SIDE_EFFECTS):
        program = program_of(text)
        assert Order(program.graph).sorted() == list(program.graph.nodes)


def test_sorted_by_key_moves_only_what_may_move():
    program = program_of(GROUPS_APART)
    order = Order(program.graph)
    backwards = order.sorted(key=lambda node: -order.position[node])
    assert names(backwards) == ["x", "b", "wb", "a", "wa", "c", "wc", "output"]


def test_sorted_breaks_ties_by_position():
    program = program_of(GROUPS_APART)
    assert Order(program.graph).sorted(key=lambda node: 0) == list(program.graph.nodes)


def test_sorted_keeps_placeholders_first_and_in_order():
    program = program_of(NO_INPUTS)
    order = Order(program.graph)
    assert names(order.sorted(key=lambda node: -order.position[node])) == ["x", "y", "write", "ones", "output"]


def test_reorder_changes_the_graph_and_says_so():
    program = program_of(RANDOM)
    x, first, plain, second, output = program.graph.nodes
    assert reorder(program.graph, [x, first, plain, second, output]) is False
    assert reorder(program.graph, [x, plain, first, second, output]) is True
    assert names(program.graph.nodes) == ["x", "plain", "first", "second", "output"]
    program.graph.lint()


def test_reorder_refuses_what_is_not_an_order():
    program = program_of(NO_INPUTS)
    x, y, ones, write, output = program.graph.nodes
    refused = {
        "an order of 4 nodes, 4 of them the graph's": [x, y, ones, output],
        "an order of 5 nodes, 4 of them the graph's": [x, y, ones, ones, output],
        "an order of 5 nodes, 5 of them the graph's": [x, y, ones, output, write],
        "placeholders in another order": [y, x, ones, write, output],
    }
    for found, nodes in refused.items():
        with pytest.raises(RewriteError) as caught:
            reorder(program.graph, nodes)
        assert caught.value.found == found
    assert names(program.graph.nodes) == ["x", "y", "ones", "write", "output"]


def test_reachability_counts_order_as_well_as_data():
    program = program_of(READ_UNTIL_WAIT)
    node = named(program)
    reach = Reachability(Order(program.graph), [node["start"], node["wait"], node["free"]])
    assert reach.reaches(node["start"], node["wait"])
    assert reach.reaches(node["wait"], node["write"])
    assert reach.reaches(node["free"], node["write"])
    assert not reach.reaches(node["free"], node["wait"])
    assert not reach.reaches(node["wait"], node["wait"])
