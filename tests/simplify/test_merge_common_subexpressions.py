"""Equal computations become one; draws, writes, collectives, results and what would be held do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from crossfade.graph.passes import PassResult, run_passes
from crossfade.graph.private import FakeTensorMode
from crossfade.graph.program import Input, InputKind, Output, OutputKind, Program, from_graph_module
from crossfade.simplify.merge_common_subexpressions import MergeCommonSubexpressions
from tests.growth import grows_linearly
from tests.simplify.holds import declines, program_of, rewrites

MERGED = {
    "however the arguments are spelled": (
        """
        x: f32[4, 2] = input("x")
        a: f32[4] = aten.sum.dim_IntList(x, [1])
        b: f32[4] = aten.sum.dim_IntList(x, dim=[1], keepdim=False)
        y: f32[4] = aten.mul.Tensor(a, b)
        return output("y", y)
        """,
        """
        x: f32[4, 2] = input("x")
        a: f32[4] = aten.sum.dim_IntList(x, [1])
        y: f32[4] = aten.mul.Tensor(a, a)
        return output("y", y)
        """,
        {"merged": 1},
    ),
    "elements of lists, and the list with them": (
        """
        x: f32[4, 2] = input("x")
        s: (f32[2, 2], f32[2, 2]) = aten.split.Tensor(x, 2)
        a: f32[2, 2] = s[0]
        m: (f32[2], i64[2]) = aten.max.dim(a, 1)
        v: f32[2] = m[0]
        t: (f32[2, 2], f32[2, 2]) = aten.split.Tensor(x, 2)
        b: f32[2, 2] = t[0]
        n: (f32[2], i64[2]) = aten.max.dim(b, 1)
        w: f32[2] = n[0]
        i: i64[2] = n[1]
        y: f32[2] = aten.mul.Tensor(v, w)
        return output("y", y), output("i", i)
        """,
        """
        x: f32[4, 2] = input("x")
        s: (f32[2, 2], f32[2, 2]) = aten.split.Tensor(x, 2)
        a: f32[2, 2] = s[0]
        m: (f32[2], i64[2]) = aten.max.dim(a, 1)
        v: f32[2] = m[0]
        n: (f32[2], i64[2]) = aten.max.dim(a, 1)
        i: i64[2] = n[1]
        y: f32[2] = aten.mul.Tensor(v, v)
        return output("y", y), output("i", i)
        """,
        {"merged": 2},
    ),
    "numbers and constructors": (
        """
        k: int = scalar("k")
        i: int = operator.add(k, 1)
        j: int = operator.add(k, 1)
        a: f32[2] = aten.full([2], i, dtype=f32)
        b: f32[2] = aten.full([2], j, dtype=f32)
        y: f32[2] = aten.add.Tensor(a, b)
        return output("y", y)
        """,
        """
        k: int = scalar("k")
        i: int = operator.add(k, 1)
        a: f32[2] = aten.full([2], i, dtype=f32)
        y: f32[2] = aten.add.Tensor(a, a)
        return output("y", y)
        """,
        {"merged": 2},
    ),
    "reads between the same writes": (
        """
        x: f32[4] = input("x")
        c: f32[4] = aten.clone(x)
        a: f32[4] = aten.neg(c)
        w: f32[4] = aten.add_.Tensor(c, 1)
        b: f32[4] = aten.neg(c)
        d: f32[4] = aten.neg(c)
        y: f32[4] = aten.mul.Tensor(a, b)
        z: f32[4] = aten.mul.Tensor(y, d)
        return output("z", z)
        """,
        """
        x: f32[4] = input("x")
        c: f32[4] = aten.clone(x)
        a: f32[4] = aten.neg(c)
        w: f32[4] = aten.add_.Tensor(c, 1)
        b: f32[4] = aten.neg(c)
        y: f32[4] = aten.mul.Tensor(a, b)
        z: f32[4] = aten.mul.Tensor(y, b)
        return output("z", z)
        """,
        {"merged": 1},
    ),
    "a third one, where the second is a result like the first": (
        """
        x: f32[4] = input("x")
        a: f32[4] = aten.neg(x)
        b: f32[4] = aten.neg(x)
        c: f32[4] = aten.neg(x)
        d: f32[4] = aten.exp(c)
        return output("a", a), output("b", b), output("d", d)
        """,
        """
        x: f32[4] = input("x")
        a: f32[4] = aten.neg(x)
        b: f32[4] = aten.neg(x)
        d: f32[4] = aten.exp(b)
        return output("a", a), output("b", b), output("d", d)
        """,
        {"merged": 1, "left": 1},
    ),
}


def test_dead_lists_are_left_to_others() -> None:
    program = program_of("""
        x: f32[4] = input("x")
        s: (f32[2], f32[2]) = aten.split.Tensor(x, 2)
        t: (f32[2], f32[2]) = aten.split.Tensor(x, 2)
        return output("x", x)
    """)
    assert not run_passes(program, [MergeCommonSubexpressions()]).history[0].changed


@pytest.mark.parametrize("name", MERGED)
def test_merged(name: str) -> None:
    rewrites(MergeCommonSubexpressions(), *MERGED[name])


UNEQUAL = {
    "draws": ("aten.rand_like(x)", "aten.rand_like(x)"),
    "numbers of another type": ("aten.mul.Tensor(x, 1)", "aten.mul.Tensor(x, 1.0)"),
    "zeros of another sign": ("aten.mul.Tensor(x, 0.0)", "aten.mul.Tensor(x, -0.0)"),
    "other operators": ("aten.neg(x)", "aten.exp(x)"),
    "other arguments": ("aten.mul.Tensor(x, y)", "aten.mul.Tensor(y, x)"),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_unequal(name: str) -> None:
    first, second = UNEQUAL[name]
    program = program_of(f"""
        x: f32[4] = input("x")
        y: f32[4] = input("y")
        a: f32[4] = {first}
        b: f32[4] = {second}
        c: f32[4] = aten.add.Tensor(a, b)
        return output("c", c)
    """)
    done = run_passes(program, [MergeCommonSubexpressions()])
    assert done.history[0].counts == {"merged": 0, "left": 0}


def test_writes_of_equal_values_tell_them_apart() -> None:
    """Both copies are written once each, differently: what is read from them then differs."""
    declines(
        MergeCommonSubexpressions(),
        """
        x: f32[4] = input("x")
        a: f32[4] = aten.clone(x)
        b: f32[4] = aten.clone(x)
        v: f32[4] = aten.add_.Tensor(a, 1)
        w: f32[4] = aten.mul_.Tensor(b, 2)
        p: f32[4] = aten.neg(a)
        q: f32[4] = aten.neg(b)
        y: f32[4] = aten.mul.Tensor(p, q)
        return output("y", y)
        """,
        "its memory is written to",
    )


DECLINED = {
    "two results share no memory": (
        """
        x: f32[4] = input("x")
        a: f32[4] = aten.neg(x)
        b: f32[4] = aten.neg(x)
        return output("a", a), output("b", b)
        """,
        "two results of the program would share memory",
    ),
    "elements that are results share none": (
        """
        x: f32[4, 2] = input("x")
        m: (f32[4], i64[4]) = aten.max.dim(x, 1)
        a: f32[4] = m[0]
        n: (f32[4], i64[4]) = aten.max.dim(x, 1)
        b: f32[4] = n[0]
        return output("a", a), output("b", b)
        """,
        "a result of the program shares its memory",
    ),
    "two views that are results stay two tensors": (
        """
        x: f32[4, 2] = input("x")
        a: f32[2, 4] = aten.t(x)
        b: f32[2, 4] = aten.t(x)
        return output("a", a), output("b", b)
        """,
        "it is a result of the program, which keeps a tensor of its own",
    ),
    "buffers that are written stay two": (
        """
        x: f32[4] = input("x")
        a: f32[4] = aten.zeros([4])
        b: f32[4] = aten.zeros([4])
        v: f32[4] = aten.add_.Tensor(a, x)
        y: f32[4] = aten.mul.Tensor(v, b)
        return output("y", y)
        """,
        "its memory is written to",
    ),
    "what may be a copy, where somebody could see": (
        """
        x: f32[4, 2] = input("x")
        t: f32[2, 4] = aten.t(x)
        a: f32[8] = aten.reshape(t, [8])
        b: f32[8] = aten.reshape(t, [8])
        v: f32[8] = aten.add_.Tensor(a, 1)
        y: f32[8] = aten.mul.Tensor(v, b)
        return output("y", y)
        """,
        "it may be a view or a copy",
    ),
    "views of what may be a copy": (
        """
        x: f32[4, 2] = input("x")
        t: f32[2, 4] = aten.t(x)
        a: f32[8] = aten.reshape(t, [8])
        b: f32[] = aten.select.int(a, 0, 0)
        c: f32[8] = aten.reshape(t, [8])
        d: f32[] = aten.select.int(c, 0, 0)
        v: f32[] = aten.add_.Tensor(d, 1)
        return output("c", c), output("b", b)
        """,
        "it may be a view or a copy",
    ),
}


@pytest.mark.parametrize("name", DECLINED)
def test_declined(name: str) -> None:
    declines(MergeCommonSubexpressions(), *DECLINED[name])


def test_three_views_of_which_two_are_results() -> None:
    rewrites(
        MergeCommonSubexpressions(),
        """
        x: f32[4, 2] = input("x")
        a: f32[2, 4] = aten.t(x)
        b: f32[2, 4] = aten.t(x)
        c: f32[2, 4] = aten.t(x)
        y: f32[2, 4] = aten.neg(a)
        return output("b", b), output("c", c), output("y", y)
        """,
        """
        x: f32[4, 2] = input("x")
        a: f32[2, 4] = aten.t(x)
        c: f32[2, 4] = aten.t(x)
        y: f32[2, 4] = aten.neg(a)
        return output("b", a), output("c", c), output("y", y)
        """,
        {"merged": 1, "left": 1},
    )


COMMUNICATING = """
    x: f32[4] = input("x")
    a: f32[4] = aten.mul.Tensor(x, {one})
    b: f32[4] = aten.mul.Tensor(x, {one})
    s: f32[4] = c10d.all_reduce(a, "sum", "dp")
    t: f32[4] = c10d.all_reduce(b, "sum", "dp")
    v: f32[4] = c10d.wait_tensor(s)
    w: f32[4] = c10d.wait_tensor(t)
    c: f32[4] = aten.neg(v)
    d: f32[4] = aten.neg(w)
    y: f32[4] = aten.add.Tensor(c, d)
    return output("y", y)
