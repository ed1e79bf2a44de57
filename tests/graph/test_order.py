"""What must come before what: every reason for an order, and that nothing else orders."""

from __future__ import annotations

import pytest
import torch

from crossfade.graph.effects import alias_roots
from crossfade.graph.order import Order, _ordering_edges
from tests.graph import ordered_programs
from tests.graph.ordered_programs import (
    EVAL_BATCH_NORM,
    FOREACH_WRITE,
    GROUPS_APART,
    IN_PLACE_COALESCED,
    IN_PLACE_COLLECTIVE,
    LIST_READ_WHOLE,
    MUTATED_INPUT,
    MUTATED_THROUGH_VIEW,
    NO_INPUTS,
    OUT_BUFFER,
    OWN_ELEMENTS,
    RANDOM,
    READ_SIBLING,
    READ_UNTIL_WAIT,
    SAME_CONSTANT,
    SIDE_EFFECTS,
    SPLIT_ELEMENTS,
    START_READ_AFTER_WAIT,
    TRAINING_BATCH_NORM,
    UNDECLARED_ALIAS,
    WRITTEN_SIBLING,
    WRITTEN_TWICE,
    named,
    program_of,
)

# Each case: a program, a move and what stands in its way (None: nothing). Rises and sinks are said from the mover.
RISES = [
    (MUTATED_INPUT, "write", "before", "before reads memory written by write"),
    (MUTATED_INPUT, "after", "write", "write writes memory read by after"),
    (MUTATED_INPUT, "other", "write", None),
    (MUTATED_THROUGH_VIEW, "write", "before", "before reads memory written by write"),
    (MUTATED_THROUGH_VIEW, "after", "write", "write writes memory read by after"),
    (MUTATED_THROUGH_VIEW, "before", "right", "right is an input of before"),
    (WRITTEN_TWICE, "second", "first", "first writes memory read by second"),
    (RANDOM, "second", "plain", None),
    (RANDOM, "second", "first", "first draws random numbers before second"),
    (RANDOM, "plain", "first", None),
    (GROUPS_APART, "b", "a", None),
    (GROUPS_APART, "c", "b", None),
    (GROUPS_APART, "c", "a", "a starts a collective of the same group before c"),
    (GROUPS_APART, "wc", "wa", None),
    (READ_UNTIL_WAIT, "write", "wait", "wait reads memory written by write"),
    (READ_UNTIL_WAIT, "wait", "free", None),
    (IN_PLACE_COLLECTIVE, "start", "before", "before reads memory written by start"),
    (IN_PLACE_COLLECTIVE, "after", "wait", "wait writes memory read by after"),
    (OUT_BUFFER, "after", "wait", "wait writes memory read by after"),
    (START_READ_AFTER_WAIT, "after", "wait", "wait writes memory read by after"),
    (IN_PLACE_COALESCED, "r1", "w1", "w1 writes memory read by r1"),
    (IN_PLACE_COALESCED, "r0", "w0", "w0 writes memory read by r0"),
    (IN_PLACE_COALESCED, "r1", "r0", None),
    (WRITTEN_SIBLING, "write", "w1", "w1 writes memory read by write"),
    (WRITTEN_SIBLING, "w1", "w0", "w0 writes memory read by w1"),
    (WRITTEN_SIBLING, "w0", "early", None),
    (WRITTEN_SIBLING, "r1", "write", None),
    (READ_SIBLING, "write", "w1", None),
    (READ_SIBLING, "w1", "w0", None),
    (OWN_ELEMENTS, "read_high", "write", None),
    (OWN_ELEMENTS, "read_low", "write", "write writes memory read by read_low"),
    (SPLIT_ELEMENTS, "read", "write", "write writes memory read by read"),
    (LIST_READ_WHOLE, "joined", "write", "write writes memory read by joined"),
    (UNDECLARED_ALIAS, "read", "write", "write writes memory read by read"),
    (TRAINING_BATCH_NORM, "read", "norm", "norm writes memory read by read"),
    (EVAL_BATCH_NORM, "read", "norm", None),
    (SAME_CONSTANT, "read", "write", "write writes memory read by read"),
    (FOREACH_WRITE, "read", "write", "write writes memory read by read"),
    (SIDE_EFFECTS, "second", "plain", None),
    (SIDE_EFFECTS, "second", "first", "first has a side effect before second"),
    (NO_INPUTS, "ones", "x", "y is an input of the graph, which stays above ones"),
    (NO_INPUTS, "y", "x", "y is fixed at the border of the graph with y"),
    (NO_INPUTS, "output", "x", "output is fixed at the border of the graph with output"),
    (NO_INPUTS, "ones", "ones", None),
    (NO_INPUTS, "ones", "write", None),
]

