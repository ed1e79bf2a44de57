"""Sums of reductions become reductions of sums: what may stand between, what is declined, the numbers on ranks."""

from __future__ import annotations

import functools
import textwrap
from typing import Any

import pytest

from crossfade.communicate.add_before_reducing import AddBeforeReducing
from crossfade.graph import collectives
from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify
from tests.communicate.on_ranks import differences


def added(text: str) -> Program:
    done = run_passes(parse(textwrap.dedent(text), groups={"dp": 2, "tp": 2}), [AddBeforeReducing()])
    verify(done, recompute=True)
    return done


def check(before: str, after: str) -> Program:
    done = added(before)
    assert render(done) == textwrap.dedent(after).strip()
    return done


def test_steps_taken_alike_are_taken_once_after_and_others_before() -> None:
    done = check(
        """
        a: f32[4, 6] = input("a")
        b: f32[24] = input("b")
        s: f32[4, 6] = c10d.all_reduce(a, "avg", "dp")
        w: f32[4, 6] = c10d.wait_tensor(s)
        h: f32[4, 6] = aten.mul.Tensor(w, 0.5)
        p: f32[6, 4] = aten.t(h)
        q: f32[24] = c10d.all_reduce(b, "avg", "dp")
        u: f32[24] = c10d.wait_tensor(q)
        v: f32[4, 6] = aten.view(u, [4, 6])
        r: f32[6, 4] = aten.t(v)
        y: f32[6, 4] = aten.sub.Tensor(p, r, alpha=3)
        return output("y", y)
        """,
        """
        a: f32[4, 6] = input("a")
        b: f32[24] = input("b")
        mul: f32[4, 6] = aten.mul.Tensor(a, 0.5)
        view: f32[4, 6] = aten.view(b, [4, 6])
        sub: f32[4, 6] = aten.sub.Tensor(mul, view, alpha=3)
        all_reduce: f32[4, 6] = c10d.all_reduce(sub, "avg", "dp")
        wait_tensor: f32[4, 6] = c10d.wait_tensor(all_reduce)
        t: f32[6, 4] = aten.t(wait_tensor)
        return output("y", t)
        """,
    )
    assert [str(verdict) for verdict in done.history[0].verdicts] == [
        "s: fused: added to another before reducing: to q",
        "q: fused: added to another before reducing: to s",
    ]
    assert [verdict.bytes for verdict in done.history[0].verdicts] == [96, 96]


def test_sums_of_more_collapse_and_start_where_the_last_did() -> None:
    done = check(
        """
        a: i64[4] = input("a")
        s: i64[2] = c10d.reduce_scatter_tensor(a, "sum", 2, "dp")
        w: i64[2] = c10d.wait_tensor(s)
        b: i64[4] = aten.neg(a)
        t: i64[2] = c10d.reduce_scatter_tensor(b, "sum", 2, "dp")
        u: i64[2] = c10d.wait_tensor(t)
        x: i64[2] = aten.add.Tensor(w, u)
        c: i64[4] = aten.abs(a)
        q: i64[2] = c10d.reduce_scatter_tensor(c, "sum", 2, "dp")
        d: i64[4] = aten.sign(a)
        v: i64[2] = c10d.wait_tensor(q)
        y: i64[2] = aten.add.Tensor(v, x)
        return output("y", y), output("d", d)
        """,
        """
        a: i64[4] = input("a")
        b: i64[4] = aten.neg(a)
        add: i64[4] = aten.add.Tensor(a, b)
        c: i64[4] = aten.abs(a)
        add_1: i64[4] = aten.add.Tensor(c, add)
        reduce_scatter_tensor_1: i64[2] = c10d.reduce_scatter_tensor(add_1, "sum", 2, "dp")
        d: i64[4] = aten.sign(a)
        wait_tensor_1: i64[2] = c10d.wait_tensor(reduce_scatter_tensor_1)
        return output("y", wait_tensor_1), output("d", d)
        """,
    )
    assert done.history[0].counts == {"fused": 2, "left": 0}