"""


def test_collectives_are_left_alone() -> None:
    declines(MergeCommonSubexpressions(), COMMUNICATING.format(one=2), "its numbers may differ", dp=2)
    done = run_passes(program_of(COMMUNICATING.format(one="x"), dp=2), [MergeCommonSubexpressions()])
    assert [str(verdict) for verdict in done.history[0].verdicts] == [
        "t: left alone: collectives are left to merge-duplicate-collectives: equal to s"
    ]
    assert done.history[0].counts == {"merged": 1, "left": 1}
    alike = run_passes(program_of(COMMUNICATING.format(one=2), dp=2), [MergeCommonSubexpressions(alike=True)])
    assert alike.history[0].counts == {"merged": 1, "left": 1}


def test_second_waits_stay_but_what_is_made_of_them_does_not() -> None:
    rewrites(
        MergeCommonSubexpressions(),
        """
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        v: f32[4] = c10d.wait_tensor(s)
        w: f32[4] = c10d.wait_tensor(s)
        c: f32[4] = aten.neg(v)
        d: f32[4] = aten.neg(w)
        y: f32[4] = aten.add.Tensor(c, d)
        return output("y", y)
        """,
        """
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        v: f32[4] = c10d.wait_tensor(s)
        w: f32[4] = c10d.wait_tensor(s)
        c: f32[4] = aten.neg(v)
        y: f32[4] = aten.add.Tensor(c, c)
        return output("y", y)
        """,
        {"merged": 1, "left": 1},
        dp=2,
    )


RECOMPUTED = """
    x: f32[4] = input("x")
    a: f32[4] = aten.neg(x)
    b: f32[4] = aten.exp(a)
    c: f32[4] = aten.sin(b)
    d: f32[4] = aten.neg(x)
    y: f32[4] = aten.mul.Tensor(c, d)
    return output("y", y)