SINKS = [
    (MUTATED_INPUT, "before", "write", "write writes memory read by before"),
    (MUTATED_INPUT, "write", "after", "after reads memory written by write"),
    (MUTATED_INPUT, "before", "other", "write writes memory read by before"),
    (MUTATED_INPUT, "after", "other", None),
    (WRITTEN_TWICE, "first", "second", "second reads memory written by first"),
    (RANDOM, "first", "plain", None),
    (RANDOM, "first", "second", "second draws random numbers after first"),
    (GROUPS_APART, "a", "b", None),
    (GROUPS_APART, "a", "c", "c starts a collective of the same group after a"),
    (GROUPS_APART, "a", "wa", "c starts a collective of the same group after a"),
    (GROUPS_APART, "b", "wb", "wb uses b"),
    (READ_UNTIL_WAIT, "wait", "write", "write writes memory read by wait"),
    (IN_PLACE_COLLECTIVE, "wait", "after", "after reads memory written by wait"),
    (WRITTEN_SIBLING, "w1", "write", "write reads memory written by w1"),
    (READ_SIBLING, "w1", "r0", None),
    (SIDE_EFFECTS, "first", "second", "second has a side effect after first"),
    (NO_INPUTS, "write", "output", "output ends the graph, after write"),
    (NO_INPUTS, "ones", "write", None),
    (NO_INPUTS, "x", "write", "x is fixed at the border of the graph with x"),
    (NO_INPUTS, "write", "ones", None),
]


def _move_id(case) -> str:
    text, mover, other, blocker = case
    title = next(name for name, value in vars(ordered_programs).items() if value is text).lower()
    return f"{title}-{mover}-{other}-{'free' if blocker is None else 'blocked'}"


@pytest.mark.parametrize("case", RISES, ids=_move_id)
def test_rise(case):
    text, mover, other, blocker = case
    program = program_of(text)
    found = Order(program.graph).may_rise_above(named(program)[mover], named(program)[other])
    assert (None if found is None else str(found)) == blocker


@pytest.mark.parametrize("case", SINKS, ids=_move_id)
def test_sink(case):
    text, mover, other, blocker = case
    program = program_of(text)
    found = Order(program.graph).may_sink_below(named(program)[mover], named(program)[other])
    assert (None if found is None else str(found)) == blocker


def test_a_blocker_is_the_nearest_one():
    program = program_of(MUTATED_INPUT)
    node = named(program)
    order = Order(program.graph)
    assert order.may_rise_above(node["after"], node["x"]).node is node["write"]


def test_the_lowest_random_blocker_wins_over_a_higher_data_blocker():
    program = program_of("""
        x: f32[4] = input("x")
        a: f32[4] = aten.relu(x)
        noise: f32[4] = aten.rand_like(x)
        b: f32[4] = aten.bernoulli(a)
        return output("a", noise), output("b", b)
    """)
    node = named(program)
    assert str(Order(program.graph).may_rise_above(node["b"], node["a"])) == "noise draws random numbers before b"


def test_ops_that_no_view_knows_keep_their_groups_order():
    program = program_of(GROUPS_APART)
    node = named(program)
    with program.graph.inserting_before(node["wc"]):
        gather = torch.ops._c10d_functional_autograd.all_gather_into_tensor.default
        unknown = program.graph.call_function(gather, (node["x"], 2, "dp"))
        norm = program.graph.call_function(
            torch.ops.aten.native_group_norm.default, (node["x"], None, None, 1, 4, 1, 2, 0.1)
        )
    order = Order(program.graph)
    assert (
        str(order.may_rise_above(unknown, node["a"]))
        == f"c starts a collective of the same group before {unknown.name}"
    )
    assert order.may_rise_above(norm, node["a"]) is None


def test_each_reason_for_an_order_is_one_edge():
    """A second write follows the first and its readers, and through them whatever came before; nothing else orders."""
    program = program_of("""
        x: f32[4] = input("x")
        early: f32[4] = aten.relu(x)
        first: f32[4] = aten.add_.Tensor(x, 1)
        late: f32[4] = aten.neg(x)
        start: f32[4] = c10d.all_reduce(late, "sum", "dp")
        wait: f32[4] = c10d.wait_tensor(start)
        other: f32[4] = c10d.all_reduce(wait, "sum", "tp")
        again: f32[4] = c10d.all_reduce(early, "sum", "dp")
        second: f32[4] = aten.bernoulli_.float(x)
        noise: f32[4] = aten.rand_like(early)
        return output("x", noise)
    """)
    nodes = list(program.graph.nodes)
    found = _ordering_edges(nodes, alias_roots(nodes))
    assert {node.name: [f"{before.name} {why}" for before, why in edges] for node, edges in found.items()} == {
        "first": ["early reads memory written by"],
        "late": ["first writes memory read by"],
        "second": ["first writes memory read by", "late reads memory written by"],
        "again": ["start starts a collective of the same group before"],
        "noise": ["second draws random numbers before"],
    }
