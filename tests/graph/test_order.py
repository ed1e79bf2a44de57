"""What must come before what: every reason for an order, and that nothing else orders."""

from __future__ import annotations

import pytest
import torch

from crossfade.errors import RewriteError
from crossfade.graph.effects import alias_roots, is_random, written_inputs
from crossfade.graph.order import Order, Reachability, reorder
from crossfade.graph.program import Program
from crossfade.graph.text import parse

GROUPS = {"dp": 2, "tp": 2}


def program_of(text: str) -> Program:
    return parse(text, groups=GROUPS)


def named(program: Program) -> dict:
    return {node.name: node for node in program.graph.nodes}


def names(nodes) -> list[str]:
    return [node.name for node in nodes]


# Each case: a program, a move and what stands in its way (None: nothing). Rises and sinks are said from the mover.
MUTATED_INPUT = """
    x: f32[4] = input("x")
    before: f32[4] = aten.relu(x)
    write: f32[4] = aten.add_.Tensor(x, 1)
    after: f32[4] = aten.neg(x)
    other: f32[4] = aten.exp(before)
    return output("a", before), output("b", after), output("c", other)
"""
MUTATED_THROUGH_VIEW = """
    x: f32[4] = input("x")
    left: f32[2] = aten.slice.Tensor(x, 0, 0, 2)
    right: f32[2] = aten.slice.Tensor(x, 0, 2, 4)
    before: f32[2] = aten.relu(right)
    write: f32[2] = aten.mul_.Tensor(left, 2)
    after: f32[4] = aten.neg(x)
    return output("a", before), output("b", after)
"""
WRITTEN_TWICE = """
    x: f32[4] = input("x")
    first: f32[4] = aten.add_.Tensor(x, 1)
    second: f32[4] = aten.mul_.Tensor(x, 2)
    return output("x", x)
"""
RANDOM = """
    x: f32[4] = input("x")
    one: f32[4] = aten.rand_like(x)
    plain: f32[4] = aten.relu(x)
    two: f32[4] = aten.bernoulli(x)
    return output("a", one), output("b", two), output("c", plain)
"""
GROUPS_APART = """
    x: f32[4] = input("x")
    a: f32[4] = c10d.all_reduce(x, "sum", "dp")
    b: f32[4] = c10d.all_reduce(x, "sum", "tp")
    c: f32[8] = c10d.all_gather_into_tensor(x, 2, "dp")
    wa: f32[4] = c10d.wait_tensor(a)
    wb: f32[4] = c10d.wait_tensor(b)
    wc: f32[8] = c10d.wait_tensor(c)
    return output("a", wa), output("b", wb), output("c", wc)
"""
READ_UNTIL_WAIT = """
    x: f32[4] = input("x")
    start: f32[8] = c10d.all_gather_into_tensor(x, 2, "dp")
    free: f32[4] = aten.relu(x)
    wait: f32[8] = c10d.wait_tensor(start)
    write: f32[4] = aten.add_.Tensor(x, 1)
    return output("a", wait), output("b", free)
"""
IN_PLACE_COLLECTIVE = """
    x: f32[4] = input("x")
    buffer: f32[4] = aten.clone(x)
    half: f32[2] = aten.slice.Tensor(buffer, 0, 0, 2)
    before: f32[4] = aten.relu(buffer)
    start: f32[4] = c10d.all_reduce_(buffer, "sum", "dp")
    wait: f32[4] = c10d.wait_tensor(start)
    after: f32[2] = aten.neg(half)
    return output("a", before), output("b", after)
"""
OUT_BUFFER = """
    x: f32[4] = input("x")
    buffer: f32[8] = aten.empty.memory_format([8])
    start: f32[8] = c10d.all_gather_into_tensor_out(x, 2, "dp", out=buffer)
    wait: f32[8] = c10d.wait_tensor(start)
    after: f32[8] = aten.neg(buffer)
    return output("a", after)
"""
START_READ_AFTER_WAIT = """
    x: f32[4] = input("x")
    start: f32[4] = c10d.all_reduce(x, "sum", "dp")
    wait: f32[4] = c10d.wait_tensor(start)
    after: f32[4] = aten.neg(start)
    return output("a", after)
"""
IN_PLACE_COALESCED = """
    x: f32[4] = input("x")
    p: f32[4] = aten.clone(x)
    q: f32[4] = aten.clone(x)
    both: (f32[4], f32[4]) = c10d.all_reduce_coalesced_([p, q], "sum", "dp")
    b0: f32[4] = both[0]
    b1: f32[4] = both[1]
    w0: f32[4] = c10d.wait_tensor(b0)
    w1: f32[4] = c10d.wait_tensor(b1)
    r0: f32[4] = aten.neg(p)
    r1: f32[4] = aten.neg(q)
    return output("a", r0), output("b", r1)
"""
WRITTEN_SIBLING = """
    x: f32[4] = input("x")
    both: (f32[2], f32[2]) = c10d.reduce_scatter_tensor_coalesced([x, x], "sum", 2, "dp")
    b0: f32[2] = both[0]
    b1: f32[2] = both[1]
    early: f32[4] = aten.exp(x)
    w0: f32[2] = c10d.wait_tensor(b0)
    w1: f32[2] = c10d.wait_tensor(b1)
    write: f32[2] = aten.mul_.Tensor(w0, 2)
    r0: f32[2] = aten.neg(w0)
    r1: f32[2] = aten.neg(w1)
    return output("a", r0), output("b", r1), output("c", early)
"""
READ_SIBLING = WRITTEN_SIBLING.replace("mul_", "mul")
OWN_ELEMENTS = """
    x: f32[4] = input("x")
    pair: (f32[], f32[]) = aten.aminmax(x)
    low: f32[] = pair[0]
    high: f32[] = pair[1]
    write: f32[] = aten.add_.Tensor(low, 1)
    read_high: f32[] = aten.neg(high)
    read_low: f32[] = aten.neg(low)
    return output("a", read_high), output("b", read_low)
"""
SPLIT_ELEMENTS = """
    x: f32[4] = input("x")
    parts: (f32[2], f32[2]) = aten.split.Tensor(x, 2)
    last: f32[2] = parts[1]
    write: f32[2] = aten.add_.Tensor(last, 1)
    read: f32[4] = aten.neg(x)
    return output("a", read)
"""
LIST_READ_WHOLE = """
    x: f32[4] = input("x")
    pair: (f32[4], f32[4]) = aten._foreach_add.Scalar([x, x], 1)
    one: f32[4] = pair[1]
    write: f32[4] = aten.add_.Tensor(one, 1)
    joined: f32[8] = aten.cat(pair)
    return output("a", joined)
"""
UNDECLARED_ALIAS = """
    x: f32[4] = input("x")
    flat: f32[2, 2] = aten._unsafe_view(x, [2, 2])
    write: f32[2, 2] = aten.add_.Tensor(flat, 1)
    read: f32[4] = aten.neg(x)
    return output("a", read)
"""
TRAINING_BATCH_NORM = """
    x: f32[2, 3, 4] = input("x")
    mean: f32[3] = buffer("mean")
    var: f32[3] = buffer("var")
    norm: f32[2, 3, 4] = aten.batch_norm(x, None, None, mean, var, True, 0.1, 1e-05, False)
    read: f32[3] = aten.neg(mean)
    return output("a", norm), output("b", read)
"""
EVAL_BATCH_NORM = TRAINING_BATCH_NORM.replace("True", "False")
SAME_CONSTANT = """
    k: f32[4] = constant("k")
    again: f32[4] = constant("k")
    write: f32[4] = aten.add_.Tensor(k, 1)
    read: f32[4] = aten.neg(again)
    return output("a", read)
"""
FOREACH_WRITE = """
    x: f32[4] = input("x")
    y: f32[4] = input("y")
    write = aten._foreach_add_.Scalar([x, y], 1)
    read: f32[4] = aten.neg(y)
    return output("a", read)
"""
SIDE_EFFECTS = """
    x: f32[4] = input("x")
    ok: b8[] = aten.all(x)
    first = aten._assert_async.msg(ok, "one")
    plain: f32[4] = aten.relu(x)
    second = aten._assert_async.msg(ok, "two")
    return output("a", plain)
"""
NO_INPUTS = """
    x: f32[4] = input("x")
    y: f32[4] = input("y")
    ones: f32[4] = aten.ones([4])
    write: f32[4] = aten.add_.Tensor(x, 1)
    return output("a", ones)
"""