STEPS = {
    "view": ("f32[4, 6]", "n = aten.view(w, [4, 6])", "f32[24]"),
    "reshape": ("f32[4, 6]", "n = aten.reshape(w, [4, 6])", "f32[24]"),
    "unsafe view": ("f32[4, 6]", "n = aten._unsafe_view(w, [4, 6])", "f32[24]"),
    "unsqueeze": ("f32[4, 1]", "n = aten.unsqueeze(w, 1)", "f32[4]"),
    "squeeze": ("f32[4]", "n = aten.squeeze.dim(w, 0)", "f32[1, 4]"),
    "neg": ("f32[4]", "n = aten.neg(w)", "f32[4]"),
    "division": ("f32[4]", "n = aten.div.Tensor(w, 3)", "f32[4]"),
    "clone": ("f32[4]", "n = aten.clone(w)", "f32[4]"),
}


@pytest.mark.parametrize("name", STEPS)
def test_one_term_takes_a_step(name: str) -> None:
    kind, step, other = STEPS[name]
    done = added(f"""
        a: {kind} = input("a")
        b: {other} = input("b")
        s = c10d.all_reduce(a, "sum", "dp")
        u = c10d.wait_tensor(s)
        t = c10d.all_reduce(b, "sum", "dp")
        w = c10d.wait_tensor(t)
        {step}
        y = aten.add.Tensor(u, n)
        return output("y", y)
    """)
    assert done.history[0].counts == {"fused": 1, "left": 0}
    assert len(collectives.find(done.graph)) == 1


def test_partial_sums_with_gaps_are_reshaped() -> None:
    check(
        """
        a: f32[24] = input("a")
        b: f32[4, 8] = input("b")
        p: f32[4, 6] = aten.slice.Tensor(b, 1, 0, 6)
        s: f32[24] = c10d.all_reduce(a, "sum", "dp")
        w: f32[24] = c10d.wait_tensor(s)
        q: f32[4, 6] = c10d.all_reduce(p, "sum", "dp")
        u: f32[4, 6] = c10d.wait_tensor(q)
        v: f32[24] = aten.view(u, [24])
        y: f32[24] = aten.add.Tensor(w, v)
        return output("y", y)
        """,
        """
        a: f32[24] = input("a")
        b: f32[4, 8] = input("b")
        p: f32[4, 6] = aten.slice.Tensor(b, 1, 0, 6)
        clone: f32[4, 6] = aten.clone(p, memory_format=contiguous_format)
        _unsafe_view: f32[24] = aten._unsafe_view(clone, [24])
        add: f32[24] = aten.add.Tensor(a, _unsafe_view)
        all_reduce: f32[24] = c10d.all_reduce(add, "sum", "dp")
        wait_tensor: f32[24] = c10d.wait_tensor(all_reduce)
        return output("y", wait_tensor)
        """,
    )


def test_what_is_scattered_is_dense() -> None:
    check(
        """
        a: f32[6, 4] = input("a")
        b: f32[6, 4] = input("b")
        p: f32[4, 6] = aten.t(a)
        q: f32[4, 6] = aten.t(b)
        s: f32[2, 6] = c10d.reduce_scatter_tensor(p, "sum", 2, "dp")
        w: f32[2, 6] = c10d.wait_tensor(s)
        t: f32[2, 6] = c10d.reduce_scatter_tensor(q, "sum", 2, "dp")
        u: f32[2, 6] = c10d.wait_tensor(t)
        y: f32[2, 6] = aten.add.Tensor(w, u)
        return output("y", y)
        """,
        """
        a: f32[6, 4] = input("a")
        b: f32[6, 4] = input("b")
        p: f32[4, 6] = aten.t(a)
        q: f32[4, 6] = aten.t(b)
        add: f32[4, 6] = aten.add.Tensor(p, q)
        clone: f32[4, 6] = aten.clone(add, memory_format=contiguous_format)
        reduce_scatter_tensor: f32[2, 6] = c10d.reduce_scatter_tensor(clone, "sum", 2, "dp")
        wait_tensor: f32[2, 6] = c10d.wait_tensor(reduce_scatter_tensor)
        return output("y", wait_tensor)
        """,
    )


