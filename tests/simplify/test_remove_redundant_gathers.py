"""Needless collectives go where one rank's graph shows it; ranks then get the same numbers."""

from __future__ import annotations

import functools
import textwrap
from typing import Any

import pytest

from crossfade.graph.passes import run_passes
from crossfade.graph.text import parse
from crossfade.simplify.remove_redundant_gathers import RemoveRedundantGathers
from tests.communicate.on_ranks import differences
from tests.simplify.holds import declines, rewrites

REWRITTEN = {
    "a scattered value gathered": (
        """
        x: f32[4] = input("x")
        s: f32[2] = c10d.reduce_scatter_tensor(x, "avg", 2, "dp")
        w: f32[2] = c10d.wait_tensor(s)
        e: f32[4] = aten.exp(x)
        g: f32[4] = c10d.all_gather_into_tensor(w, 2, "dp")
        v: f32[4] = c10d.wait_tensor(g)
        y: f32[4] = aten.mul.Tensor(v, e)
        return output("v", v), output("y", y)
        """,
        """
        x: f32[4] = input("x")
        all_reduce: f32[4] = c10d.all_reduce(x, "avg", "dp")
        e: f32[4] = aten.exp(x)
        v: f32[4] = c10d.wait_tensor(all_reduce)
        y: f32[4] = aten.mul.Tensor(v, e)
        return output("v", v), output("y", y)
        """,
        {"removed": 1},
    ),
    "a gathered value scattered": (
        """
        x: f32[2] = input("x")
        g: f32[4] = c10d.all_gather_into_tensor(x, 2, "dp")
        w: f32[4] = c10d.wait_tensor(g)
        s: f32[2] = c10d.reduce_scatter_tensor(w, "sum", 2, "dp")
        v: f32[2] = c10d.wait_tensor(s)
        return output("v", v)
        """,
        """
        x: f32[2] = input("x")
        mul: f32[2] = aten.mul.Tensor(x, 2)
        return output("v", mul)
        """,
        {"removed": 2},
    ),
    "a reduced value reduced": (
        """
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        t: f32[4] = c10d.all_reduce(w, "sum", "dp")
        v: f32[4] = c10d.wait_tensor(t)
        u: f32[4] = c10d.all_reduce(w, "max", "dp")
        z: f32[4] = c10d.wait_tensor(u)
        y: f32[4] = aten.sub.Tensor(v, z)
        return output("y", y)
        """,
        """
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        mul: f32[4] = aten.mul.Tensor(w, 2)
        y: f32[4] = aten.sub.Tensor(mul, w)
        return output("y", y)
        """,
        {"removed": 2},
    ),
    "a broadcast value broadcast, gathered": (
        """
        x: f32[4] = input("x")
        b: f32[4] = c10d.broadcast(x, 1, "dp")
        w: f32[4] = c10d.wait_tensor(b)
        t: f32[4] = c10d.broadcast(w, 0, "dp")
        v: f32[4] = c10d.wait_tensor(t)
        g: f32[8] = c10d.all_gather_into_tensor(v, 2, "dp")
        z: f32[8] = c10d.wait_tensor(g)
        return output("z", z)
        """,
        """
        x: f32[4] = input("x")
        b: f32[4] = c10d.broadcast(x, 1, "dp")
        w: f32[4] = c10d.wait_tensor(b)
        cat: f32[8] = aten.cat([w, w])
        return output("z", cat)
        """,
        {"removed": 2},
    ),
    "this rank's part of a gathered value": (
        """
        x: f32[2, 3] = input("x")
        rank: int = scalar("rank")
        n: f32[2, 3] = aten.neg(x)
        g: f32[4, 3] = c10d.all_gather_into_tensor(n, 2, "dp")
        w: f32[4, 3] = c10d.wait_tensor(g)
        i: int = operator.mul(2, rank)
        j: int = operator.add(i, 2)
        a: f32[2, 3] = aten.slice.Tensor(w, 0, i, j)
        b: f32[2, 3] = aten.narrow(w, 0, i, 2)
        y: f32[2, 3] = aten.mul.Tensor(a, b)
        return output("y", y)
        """,
        """
        x: f32[2, 3] = input("x")
        rank: int = scalar("rank")
        n: f32[2, 3] = aten.neg(x)
        y: f32[2, 3] = aten.mul.Tensor(n, n)
        return output("y", y)
        """,
        {"removed": 3},
    ),
    "an exchange and its inverse": (
        """
        x: f32[6] = input("x")
        a: f32[6] = c10d.all_to_all_single(x, [3, 3], [3, 3], "dp")
        w: f32[6] = c10d.wait_tensor(a)
        b: f32[6] = c10d.all_to_all_single(w, [3, 3], [3, 3], "dp")
        v: f32[6] = c10d.wait_tensor(b)
        y: f32[6] = aten.neg(v)
        return output("y", y)
        """,
        """
        x: f32[6] = input("x")
        y: f32[6] = aten.neg(x)
        return output("y", y)
        """,
        {"removed": 2},
    ),
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_rewritten(name: str) -> None:
    rewrites(RemoveRedundantGathers(), *REWRITTEN[name], dp=2)


@pytest.mark.ranks
@pytest.mark.parametrize("name", REWRITTEN)
def test_ranks_get_the_same(ranks: Any, name: str) -> None:
    """Whole numbers have one sum, in whatever order they are added; halves of them too."""
    compare = functools.partial(differences, whole_numbers=True)
    text = REWRITTEN[name][0].replace('"avg"', '"sum"')  # gloo does not average
    results = REWRITTEN[name][0].count("output(")
    assert ranks(2).run(compare, text, RemoveRedundantGathers()) == [[0.0] * results] * 2


def scattered(last: str, op: str = "sum", dtype: str = "f32") -> str:
    return f"""
        x: {dtype}[4] = input("x")
        s: {dtype}[2] = c10d.reduce_scatter_tensor(x, "{op}", 2, "dp")
        w: {dtype}[2] = c10d.wait_tensor(s)
        g: {dtype}[4] = c10d.all_gather_into_tensor(w, 2, "dp")
        v: {dtype}[4] = c10d.wait_tensor(g)
        {last}
    """


def reduced(op: str, dtype: str = "f32", last: str = 'return output("v", v), output("x", x)') -> str:
    return f"""
        x: {dtype}[4] = input("x")
        s: {dtype}[4] = c10d.all_reduce(x, "sum", "dp")
        w: {dtype}[4] = c10d.wait_tensor(s)
        t: {dtype}[4] = c10d.all_reduce(w, "{op}", "dp")
        v: {dtype}[4] = c10d.wait_tensor(t)
        {last}
    """


DECLINED = {
    "used too": (scattered('return output("v", v), output("w", w)'), "the scattered value is used too", 2),
    "products": (reduced("product"), "what many times the same value reduces to is not a product", 2),
    "truth": (reduced("sum", "b8"), "what many times the same value reduces to is not a product", 2),
    "unknown size": (reduced("sum"), "the size of its group is not known", 0),
    "two results": (
        reduced("max", last='return output("v", v), output("w", w)'),
        "two results of the program would share memory",
        2,
    ),
    "written": (
        reduced("max", last='z: f32[4] = aten.add_.Tensor(v, 1)\n        return output("z", z)'),
        "its memory is written to",
        2,
    ),
    "strides": (
        """
        x: f32[3, 4] = input("x")
        c: f32[4, 3] = aten.t(x)
        s: f32[2, 3] = c10d.reduce_scatter_tensor(c, "sum", 2, "dp")
        w: f32[2, 3] = c10d.wait_tensor(s)
        g: f32[4, 3] = c10d.all_gather_into_tensor(w, 2, "dp")
        v: f32[4, 3] = c10d.wait_tensor(g)
        return output("v", v)
        """,
        "its result would be laid out differently in memory",
        2,
    ),
    "exchanges of many": (
        """
        x: f32[6] = input("x")
        a: f32[6] = c10d.all_to_all_single(x, [2, 2, 2], [2, 2, 2], "dp")
        w: f32[6] = c10d.wait_tensor(a)
        b: f32[6] = c10d.all_to_all_single(w, [2, 2, 2], [2, 2, 2], "dp")
        v: f32[6] = c10d.wait_tensor(b)
        y: f32[6] = aten.neg(v)
        return output("y", y)
        """,
        "the second exchange is not known to undo the first on all ranks",
        3,
    ),
    "exchanges of other sizes": (
        """
        x: f32[6] = input("x")
        a: f32[6] = c10d.all_to_all_single(x, [3, 3], [3, 3], "dp")
        w: f32[6] = c10d.wait_tensor(a)
        b: f32[6] = c10d.all_to_all_single(w, [2, 4], [2, 4], "dp")
        v: f32[6] = c10d.wait_tensor(b)
        y: f32[6] = aten.neg(v)
        return output("y", y)
        """,
        "the second exchange is not known to undo the first on all ranks",
        2,
    ),
    "a result may not be an input": (
        """
        x: f32[2] = input("x")
        g: f32[4] = c10d.all_gather_into_tensor(x, 2, "dp")
        w: f32[4] = c10d.wait_tensor(g)
        s: f32[2] = c10d.reduce_scatter_tensor(w, "max", 2, "dp")
        v: f32[2] = c10d.wait_tensor(s)
        return output("v", v)
        """,
        "a result of the program would share memory with an input",
        2,
    ),
    "one tensor for two": (
        """
        x: f32[4] = input("x")
        n: f32[4] = aten.neg(x)
        b: f32[4] = c10d.broadcast(n, 1, "dp")
        w: f32[4] = c10d.wait_tensor(b)
        t: f32[4] = c10d.broadcast(w, 0, "dp")
        v: f32[4] = c10d.wait_tensor(t)
        u: f32[4] = c10d.wait_tensor(t)
        return output("v", v), output("u", u)
        """,
        "two results of the program would be one tensor",
        2,
    ),
    "what a coalesced one left": (
        """
        x: f32[4] = input("x")
        z: f32[4] = input("z")
        s: (f32[4], f32[4]) = c10d.all_reduce_coalesced([x, z], "sum", "dp")
        a: f32[4] = s[0]
        b: f32[4] = s[1]
        v: f32[4] = c10d.wait_tensor(a)
        w: f32[4] = c10d.wait_tensor(b)
        t: f32[4] = c10d.broadcast(v, 0, "dp")
        u: f32[4] = c10d.wait_tensor(t)
        return output("u", u), output("w", w)
        """,
        "the collective before it is coalesced or writes into memory that it is given",
        2,
    ),
    "a part that is a result": (
        """
        x: f32[2] = input("x")
        rank: int = scalar("rank")
        g: f32[4] = c10d.all_gather_into_tensor(x, 2, "dp")
        w: f32[4] = c10d.wait_tensor(g)
        i: int = operator.mul(rank, 2)
        a: f32[2] = aten.narrow(w, 0, i, 2)
        return output("a", a)
        """,
        "a result of the program shares its memory",
        2,
    ),
}


@pytest.mark.parametrize("name", DECLINED)
def test_declined(name: str) -> None:
    text, reason, size = DECLINED[name]
    declines(RemoveRedundantGathers(), text, reason, dp=size)


def test_a_promise_undoes_exchanges_of_many() -> None:
    program = parse(textwrap.dedent(DECLINED["exchanges of many"][0]), groups={"dp": 3})
    assert run_passes(program, [RemoveRedundantGathers(alike=True)]).history[0].counts == {"removed": 2, "left": 0}


@pytest.mark.parametrize(
    "line",
    [
        "a: f32[2] = aten.narrow(w, 0, rank, 2)",
        "a: f32[2] = aten.narrow(w, 0, 2, 2)",
        "a: f32[1] = aten.narrow(w, 0, i, 1)",
        "a: f32[2] = aten.slice.Tensor(w, 0, 0, j, 2)",
    ],
)
def test_other_parts_stay(line: str) -> None:
    program = parse(
        textwrap.dedent(f"""
        x: f32[2] = input("x")
        rank: int = scalar("rank")
        g: f32[4] = c10d.all_gather_into_tensor(x, 2, "dp")
        w: f32[4] = c10d.wait_tensor(g)
        i: int = operator.mul(rank, 2)
        j: int = operator.add(i, 2)
        {line}
        y = aten.neg(a)
        return output("y", y)
    """),
        groups={"dp": 2},
    )
    assert not run_passes(program, [RemoveRedundantGathers()]).history[0].changed