RISES = [
    (MUTATED_INPUT, "write", "before", "before reads memory written by write"),
    (MUTATED_INPUT, "after", "write", "write writes memory read by after"),
    (MUTATED_INPUT, "other", "write", None),
    (MUTATED_THROUGH_VIEW, "write", "before", "before reads memory written by write"),
    (MUTATED_THROUGH_VIEW, "after", "write", "write writes memory read by after"),
    (MUTATED_THROUGH_VIEW, "before", "right", "right is an input of before"),
    (WRITTEN_TWICE, "second", "first", "first writes memory read by second"),
    (RANDOM, "two", "plain", None),
    (RANDOM, "two", "one", "one draws random numbers before two"),
    (RANDOM, "plain", "one", None),
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
    (RANDOM, "one", "plain", None),
    (RANDOM, "one", "two", "two draws random numbers after one"),
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
    title = next(name for name, value in globals().items() if value is text and name.isupper()).lower()
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


ALIASES = {
    "view": "aten.view(x, [16])",
    "transpose": "aten.t(x)",
    "reshape": "aten.reshape(x, [2, 8])",
    "expand": "aten.expand(x, [3, 4, 4])",
    "to-same-dtype": "aten.to.dtype(x, f32)",
    "contiguous": "aten.contiguous(x)",
    "detach": "aten.detach(x)",
    "alias": "aten.alias(x)",
    "unsafe-view": "aten._unsafe_view(x, [16])",
    "type-as": "aten.type_as(x, x)",
    "sum-to-size": "aten.sum_to_size(x, [4, 4])",
    "at-least-1d": "aten.atleast_1d(x)",
    "dropout-in-eval": "aten.dropout(x, 0.5, False)",
    "alpha-dropout-in-eval": "aten.alpha_dropout(x, 0.5, False)",
    "einsum-permute": 'aten.einsum("ij->ji", [x])',
    "conj-physical": "aten.conj_physical(x)",
    "split": "aten.split.Tensor(x, 2)",
    "unsafe-split": "aten.unsafe_split.Tensor(x, 2)",
    "unsafe-chunk": "aten.unsafe_chunk(x, 2)",
    "unbind": "aten.unbind.int(x)",
    "broadcast-tensors": "aten.broadcast_tensors([x, x])",
    "in-place": "aten.add_.Tensor(x, 1)",
    "out": "aten.add.out(y, y, out=x)",
    "two-outs": "aten.aminmax.out(y, dim=0, min=z, max=row)",
    "clone": "aten.clone(x)",
    "relu": "aten.relu(x)",
    "cat-of-one": "aten.cat([x])",
    "constant-pad-by-nothing": "aten.constant_pad_nd(x, [0, 0])",
    "to-copy": "aten._to_copy(x)",
    "layer-norm": "aten.native_layer_norm(x, [4], None, None, 1e-05)",
}


@pytest.mark.parametrize("call", ALIASES.values(), ids=ALIASES)
def test_alias_roots_match_real_memory(call):
    """Run the op on real tensors: what shares storage must share a root, and ops known to copy must not."""
    element = "element = result[0]" if "(" in _type_of(call) else "element = aten.alias(result)"
    program = program_of(f"""
        x: f32[4, 4] = input("x")
        y: f32[4, 4] = input("y")
        z: f32[4] = input("z")
        row: f32[4] = input("row")
        result = {call}
        {element}
        return output("e", element)
    """)
    inputs = [torch.randn(4, 4), torch.randn(4, 4), torch.randn(4), torch.randn(4)]
    (value,) = program.module()(*inputs)
    storages = {
        tensor.untyped_storage().data_ptr(): node for tensor, node in zip(inputs, program.placeholders, strict=True)
    }
    owner = storages.get(value.untyped_storage().data_ptr())
    root = alias_roots(program.graph.nodes)[named(program)["element"]]
    assert root.name == (owner.name if owner is not None else root.name)
    assert (root.op == "placeholder") == (owner is not None)


def _type_of(call: str) -> str:
    header = (
        'x: f32[4, 4] = input("x")\ny: f32[4, 4] = input("y")\nz: f32[4] = input("z")\nrow: f32[4] = input("row")\n'
    )
    text = str(program_of(f'{header}result = {call}\nreturn output("x", x)'))
    return text.splitlines()[4].split(" = ")[0]


def test_second_out_is_its_own_memory():
    program = program_of("""
        x: f32[4, 4] = input("x")
        low: f32[4] = input("low")
        high: f32[4] = input("high")
        pair: (f32[4], f32[4]) = aten.aminmax.out(x, dim=0, min=low, max=high)
        second: f32[4] = pair[1]
        same: f32[4] = pair[-1]
        return output("a", second), output("b", same)
    """)
    node, roots = named(program), alias_roots(program.graph.nodes)
    assert roots[node["second"]] is node["high"]
    assert roots[node["same"]] is node["high"]
    assert names(written_inputs(node["pair"])) == ["low", "high"]


def test_elements_of_one_index_are_one_memory():
    program = program_of("""
        x: f32[4] = input("x")
        pair: (f32[], f32[]) = aten.aminmax(x)
        a: f32[] = pair[1]
        b: f32[] = pair[-1]
        c: f32[] = pair[0]
        return output("a", a), output("b", b), output("c", c)
    """)
    node, roots = named(program), alias_roots(program.graph.nodes)
    assert roots[node["a"]] is roots[node["b"]]
    assert roots[node["c"]] is not roots[node["a"]]


@pytest.mark.parametrize(
    ("call", "random"),
    [
        ("aten.rand_like(x)", True),
        ("aten.bernoulli_.float(x)", True),
        ("aten.native_dropout(x, 0.5, True)", True),
        ("aten.dropout(x, 0.5, True)", True),
        ("aten.relu(x)", False),
        ("aten.empty_like(x)", False),
    ],
)
def test_is_random(call, random):
    program = program_of(f'x: f32[4] = input("x")\ny = {call}\nreturn output("x", x)')
    assert is_random(named(program)["y"]) is random


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
    x, one, plain, two, output = program.graph.nodes
    assert reorder(program.graph, [x, one, plain, two, output]) is False
    assert reorder(program.graph, [x, plain, one, two, output]) is True
    assert names(program.graph.nodes) == ["x", "plain", "one", "two", "output"]
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


def test_attention_is_random_only_with_dropout():
    program = parse("""
q: f32[1, 2, 4, 8] = input("q")
plain = aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)
zero = aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0, True)
some = aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.1)
return output("q", q)
""")
    attention = [node for node in program.graph.nodes if node.op == "call_function"]
    assert [is_random(node) for node in attention] == [False, False, True]
