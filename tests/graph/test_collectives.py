"""One view over every spelling of a collective."""

from __future__ import annotations

import pytest
import torch

from crossfade.graph import collectives, copy_engines, exchange_rows
from crossfade.graph.collectives import Kind
from crossfade.graph.program import Program
from crossfade.graph.text import parse

GROUPS = {"dp": 2}
INPUTS = """
    x: f32[4, 2] = input("x")
    y: bf16[2, 2] = input("y")
    out: f32[8, 2] = input("out")
    small: f32[2, 2] = input("small")
"""
has_reduce_scatter_out = pytest.mark.skipif(
    not hasattr(torch.ops._c10d_functional, "reduce_scatter_tensor_out"), reason="younger than this torch"
)

# call, kind, group_size, reduce_op, inputs, out, bytes, in_place
ONE_RESULT = {
    "all_reduce": ('c10d.all_reduce(x, "sum", "dp")', Kind.ALL_REDUCE, None, "sum", ["x"], None, 32, False),
    "all_reduce_": ('c10d.all_reduce_(x, "avg", "dp")', Kind.ALL_REDUCE, None, "avg", ["x"], None, 32, True),
    "bf16": ('c10d.all_reduce(y, "max", "dp")', Kind.ALL_REDUCE, None, "max", ["y"], None, 8, False),
    "all_gather": ('c10d.all_gather_into_tensor(x, 2, "dp")', Kind.ALL_GATHER, 2, None, ["x"], None, 64, False),
    "all_gather_out": (
        'c10d.all_gather_into_tensor_out(x, 2, "dp", out=out)',
        Kind.ALL_GATHER,
        2,
        None,
        ["x"],
        "out",
        64,
        False,
    ),
    "reduce_scatter": (
        'c10d.reduce_scatter_tensor(x, "sum", 2, "dp")',
        Kind.REDUCE_SCATTER,
        2,
        "sum",
        ["x"],
        None,
        32,
        False,
    ),
    "reduce_scatter_out": (
        'c10d.reduce_scatter_tensor_out(x, "sum", 2, "dp", out=small)',
        Kind.REDUCE_SCATTER,
        2,
        "sum",
        ["x"],
        "small",
        32,
        False,
    ),
    "all_to_all": (
        'c10d.all_to_all_single(x, [3, 3], [2, 2], "dp")',
        Kind.ALL_TO_ALL,
        None,
        None,
        ["x"],
        None,
        48,
        False,
    ),
    "broadcast": ('c10d.broadcast(x, 0, "dp")', Kind.BROADCAST, None, None, ["x"], None, 32, False),
    "broadcast_": ('c10d.broadcast_(x, 1, "dp")', Kind.BROADCAST, None, None, ["x"], None, 32, True),
    "by-keyword": (
        'c10d.all_reduce(x, reduce_op="sum", group_name="dp")',
        Kind.ALL_REDUCE,
        None,
        "sum",
        ["x"],
        None,
        32,
        False,
    ),
}
COALESCED = {
    "all_reduce": ('c10d.all_reduce_coalesced([x, y], "sum", "dp")', Kind.ALL_REDUCE, None, "sum", 40, False),
    "all_reduce_": ('c10d.all_reduce_coalesced_([x, y], "sum", "dp")', Kind.ALL_REDUCE, None, "sum", 40, True),
    "all_gather": ('c10d.all_gather_into_tensor_coalesced([x, y], 2, "dp")', Kind.ALL_GATHER, 2, None, 80, False),
    "reduce_scatter": (
        'c10d.reduce_scatter_tensor_coalesced([x, y], "sum", 2, "dp")',
        Kind.REDUCE_SCATTER,
        2,
        "sum",
        40,
        False,
    ),
}


def program_of(lines: str) -> Program:
    return parse(f"{INPUTS}{lines}", groups=GROUPS)


def named(program: Program) -> dict:
    return {node.name: node for node in program.graph.nodes}


def one_result_cases() -> list:
    marks = {"reduce_scatter_out": has_reduce_scatter_out}
    return [pytest.param(*case, id=name, marks=marks.get(name, ())) for name, case in ONE_RESULT.items()]


