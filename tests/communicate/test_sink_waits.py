"""Waits, and the views that take results apart, sink to just above the first real use."""

from __future__ import annotations

import textwrap

import pytest

from crossfade.communicate.sink_waits import SinkWaits
from crossfade.graph.passes import run_passes
from crossfade.graph.text import parse

CASES = {
    "views of the result sink too, a use of another part does not hold them": (
        """
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        parts: (f32[2], f32[2]) = aten.split.Tensor(w, 2)
        a: f32[2] = parts[0]
        b: f32[2] = parts[1]
        e: f32[4] = aten.exp(x)
        na: f32[2] = aten.neg(a)
        f: f32[4] = aten.sin(x)
        nb: f32[2] = aten.neg(b)
        return output("a", na), output("b", nb), output("e", e), output("f", f)
        """,
        "s e w parts a na f b nb",
        ["s: moved: waited for just before its first use: 1 nodes later, before na"],
    ),
    "needed at once, through a view": (
        """
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        v: f32[2, 2] = aten.view(w, [2, 2])
        n: f32[2, 2] = aten.neg(v)
        return output("n", n)
        """,
        "s w v n",
        ["s: left alone: its result is needed at once"],
    ),
    "a result waits at the end": (
        """
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        e: f32[4] = aten.exp(x)
        return output("w", w), output("e", e)
        """,
        "s e w",
        ["s: moved: waited for just before its first use: 1 nodes later, before output"],
    ),
    "what nothing uses waits at the end, as does what only a view that nothing uses sees": (
        """
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        t: f32[4] = c10d.all_reduce(x, "max", "dp")
        u: f32[4] = c10d.wait_tensor(t)
        v: f32[2, 2] = aten.view(u, [2, 2])
        e: f32[4] = aten.exp(x)
        return output("e", e)
        """,
        "s t e w u v",
        [
            "s: moved: nothing uses its result: waited for at the end: 2 nodes later, before output",
            "t: moved: waited for just before its first use: 1 nodes later, before output",
        ],
    ),
    "what nothing uses is not held where memory is short": (
        """
        x: f32[4] = input("x")
        s: f32[32] = c10d.all_gather_into_tensor(x, 8, "dp")
        w: f32[32] = c10d.wait_tensor(s)
        a: f32[4] = aten.exp(x)
        b: f32[8, 4] = aten.expand(a, [8, 4])
        c: f32[8, 4] = aten.clone(b)
        d: f32[4] = aten.sum.dim_IntList(c, [0])
        return output("d", d)
        """,
        "s a b w c d",
        ["s: moved: waited for as late as the peak of live memory allows: 2 nodes later, before c"],
    ),
    "coalesced results sink one by one": (
        """
        x: f32[4] = input("x")
        s: (f32[4], f32[4]) = c10d.all_reduce_coalesced([x, x], "sum", "dp")
        s0: f32[4] = s[0]
        s1: f32[4] = s[1]
        w0: f32[4] = c10d.wait_tensor(s0)
        w1: f32[4] = c10d.wait_tensor(s1)
        e: f32[4] = aten.exp(x)
        n0: f32[4] = aten.neg(w0)
        n1: f32[4] = aten.neg(w1)
        return output("0", n0), output("1", n1), output("e", e)
        """,
        "s e s0 w0 n0 s1 w1 n1",
        [
            "s: moved: waited for just before its first use: 1 nodes later, before n0",
            "s: moved: waited for just before its first use: 2 nodes later, before n1",
        ],
    ),
    "a write to a sibling holds up every wait of the list": (
        """
        x: f32[4] = input("x")
        s: (f32[2], f32[2]) = c10d.reduce_scatter_tensor_coalesced([x, x], "sum", 2, "dp")
        s0: f32[2] = s[0]
        s1: f32[2] = s[1]
        w0: f32[2] = c10d.wait_tensor(s0)
        w1: f32[2] = c10d.wait_tensor(s1)
        e: f32[4] = aten.exp(x)
        write: f32[2] = aten.mul_.Tensor(w0, 10)
        f: f32[4] = aten.sin(x)
        n1: f32[2] = aten.neg(w1)
        return output("0", write), output("1", n1), output("e", e), output("f", f)
        """,
        "s e s0 s1 w0 w1 write f n1",
        [
            "s: moved: waited for just before its first use: 1 nodes later, before write",
            "s: moved: waited for just before its first use: 1 nodes later, before write",
        ],
    ),
    "a writer of what a gather reads holds its wait up": (
        """
        x: f32[4] = input("x")
        a: f32[4] = aten.clone(x)
        s: f32[8] = c10d.all_gather_into_tensor(a, 2, "dp")
        w: f32[8] = c10d.wait_tensor(s)
        e: f32[4] = aten.exp(x)
        write: f32[4] = aten.add_.Tensor(a, 1)
        n: f32[8] = aten.neg(w)
        return output("n", n), output("e", e)
        """,
        "a s e w write n",
        ["s: moved: waited for just before its first use: 1 nodes later, before write"],
    ),
    "a reader of an in-place buffer holds the wait up": (
        """
        x: f32[4] = input("x")
        a: f32[4] = aten.clone(x)
        s: f32[4] = c10d.all_reduce_(a, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        e: f32[4] = aten.exp(x)
        r: f32[4] = aten.sin(a)
        n: f32[4] = aten.neg(w)
        return output("n", n), output("e", e), output("r", r)
        """,
        "a s e w r n",
        ["s: moved: waited for just before its first use: 1 nodes later, before r"],
    ),
    "copies out of a bucket sink with its wait, to the first use of any": (
        """
        x: f32[2, 2] = input("x")
        s: f32[4, 2] = c10d.all_gather_into_tensor(x, 2, "dp")
        w: f32[4, 2] = c10d.wait_tensor(s)
        parts: (f32[4, 1], f32[4, 1]) = aten.split.Tensor(w, 1, 1)
        a: f32[4, 1] = parts[0]
        b: f32[4, 1] = parts[1]
        ca: f32[4, 1] = aten.clone(a, memory_format=contiguous_format)
        cb: f32[4, 1] = aten.clone(b, memory_format=contiguous_format)
        va: f32[4] = aten.view(ca, [4])
        vb: f32[4] = aten.view(cb, [4])
        e: f32[2, 2] = aten.mm(x, x)
        na: f32[4] = aten.neg(va)
        f: f32[2, 2] = aten.mm(e, x)
        nb: f32[4] = aten.neg(vb)
        big: f32[64] = aten.new_empty(x, [64])
        return output("a", na), output("b", nb), output("f", f), output("big", big)
        """,
        "s e w parts a b ca cb va na f vb nb big",
        ["s: moved: waited for just before its first use: 1 nodes later, before na"],
    ),
    "a copy that stands below the first use stays": (
        """
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        e: f32[4] = aten.exp(x)
        n: f32[4] = aten.neg(w)
        c: f32[4] = aten.clone(w)
        f: f32[4] = aten.sin(x)
        write: f32[4] = aten.mul_.Tensor(c, 2)
        return output("n", n), output("c", write), output("e", e), output("f", f)
        """,
        "s e w n c f write",
        ["s: moved: waited for just before its first use: 1 nodes later, before n"],
    ),
    "a copy is made before what it copies is written": (
        """
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        c: f32[4] = aten.clone(w)
        e: f32[4] = aten.exp(x)
        write: f32[4] = aten.mul_.Tensor(w, 2)
        n: f32[4] = aten.neg(c)
        return output("n", n), output("w", write), output("e", e)
        """,
        "s e w c write n",
        ["s: moved: waited for just before its first use: 1 nodes later, before write"],
    ),
    "one kernel that copies all members out": (
        """
        x: f32[3] = input("x")
        s: f32[6] = c10d.all_gather_into_tensor(x, 2, "dp")
        w: f32[6] = c10d.wait_tensor(s)
        parts: (f32[2, 2], f32[2, 1]) = crossfade.unpack(w, 2, [2, 1])
        a: f32[2, 2] = parts[0]
        b: f32[2, 1] = parts[1]
        e: f32[3] = aten.exp(x)
        na: f32[2, 2] = aten.neg(a)
        nb: f32[2, 1] = aten.neg(b)
        big: f32[64] = aten.new_empty(x, [64])
        return output("a", na), output("b", nb), output("e", e), output("big", big)
        """,
        "s e w parts a na b nb big",
        ["s: moved: waited for just before its first use: 1 nodes later, before na"],
    ),
    "a wait on an ordinary tensor": (
        """
        x: f32[4] = input("x")
        a: f32[4] = aten.clone(x)
        w: f32[4] = c10d.wait_tensor(a)
        e: f32[4] = aten.exp(x)
        n: f32[4] = aten.neg(w)
        return output("n", n), output("e", e)
        """,
        "a e w n",
        ["w: moved: waited for just before its first use: 1 nodes later, before n"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_sunk(name: str):
    text, order, verdicts = CASES[name]
    done = run_passes(parse(textwrap.dedent(text), groups={"dp": 2}), [SinkWaits()])
    assert [n.name for n in done.graph.nodes if n.op == "call_function"] == order.split()
    assert [str(v) for v in done.history[0].verdicts] == verdicts
    moved = sum(v.outcome == "moved" for v in done.history[0].verdicts)
    assert done.history[0].counts == {"sunk": moved}
    assert done.history[0].changed == bool(moved)
