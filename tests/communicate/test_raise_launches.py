"""Starts rise as far as data, memory and the order of their group let them."""

from __future__ import annotations

import textwrap

import pytest

from crossfade.communicate.raise_launches import RaiseLaunches
from crossfade.graph.passes import run_passes
from crossfade.graph.text import parse
from crossfade.graph.verify import verify

GROUPS = {"dp": 2, "tp": 2}


def names_after(text: str) -> tuple[list[str], list[str]]:
    done = run_passes(parse(text, groups=GROUPS), [RaiseLaunches()])
    return [n.name for n in done.graph.nodes if n.op == "call_function"], [str(v) for v in done.history[0].verdicts]


CASES = {
    "second start of a group stays below its own input": (
        """
        x: f32[4] = input("x")
        a: f32[4] = aten.neg(x)
        b: f32[4] = aten.exp(x)
        c: f32[4] = aten.sin(x)
        s: f32[4] = c10d.all_reduce(a, "sum", "dp")
        t: f32[4] = c10d.all_reduce(b, "sum", "dp")
        ws: f32[4] = c10d.wait_tensor(s)
        wt: f32[4] = c10d.wait_tensor(t)
        return output("a", ws), output("b", wt), output("c", c)
        """,
        "a s b t c ws wt",
        [
            "s: moved: started as early as it can be: 2 nodes earlier, after a",
            "t: moved: started as early as it can be: 1 nodes earlier, after b",
        ],
    ),
    "group order is kept though the second is ready first": (
        """
        x: f32[4] = input("x")
        a: f32[4] = aten.neg(x)
        b: f32[4] = aten.exp(x)
        s: f32[4] = c10d.all_reduce(b, "sum", "dp")
        t: f32[4] = c10d.all_reduce(a, "sum", "dp")
        ws: f32[4] = c10d.wait_tensor(s)
        wt: f32[4] = c10d.wait_tensor(t)
        return output("a", ws), output("b", wt)
        """,
        "b s a t ws wt",
        [
            "s: moved: started as early as it can be: 1 nodes earlier, after b",
            "t: left alone: it already starts as early as it can: after a",
        ],
    ),
    "views above a start are no reason to raise it": (
        """
        x: f32[4] = input("x")
        a: f32[4] = aten.neg(x)
        v: f32[2, 2] = aten.view(a, [2, 2])
        t: f32[2, 2] = aten.t(v)
        s: f32[4] = c10d.all_reduce(a, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        return output("w", w), output("t", t)
        """,
        "a v t s w",
        ["s: left alone: it already starts as early as it can: after t"],
    ),
    "groups are independent": (
        """
        x: f32[4] = input("x")
        a: f32[4] = aten.cumsum(x, 0)
        b: f32[4] = aten.cumsum(x, 0)
        s: f32[4] = c10d.all_reduce(b, "sum", "dp")
        t: f32[4] = c10d.all_reduce(a, "sum", "tp")
        ws: f32[4] = c10d.wait_tensor(s)
        wt: f32[4] = c10d.wait_tensor(t)
        return output("a", ws), output("b", wt)
        """,
        "a t b s ws wt",
        [
            "s: left alone: it already starts as early as it can: after b",
            "t: moved: started as early as it can be: 2 nodes earlier, after a",
        ],
    ),
    "an input's collective rises to the top": (
        """
        x: f32[4] = input("x")
        y: f32[4] = input("y")
        a: f32[4] = aten.neg(x)
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        ws: f32[4] = c10d.wait_tensor(s)
        return output("a", a), output("s", ws), output("y", y)
        """,
        "s a ws",
        ["s: moved: started as early as it can be: 1 nodes earlier, after y"],
    ),
    "inputs stand between collectives": (
        """
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        ws: f32[4] = c10d.wait_tensor(s)
        y: f32[4] = input("y")
        a: f32[4] = aten.add.Tensor(ws, y)
        b: f32[4] = aten.exp(y)
        t: f32[4] = c10d.all_reduce(a, "sum", "dp")
        wt: f32[4] = c10d.wait_tensor(t)
        z: f32[4] = input("z")
        c: f32[4] = aten.add.Tensor(wt, z)
        return output("b", b), output("c", c)
        """,
        "s ws a t b wt c",
        [
            "s: left alone: it already starts as early as it can: after z",
            "t: moved: started as early as it can be: 1 nodes earlier, after a",
        ],
    ),
    "what only prepares its input rises with it": (
        """
        x: f32[4, 4] = input("x")
        a: f32[4, 4] = aten.mm(x, x)
        b: f32[4, 4] = aten.exp(x)
        v: f32[16] = aten.view(a, [16])
        h: bf16[16] = aten._to_copy(v, dtype=bf16)
        d: bf16[16] = aten.div.Tensor(h, 2)
        s: bf16[16] = c10d.all_reduce(d, "sum", "dp")
        ws: bf16[16] = c10d.wait_tensor(s)
        return output("s", ws), output("b", b)
        """,
        "a v h d s b ws",
        ["s: moved: started as early as it can be: 1 nodes earlier, after d"],
    ),
    "what is packed for it rises from several places": (
        """
        x: f32[4, 4] = input("x")
        a: f32[4, 4] = aten.mm(x, x)
        m: f32[4, 4] = aten.mm(a, x)
        b: f32[4, 4] = aten.mm(x, m)
        va: f32[16] = aten.view(a, [16])
        vm: f32[16] = aten.view(m, [16])
        c: f32[32] = aten.cat([va, vm])
        s: f32[32] = c10d.all_reduce(c, "sum", "dp")
        ws: f32[32] = c10d.wait_tensor(s)
        return output("s", ws), output("b", b)
        """,
        "a m va vm c s b ws",
        ["s: moved: started as early as it can be: 1 nodes earlier, after c"],
    ),
    "what others read too, or is long, stays": (
        """
        x: f32[4, 4] = input("x")
        b: f32[4, 4] = aten.exp(x)
        n: f32[4, 4] = aten.neg(x)
        m: f32[4, 4] = aten.mm(n, n)
        v: f32[4, 4] = aten.div.Tensor(n, 2)
        s: f32[4, 4] = c10d.all_reduce(v, "sum", "dp")
        t: f32[4, 4] = c10d.all_reduce(m, "sum", "tp")
        ws: f32[4, 4] = c10d.wait_tensor(s)
        wt: f32[4, 4] = c10d.wait_tensor(t)
        return output("s", ws), output("t", wt), output("b", b)
        """,
        "b n v s m t ws wt",
        [
            "s: moved: started as early as it can be: 1 nodes earlier, after v",
            "t: left alone: it already starts as early as it can: after m",
        ],
    ),
    "what prepares it stays below a write": (
        """
        x: f32[4] = input("x")
        a: f32[4] = aten.clone(x)
        b: f32[4] = aten.exp(x)
        write: f32[4] = aten.add_.Tensor(a, 1)
        c: f32[4] = aten.sin(x)
        d: f32[4] = aten.div.Tensor(a, 2)
        s: f32[4] = c10d.all_reduce(d, "sum", "dp")
        ws: f32[4] = c10d.wait_tensor(s)
        return output("s", ws), output("b", b), output("c", c)
        """,
        "a b write d s c ws",
        ["s: moved: started as early as it can be: 1 nodes earlier, after d"],
    ),
    "a coalesced start": (
        """
        x: f32[4] = input("x")
        a: f32[4] = aten.neg(x)
        b: f32[4] = aten.exp(x)
        s: (f32[4], f32[4]) = c10d.all_reduce_coalesced([a, x], "sum", "dp")
        s0: f32[4] = s[0]
        s1: f32[4] = s[1]
        w0: f32[4] = c10d.wait_tensor(s0)
        w1: f32[4] = c10d.wait_tensor(s1)
        return output("0", w0), output("1", w1), output("b", b)
        """,
        "a s b s0 s1 w0 w1",
        ["s: moved: started as early as it can be: 1 nodes earlier, after a"],
    ),
    "a writer of its input stays above": (
        """
        x: f32[4] = input("x")
        a: f32[4] = aten.clone(x)
        b: f32[4] = aten.exp(x)
        write: f32[4] = aten.add_.Tensor(a, 1)
        c: f32[4] = aten.sin(x)
        s: f32[4] = c10d.all_reduce(a, "sum", "dp")
        ws: f32[4] = c10d.wait_tensor(s)
        return output("a", ws), output("b", b), output("c", c)
        """,
        "a b write s c ws",
        ["s: moved: started as early as it can be: 1 nodes earlier, after write"],
    ),
    "an in-place start stays below readers": (
        """
        x: f32[4] = input("x")
        a: f32[4] = aten.clone(x)
        b: f32[4] = aten.exp(a)
        c: f32[4] = aten.sin(x)
        s: f32[4] = c10d.all_reduce_(a, "sum", "dp")
        ws: f32[4] = c10d.wait_tensor(s)
        return output("a", ws), output("b", b), output("c", c)
        """,
        "a b s c ws",
        ["s: moved: started as early as it can be: 1 nodes earlier, after b"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_raised(name: str):
    text, order, verdicts = CASES[name]
    assert names_after(textwrap.dedent(text)) == (order.split(), verdicts)


def test_twice_is_once():
    for text, *_ in CASES.values():
        once = run_passes(parse(textwrap.dedent(text), groups=GROUPS), [RaiseLaunches()])
        assert not run_passes(once, [RaiseLaunches()]).history[-1].changed


def test_a_graph_whose_inputs_were_moved_down_since_stays_valid():
    program = parse(
        """
        x: f32[4] = input("x")
        y: f32[4] = input("y")
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        ws: f32[4] = c10d.wait_tensor(s)
        a: f32[4] = aten.add.Tensor(ws, y)
        return output("a", a)
        """,
        groups=GROUPS,
    )
    _, y, _, _, a, _ = program.graph.nodes
    a.prepend(y)
    assert not RaiseLaunches().run(program).changed
    verify(program)