@pytest.mark.parametrize(
    ("call", "kind", "group_size", "reduce_op", "inputs", "out", "size", "in_place"), one_result_cases()
)
def test_one_result(call, kind, group_size, reduce_op, inputs, out, size, in_place):
    program = program_of(f"""
    start = {call}
    wait = c10d.wait_tensor(start)
    again = c10d.wait_tensor(start)
    return output("a", wait), output("b", again)
    """)
    node = named(program)
    (found,) = collectives.find(program.graph)
    assert found == collectives.view(node["start"])
    assert (found.kind, found.group, found.group_size, found.reduce_op) == (kind, "dp", group_size, reduce_op)
    assert [source.name for source in found.inputs] == inputs
    assert (found.out and found.out.name) == out
    assert (found.bytes, found.in_place, found.coalesced) == (size, in_place, False)
    assert found.results == (node["start"],)
    assert found.waits == (node["wait"], node["again"])
    assert found.dtype is node[inputs[0]].meta["val"].dtype
    assert collectives.started_by(node["again"]) is node["start"]


@pytest.mark.parametrize(
    ("call", "kind", "group_size", "reduce_op", "size", "in_place"), COALESCED.values(), ids=COALESCED
)
def test_coalesced(call, kind, group_size, reduce_op, size, in_place):
    program = program_of(f"""
    start = {call}
    second = start[1]
    first = start[0]
    wait_second = c10d.wait_tensor(second)
    wait_first = c10d.wait_tensor(first)
    return output("a", wait_first), output("b", wait_second)
    """)
    node = named(program)
    (found,) = collectives.find(program.graph)
    assert (found.kind, found.group, found.group_size, found.reduce_op) == (kind, "dp", group_size, reduce_op)
    assert found.inputs == (node["x"], node["y"])
    assert (found.bytes, found.in_place, found.coalesced, found.out) == (size, in_place, True, None)
    assert found.results == (node["first"], node["second"])
    assert found.waits == (node["wait_first"], node["wait_second"])
    assert collectives.started_by(node["wait_second"]) is node["start"]


def test_every_spelling_of_this_torch_is_tried_above():
    """A spelling added to the table without a test, or an op of torch that the table misses, fails here."""
    ops = torch.ops._c10d_functional
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
    registered = {
        schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("_c10d_functional::")
    }
    known = {name.removeprefix("_c10d_functional::") for name in registered}
    expected = {getattr(ops, name).default for name in known if name.startswith(kinds)}
    elsewhere = {exchange_rows.OPERATOR, copy_engines.OPERATOR}  # tried in tests of their own
    assert set(collectives._SPELLINGS) == expected | elsewhere
    tried = " ".join([*(case[0] for case in ONE_RESULT.values()), *(case[0] for case in COALESCED.values())])
    assert {op for op in expected if f"c10d.{op._schema.name.split('::')[1]}(" not in tried} == set()


def test_a_collective_without_waits():
    program = program_of("""
    start = c10d.all_reduce(x, "sum", "dp")
    return output("a", x)
    """)
    (found,) = collectives.find(program.graph)
    assert (found.waits, found.results) == ((), (found.node,))


def test_what_is_no_collective():
    program = program_of("""
    ordinary = c10d.wait_tensor(x)
    part = aten.unbind.int(x)
    element = part[0]
    waited = c10d.wait_tensor(element)
    return output("a", ordinary), output("b", waited)
    """)
    node = named(program)
    assert collectives.find(program.graph) == []
    assert collectives.started_by(node["ordinary"]) is None
    assert collectives.started_by(node["waited"]) is None
    assert collectives.is_wait(node["waited"]) and not collectives.is_collective(node["waited"])
    assert not collectives.is_wait(node["x"]) and not collectives.is_collective(node["x"])


TWO_GROUPS = """
    a = c10d.all_gather_into_tensor(x, 2, "dp")
    b = c10d.all_reduce(x, reduce_op="sum", group_name="tp")
    c = c10d.all_reduce(x, "sum", "dp")
    return output("x", x)
"""


def test_group_sizes_take_what_ops_say():
    assert collectives.group_sizes(program_of(TWO_GROUPS).graph) == {"dp": 2, "tp": 0}