"""


def test_what_would_be_held_is_computed_again() -> None:
    declines(MergeCommonSubexpressions(held_bytes=15, near=1), RECOMPUTED, "it would be held in memory")
    for options in ({"held_bytes": 16, "near": 1}, {"held_bytes": 15, "near": 2}):
        done = run_passes(program_of(RECOMPUTED), [MergeCommonSubexpressions(**options)])
        assert done.history[0].counts["merged"] == 1


def test_sizes_of_one_expression_are_one_value() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x + y).new_ones(x.shape[0]) + y.new_ones(y.shape[0])

    module = make_fx(function, tracing_mode="symbolic")(torch.ones(3), torch.ones(3))
    done = run_passes(from_graph_module(module), [MergeCommonSubexpressions()])
    sizes = done.graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int)
    assert len(sizes) == 1
    x, y = torch.randn(5), torch.randn(5)
    torch.testing.assert_close(done.module()(x, y)[0], function(x, y), rtol=0, atol=0)


def computed_twice(times: int) -> Program:
    """Each step computes one thing twice and adds both."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = torch.empty(4)
    last = x
    for _ in range(times):
        first, other = (graph.call_function(torch.ops.aten.mul.Tensor, (last, 2.0)) for _ in range(2))
        last = graph.call_function(torch.ops.aten.add.Tensor, (first, other))
        for node in (first, other, last):
            node.meta["val"] = x.meta["val"]
    graph.output((last,))
    return Program(graph, (Input(InputKind.INPUT, "x"),), (Output(OutputKind.OUTPUT, "y"),))


def test_work_grows_with_the_program():
    def work(times: int) -> Callable[[], PassResult]:
        program = computed_twice(times)
        return lambda: MergeCommonSubexpressions().run(program)

    assert work(50)().counts == {"merged": 50, "left": 0}
    grows_linearly(work, 500)