PLAIN = 's = c10d.all_reduce(a, "sum", "dp")'
LEFT = {
    "they are different kinds of collective": (PLAIN, 't = c10d.reduce_scatter_tensor(c, "sum", 2, "dp")', "u", "v"),
    "they are of different groups": (PLAIN, 't = c10d.all_reduce(b, "sum", "tp")', "u", "v"),
    "they reduce differently, or by something that is not linear": (
        PLAIN,
        't = c10d.all_reduce(b, "avg", "dp")',
        "u",
        "v",
    ),
    "their shapes or dtypes differ": (PLAIN, 't = c10d.all_reduce(i, "sum", "dp")', "u", "v"),
    "the reduction is not linear in its dtype": (
        's = c10d.all_reduce(i, "avg", "dp")',
        't = c10d.all_reduce(j, "avg", "dp")',
        "u",
        "v",
    ),
    "one of the results has another use": (
        PLAIN,
        't = c10d.all_reduce(b, "sum", "dp")\n        z = aten.exp(u)',
        "u",
        "v",
    ),
    "one of them is scaled by a computed number": (PLAIN, 't = c10d.all_reduce(b, "sum", "dp")', "u", "v, alpha=k"),
    "a partial sum is written in place": (
        PLAIN,
        'z = aten.mul_.Tensor(a, 2)\n        t = c10d.all_reduce(b, "sum", "dp")',
        "u",
        "v",
    ),
}


@pytest.mark.parametrize("reason", LEFT)
def test_left(reason: str) -> None:
    first, second, left, right = LEFT[reason]
    done = added(f"""
        x: f32[4] = input("x")
        b: f32[4] = input("b")
        c: f32[8] = input("c")
        i: i64[4] = input("i")
        j: i64[4] = input("j")
        k: int = scalar("k")
        a: f32[4] = aten.neg(x)
        {first}
        u = c10d.wait_tensor(s)
        {second}
        v = c10d.wait_tensor(t)
        y = aten.add.Tensor({left}, {right})
        return output("y", y)
    """)
    assert not done.history[0].changed
    assert [(v.subject, v.outcome.value, v.reason) for v in done.history[0].verdicts] == [("y", "left alone", reason)]


def test_one_that_depends_on_the_other_is_another_use() -> None:
    done = added("""
        a: f32[4] = input("a")
        s: f32[4] = c10d.all_reduce(a, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        b: f32[4] = aten.neg(w)
        t: f32[4] = c10d.all_reduce(b, "sum", "dp")
        u: f32[4] = c10d.wait_tensor(t)
        y: f32[4] = aten.add.Tensor(w, u)
        return output("y", y)
    """)
    assert [v.reason for v in done.history[0].verdicts] == ["one of the results has another use"]


def test_a_layout_that_others_rely_on_stays() -> None:
    done = added("""
        a: f32[4, 6] = input("a")
        b: f32[6, 4] = input("b")
        s: f32[4, 6] = c10d.all_reduce(a, "sum", "dp")
        w: f32[4, 6] = c10d.wait_tensor(s)
        p: f32[6, 4] = aten.t(w)
        h: f32[6, 4] = aten.mul.Tensor(p, 2)
        t: f32[6, 4] = c10d.all_reduce(b, "sum", "dp")
        u: f32[6, 4] = c10d.wait_tensor(t)
        y: f32[6, 4] = aten.add.Tensor(h, u)
        return output("y", y)
    """)
    assert [v.reason for v in done.history[0].verdicts] == ["its layout in memory would change"]


NO_SUM_OF_TWO = {
    "one reduction": "y = aten.add.Tensor(u, a)",
    "the same one twice": "y = aten.add.Tensor(u, u)",
    "a result and its double": "d = aten.mul.Tensor(u, 2)\n        y = aten.add.Tensor(u, d)",
    "a step that is not linear": "d = aten.exp(v)\n        y = aten.add.Tensor(u, d)",
    "a scale that differs by element": "d = aten.mul.Tensor(v, a)\n        y = aten.add.Tensor(u, d)",
}