def test_count_by_kind():
    assert collectives.count_by_kind(program_of(TWO_GROUPS).graph) == {"all_gather": (1, 64), "all_reduce": (2, 64)}


def test_rename_groups_in_any_spelling():
    program = program_of(TWO_GROUPS)
    collectives.rename_groups(program.graph.nodes, {"dp": "0", "tp": "7", "x": "no group"})
    assert [collective.group for collective in collectives.find(program.graph)] == ["0", "7", "0"]
    assert dict(named(program)["b"].kwargs) == {"reduce_op": "sum", "group_name": "7"}


@pytest.mark.parametrize(
    ("call", "form"),
    [
        ('c10d.all_reduce(x, "sum", "dp")', "all_reduce_"),
        ('c10d.broadcast(x, 0, "dp")', "broadcast_"),
        ('c10d.all_gather_into_tensor(x, 2, "dp")', None),
    ],
)
def test_in_place_form(call, form):
    program = program_of(f'    start = {call}\n    return output("x", x)')
    found = collectives.in_place_form(named(program)["start"])
    assert found is (getattr(torch.ops._c10d_functional, form).default if form else None)


@pytest.mark.parametrize(
    ("build", "kind", "group_size"),
    [
        (lambda x: collectives.all_reduce(x, "sum", "dp"), Kind.ALL_REDUCE, None),
        (lambda x: collectives.all_gather(x, 2, "dp"), Kind.ALL_GATHER, 2),
        (lambda x: collectives.all_to_all(x, 2, "dp"), Kind.ALL_TO_ALL, None),
        (lambda x: collectives.broadcast(x, 0, "dp"), Kind.BROADCAST, None),
    ],
    ids=["all_reduce", "all_gather", "all_to_all", "broadcast"],
)
def test_builders_make_what_view_reads(build, kind, group_size):
    from torch.fx.experimental.proxy_tensor import make_fx

    module = make_fx(lambda x: collectives.wait(build(x)), tracing_mode="fake")(torch.ones(4))
    (found,) = collectives.find(module.graph)
    assert (found.kind, found.group, found.group_size, len(found.waits)) == (kind, "dp", group_size, 1)


@pytest.mark.parametrize(
    ("lines", "plain"),
    [
        ('one = c10d.all_reduce(x, "sum", "dp")', True),
        ('one = c10d.all_reduce_(x, "sum", "dp")', False),
        ('one = c10d.all_gather_into_tensor_out(x, 2, "dp", out=out)', False),
        ('start = c10d.all_reduce_coalesced([x], "sum", "dp")\n    one = start[0]', False),
        ('one = c10d.all_reduce(x, "sum", "dp")\n    late = aten.neg(one)', False),
    ],
    ids=["functional", "in place", "into a buffer", "coalesced", "read without its wait"],
)
def test_plain(lines, plain):
    program = program_of(f"""
    {lines}
    wait = c10d.wait_tensor(one)
    return output("a", wait)
    """)
    assert collectives.find(program.graph)[0].plain is plain


def test_what_is_never_waited_for_is_not_plain():
    program = program_of('    start = c10d.all_reduce(x, "sum", "dp")\n    return output("x", x)')
    assert not collectives.find(program.graph)[0].plain


def test_settings_are_the_same_in_every_spelling():
    program = program_of(TWO_GROUPS.replace('c10d.all_reduce(x, "sum", "dp")', 'c10d.all_reduce(y, "sum", "tp")'))
    gather, by_keyword, by_position = collectives.find(program.graph)
    assert collectives.settings(gather.node) == (2, "dp")
    assert collectives.settings(by_keyword.node) == collectives.settings(by_position.node) == ("sum", "tp")


def test_all_to_all_exchanges_equal_parts():
    from torch.fx.experimental.proxy_tensor import make_fx

    module = make_fx(lambda x: collectives.all_to_all(x, 2, "dp"), tracing_mode="fake")(torch.ones(6, 2))
    (found,) = collectives.find(module.graph)
    assert collectives.settings(found.node) == ([3, 3], [3, 3], "dp")
    assert found.node.meta["val"].shape == (6, 2)