@pytest.mark.parametrize("name", NO_SUM_OF_TWO)
def test_no_candidate(name: str) -> None:
    done = added(f"""
        a: f32[4] = input("a")
        s: f32[4] = c10d.all_reduce(a, "sum", "dp")
        u: f32[4] = c10d.wait_tensor(s)
        t: f32[4] = c10d.all_reduce(a, "sum", "dp")
        v: f32[4] = c10d.wait_tensor(t)
        {NO_SUM_OF_TWO[name]}
        return output("y", y)
    """)
    assert not done.history[0].changed and not done.history[0].verdicts


def test_rearranged_scatters_are_no_candidates() -> None:
    done = added("""
        a: f32[4, 4] = input("a")
        b: f32[4, 4] = aten.neg(a)
        s: f32[2, 4] = c10d.reduce_scatter_tensor(a, "sum", 2, "dp")
        u: f32[2, 4] = c10d.wait_tensor(s)
        p: f32[4, 2] = aten.t(u)
        t: f32[2, 4] = c10d.reduce_scatter_tensor(b, "sum", 2, "dp")
        v: f32[2, 4] = c10d.wait_tensor(t)
        q: f32[4, 2] = aten.t(v)
        y: f32[4, 2] = aten.add.Tensor(p, q)
        return output("y", y)
    """)
    assert not done.history[0].changed


EXCHANGE = """
    a: {dtype}[8, 4] = input("a")
    b: {dtype}[32] = input("b")
    s: {dtype}[8, 4] = c10d.all_reduce(a, "sum", "dp")
    w: {dtype}[8, 4] = c10d.wait_tensor(s)
    p: {dtype}[4, 8] = aten.t(w)
    c: {dtype}[4, 8] = aten.clone(p, memory_format=contiguous_format)
    t: {dtype}[32] = c10d.all_reduce(b, "sum", "dp")
    u: {dtype}[32] = c10d.wait_tensor(t)
    h: {dtype}[32] = aten.mul.Tensor(u, 2)
    v: {dtype}[4, 8] = aten.view(h, [4, 8])
    y: {dtype}[4, 8] = aten.sub.Tensor(c, v, alpha=3)
    n: {dtype}[8, 4] = aten.neg(a)
    d: {dtype}[8, 4] = aten.mul.Tensor(a, 3)
    q = c10d.reduce_scatter_tensor(n, "sum", {ranks}, "dp")
    r = c10d.reduce_scatter_tensor(d, "sum", {ranks}, "dp")
    qw = c10d.wait_tensor(q)
    rw = c10d.wait_tensor(r)
    rn = aten.neg(rw)
    z = aten.add.Tensor(qw, rn)
    return output("y", y), output("z", z)
"""


def test_operands_by_keyword() -> None:
    text = """
        a: f32[4] = input("a")
        b: f32[4] = input("b")
        s: f32[4] = c10d.all_reduce(a, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        t: f32[4] = c10d.all_reduce(b, "sum", "dp")
        v: f32[4] = c10d.wait_tensor(t)
        y: f32[4] = aten.add.Tensor(w, other=v)
        return output("y", y)
    """
    done = run_passes(parse(textwrap.dedent(text), groups={"dp": 2}), [AddBeforeReducing()])
    assert render(done).splitlines()[2:] == [
        "add: f32[4] = aten.add.Tensor(a, b)",
        'all_reduce: f32[4] = c10d.all_reduce(add, "sum", "dp")',
        "wait_tensor: f32[4] = c10d.wait_tensor(all_reduce)",
        'return output("y", wait_tensor)',
    ]


@pytest.mark.ranks
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "i64"])
def test_ranks_get_the_same_numbers(ranks: Any, count: int, dtype: str) -> None:
    compare = functools.partial(differences, whole_numbers=True)
    text = EXCHANGE.format(dtype=dtype, ranks=count)
    assert ranks(count).run(compare, text, AddBeforeReducing()) == [[0.0, 0.0]] * count


@pytest.mark.ranks
@pytest.mark.parametrize("count", [2, 4])
def test_sums_differ_by_rounding_only(ranks: Any, count: int) -> None:
    compare = functools.partial(differences, whole_numbers=False)
    for found in ranks(count).run(compare, EXCHANGE.format(dtype="f32", ranks=count), AddBeforeReducing()):
        assert max(found) < 1e-5
