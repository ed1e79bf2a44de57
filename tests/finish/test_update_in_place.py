"""What goes in place, what is copied and where, what is cloned; every text is what the pass prints."""

from __future__ import annotations

import textwrap

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from crossfade.finish.update_in_place import UpdateInPlace
from crossfade.graph.passes import run_passes
from crossfade.graph.program import from_graph_module
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify

P = 'p: f32[4] = parameter("p")'
G = 'g: f32[4] = input("g")'
CASES = {
    "adam-like chains": (
        """
        p: f32[4] = parameter("p")
        m: f32[4] = optimizer_state("m")
        v: f32[4] = optimizer_state("v")
        g: f32[4] = input("g")
        m1: f32[4] = aten.lerp.Scalar(m, g, 0.1)
        v1: f32[4] = aten.mul.Tensor(v, 0.9)
        v2: f32[4] = aten.addcmul(v1, g, g, value=0.1)
        root: f32[4] = aten.sqrt(v2)
        denominator: f32[4] = aten.add.Tensor(root, 1e-08)
        p1: f32[4] = aten.addcdiv(p, m1, denominator, value=-0.01)
        return update("p", p1), update("m", m1), update("v", v2)
        """,
        """
        m1: f32[4] = aten.lerp_.Scalar(m, g, 0.1)
        v1: f32[4] = aten.mul_.Tensor(v, 0.9)
        v2: f32[4] = aten.addcmul_(v1, g, g, value=0.1)
        root: f32[4] = aten.sqrt(v2)
        denominator: f32[4] = aten.add_.Tensor(root, 1e-08)
        p1: f32[4] = aten.addcdiv_(p, m1, denominator, value=-0.01)
        return
        """,
        (3, 5, 0),
    ),
    "the old value is read after: copied right below that": (
        f"""
        {P}
        {G}
        new: f32[4] = aten.add.Tensor(p, g)
        old: f32[4] = aten.neg(p)
        other: f32[4] = aten.sin(g)
        return update("p", new), output("old", old), output("other", other)
        """,
        """
        new: f32[4] = aten.add.Tensor(p, g)
        old: f32[4] = aten.neg(p)
        copy_: f32[4] = aten.copy_(p, new)
        other: f32[4] = aten.sin(g)
        return output("old", old), output("other", other)
        """,
        (1, 0, 1),
    ),
    "the old value is read after, through a view": (
        f"""
        {P}
        {G}
        half: f32[2] = aten.slice.Tensor(p, 0, 2, 4)
        new: f32[4] = aten.add.Tensor(p, g)
        old: f32[2] = aten.neg(half)
        return update("p", new), output("old", old)
        """,
        """
        half: f32[2] = aten.slice.Tensor(p, 0, 2, 4)
        new: f32[4] = aten.add.Tensor(p, g)
        old: f32[2] = aten.neg(half)
        copy_: f32[4] = aten.copy_(p, new)
        return output("old", old)
        """,
        (1, 0, 1),
    ),
    "a step of the chain is read later": (
        f"""
        {P}
        {G}
        a: f32[4] = aten.add.Tensor(p, g)
        b: f32[4] = aten.mul.Tensor(a, g)
        c: f32[4] = aten.neg(a)
        return update("p", b), output("c", c)
        """,
        """
        a: f32[4] = aten.add.Tensor(p, g)
        b: f32[4] = aten.mul.Tensor(a, g)
        copy_: f32[4] = aten.copy_(p, b)
        c: f32[4] = aten.neg_(a)
        return output("c", c)
        """,
        (1, 1, 1),
    ),
    "one value updates two inputs": (
        """
        p: f32[4] = parameter("p")
        q: f32[4] = parameter("q")
        new: f32[4] = aten.neg(p)
        return update("p", new), update("q", new)
        """,
        """
        new: f32[4] = aten.neg_(p)
        copy_: f32[4] = aten.copy_(q, new)
        return
        """,
        (2, 1, 1),
    ),
    "two inputs change places": (
        """
        p: f32[4] = parameter("p")
        q: f32[4] = parameter("q")
        return update("p", q), update("q", p)
        """,
        """
        clone: f32[4] = aten.clone(q)
        clone_1: f32[4] = aten.clone(p)
        copy_: f32[4] = aten.copy_(p, clone)
        copy__1: f32[4] = aten.copy_(q, clone_1)
        return
        """,
        (2, 0, 2),
    ),
    "the new value is a view of the old": (
        """
        p: f32[2, 2] = parameter("p")
        t: f32[2, 2] = aten.t(p)
        return update("p", t)
        """,
        """
        t: f32[2, 2] = aten.t(p)
        clone: f32[2, 2] = aten.clone(t)
        copy_: f32[2, 2] = aten.copy_(p, clone)
        return
        """,
        (1, 0, 1),
    ),
    "the old value is a result": (
        f"""
        {P}
        {G}
        new: f32[4] = aten.add.Tensor(p, g)
        return output("old", p), update("p", new)
        """,
        """
        new: f32[4] = aten.add.Tensor(p, g)
        clone: f32[4] = aten.clone(p)
        copy_: f32[4] = aten.copy_(p, new)
        return output("old", clone)
        """,
        (1, 0, 2),
    ),
    "the new value is a result too": (
        f"""
        {P}
        {G}
        new: f32[4] = aten.add.Tensor(p, g)
        view: f32[2, 2] = aten.view(new, [2, 2])
        return output("new", new), output("view", view), output("again", new), update("p", new)
        """,
        """
        new: f32[4] = aten.add_.Tensor(p, g)
        view: f32[2, 2] = aten.view(new, [2, 2])
        clone: f32[4] = aten.clone(new)
        clone_1: f32[2, 2] = aten.clone(view)
        return output("new", clone), output("view", clone_1), output("again", clone)
        """,
        (1, 1, 2),
    ),
    "an unchanged input": (
        f"""
        {P}
        {G}
        n: f32[4] = aten.neg(p)
        return update("p", p), output("n", n)
        """,
        """
        n: f32[4] = aten.neg(p)
        return output("n", n)
        """,
        (1, 0, 0),
    ),
    "another argument shares memory with the first": (
        """
        x: f32[4] = input("x")
        a: f32[4] = aten.neg(x)
        v: f32[2, 2] = aten.view(a, [2, 2])
        t: f32[2, 2] = aten.t(v)
        b: f32[2, 2] = aten.add.Tensor(v, t)
        return output("b", b)
        """,
        """
        a: f32[4] = aten.neg(x)
        v: f32[2, 2] = aten.view(a, [2, 2])
        t: f32[2, 2] = aten.t(v)
        b: f32[2, 2] = aten.add.Tensor(v, t)
        return output("b", b)
        """,
        (0, 0, 0),
    ),
    "the first argument again: elementwise ops only": (
        """
        x: f32[2, 2] = input("x")
        a: f32[2, 2] = aten.neg(x)
        b: f32[2, 2] = aten.mul.Tensor(a, a)
        c: f32[2, 2] = aten.addmm(b, b, x)
        return output("c", c)
        """,
        """
        a: f32[2, 2] = aten.neg(x)
        b: f32[2, 2] = aten.mul_.Tensor(a, a)
        c: f32[2, 2] = aten.addmm(b, b, x)
        return output("c", c)
        """,
        (0, 1, 0),
    ),
    "expanded memory": (
        """
        x: f32[4] = input("x")
        a: f32[4] = aten.neg(x)
        e: f32[2, 4] = aten.expand(a, [2, 4])
        b: f32[2, 4] = aten.mul.Tensor(e, 2)
        return output("b", b)
        """,
        """
        a: f32[4] = aten.neg(x)
        e: f32[2, 4] = aten.expand(a, [2, 4])
        b: f32[2, 4] = aten.mul.Tensor(e, 2)
        return output("b", b)
        """,
        (0, 0, 0),
    ),
    "an op that may return its argument": (
        """
        x: f32[4] = input("x")
        a: f32[4] = aten.neg(x)
        b: f32[4] = aten.dropout(a, 0.5, False)
        c: f32[4] = aten.sin(b)
        e: f32[4] = aten.exp(x)
        unused: f32[4] = aten.dropout(e, 0.5, False)
        return output("c", c)
        """,
        """
        a: f32[4] = aten.neg(x)
        b: f32[4] = aten.dropout(a, 0.5, False)
        c: f32[4] = aten.sin_(b)
        e: f32[4] = aten.exp(x)
        unused: f32[4] = aten.dropout(e, 0.5, False)
        return output("c", c)
        """,
        (0, 1, 0),
    ),
    "a gather reads its input until its wait": (
        f"""
        {P}
        {G}
        s: f32[8] = c10d.all_gather_into_tensor(p, 2, "dp")
        new: f32[4] = aten.add.Tensor(p, g)
        e: f32[4] = aten.exp(g)
        w: f32[8] = c10d.wait_tensor(s)
        f: f32[4] = aten.sin(e)
        return update("p", new), output("w", w), output("f", f)
        """,
        """
        s: f32[8] = c10d.all_gather_into_tensor(p, 2, "dp")
        new: f32[4] = aten.add.Tensor(p, g)
        e: f32[4] = aten.exp(g)
        w: f32[8] = c10d.wait_tensor(s)
        copy_: f32[4] = aten.copy_(p, new)
        f: f32[4] = aten.sin_(e)
        return output("w", w), output("f", f)
        """,
        (1, 1, 1),
    ),
    "a gather's input made inside": (
        """
        x: f32[4] = input("x")
        a: f32[4] = aten.neg(x)
        s: f32[8] = c10d.all_gather_into_tensor(a, 2, "dp")
        early: f32[4] = aten.sin(a)
        w: f32[8] = c10d.wait_tensor(s)
        late: f32[4] = aten.cos(a)
        return output("w", w), output("e", early), output("l", late)
        """,
        """
        a: f32[4] = aten.neg(x)
        s: f32[8] = c10d.all_gather_into_tensor(a, 2, "dp")
        early: f32[4] = aten.sin(a)
        w: f32[8] = c10d.wait_tensor(s)
        late: f32[4] = aten.cos_(a)
        return output("w", w), output("e", early), output("l", late)
        """,
        (0, 1, 0),
    ),
    "slices of one buffer are apart": (
        """
        x: f32[4] = input("x")
        a: f32[4] = aten.neg(x)
        one: f32[2] = aten.slice.Tensor(a, 0, 0, 2)
        two: f32[2] = aten.slice.Tensor(a, 0, 2, 4)
        middle: f32[2] = aten.slice.Tensor(a, 0, 1, 3)
        b: f32[2] = aten.sin(one)
        c: f32[2] = aten.cos(middle)
        d: f32[2] = aten.exp(two)
        return output("b", b), output("c", c), output("d", d)
        """,
        """
        a: f32[4] = aten.neg(x)
        one: f32[2] = aten.slice.Tensor(a, 0, 0, 2)
        two: f32[2] = aten.slice.Tensor(a, 0, 2, 4)
        middle: f32[2] = aten.slice.Tensor(a, 0, 1, 3)
        b: f32[2] = aten.sin(one)
        c: f32[2] = aten.cos(middle)
        d: f32[2] = aten.exp_(two)
        return output("b", b), output("c", c), output("d", d)
        """,
        (0, 1, 0),
    ),
    "memory is counted in bytes, whatever the dtype of a view": (
        """
        x: f32[4] = input("x")
        a: f32[4] = aten.neg(x)
        two: f32[2] = aten.slice.Tensor(a, 0, 2, 4)
        short: i16[8] = aten.view.dtype(a, i16)
        last: i16[4] = aten.slice.Tensor(short, 0, 4, 8)
        b: f32[2] = aten.sin(two)
        c: i16[4] = aten.neg(last)
        return output("b", b), output("c", c)
        """,
        """
        a: f32[4] = aten.neg(x)
        two: f32[2] = aten.slice.Tensor(a, 0, 2, 4)
        short: i16[8] = aten.view.dtype(a, i16)
        last: i16[4] = aten.slice.Tensor(short, 0, 4, 8)
        b: f32[2] = aten.sin(two)
        c: i16[4] = aten.neg_(last)
        return output("b", b), output("c", c)
        """,
        (0, 1, 0),
    ),
    "a wait lies where its in-place collective does": (
        """
        x: f32[8] = input("x")
        a: f32[8] = aten.neg(x)
        h: f32[4] = aten.slice.Tensor(a, 0, 4, 8)
        s: f32[4] = c10d.all_reduce_(h, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        k: f32[4] = aten.slice.Tensor(a, 0, 4, 8)
        b: f32[4] = aten.sin(k)
        c: f32[4] = aten.cos(w)
        return output("b", b), output("c", c)
        """,
        """
        a: f32[8] = aten.neg(x)
        h: f32[4] = aten.slice.Tensor(a, 0, 4, 8)
        s: f32[4] = c10d.all_reduce_(h, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        k: f32[4] = aten.slice.Tensor(a, 0, 4, 8)
        b: f32[4] = aten.sin(k)
        c: f32[4] = aten.cos_(w)
        return output("b", b), output("c", c)
        """,
        (0, 1, 0),
    ),
    "what lives in a workspace is cloned for the caller": (
        """
        x: f32[2] = input("x")
        b: f32[4] = workspace("bucket.0")
        half: f32[2] = aten.slice.Tensor(b, 0, 0, 2)
        copy: f32[2] = aten.copy_(half, x)
        s: f32[4] = c10d.all_reduce(b, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        return loss("loss", w)
        """,
        """
        half: f32[2] = aten.slice.Tensor(b, 0, 0, 2)
        copy: f32[2] = aten.copy_(half, x)
        s: f32[4] = c10d.all_reduce_(b, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        clone: f32[4] = aten.clone(w)
        return loss("loss", clone)
        """,
        (0, 1, 1),
    ),
    "a collective needs contiguous memory": (
        """
        x: f32[2, 3] = input("x")
        n: f32[2, 3] = aten.neg(x)
        t: f32[3, 2] = aten.t(n)
        s: f32[3, 2] = c10d.all_reduce(t, "sum", "dp")
        w: f32[3, 2] = c10d.wait_tensor(s)
        return output("w", w)
        """,
        """
        n: f32[2, 3] = aten.neg(x)
        t: f32[3, 2] = aten.t(n)
        s: f32[3, 2] = c10d.all_reduce(t, "sum", "dp")
        w: f32[3, 2] = c10d.wait_tensor(s)
        return output("w", w)
        """,
        (0, 0, 0),
    ),
    "part of a buffer in flight keeps all of it": (
        """
        x: f32[8] = input("x")
        a: f32[8] = aten.neg(x)
        one: f32[4] = aten.slice.Tensor(a, 0, 0, 4)
        two: f32[4] = aten.slice.Tensor(a, 0, 4, 8)
        s: f32[4] = c10d.all_reduce(one, "sum", "dp")
        b: f32[4] = aten.sin(two)
        w: f32[4] = c10d.wait_tensor(s)
        return output("w", w), output("b", b)
        """,
        """
        a: f32[8] = aten.neg(x)
        one: f32[4] = aten.slice.Tensor(a, 0, 0, 4)
        two: f32[4] = aten.slice.Tensor(a, 0, 4, 8)
        s: f32[4] = c10d.all_reduce(one, "sum", "dp")
        b: f32[4] = aten.sin(two)
        w: f32[4] = c10d.wait_tensor(s)
        return output("w", w), output("b", b)
        """,
        (0, 0, 0),
    ),
    "another dtype does not fit": (
        """
        x: i64[4] = input("x")
        a: i64[4] = aten.neg(x)
        b: f32[4] = aten.mul.Tensor(a, 0.5)
        return output("b", b)
        """,
        """
        a: i64[4] = aten.neg(x)
        b: f32[4] = aten.mul.Tensor(a, 0.5)
        return output("b", b)
        """,
        (0, 0, 0),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_in_place(name: str):
    before, after, counts = CASES[name]
    program = parse(textwrap.dedent(before), groups={"dp": 2})
    done = run_passes(program, [UpdateInPlace()])
    verify(done)
    inputs = len(program.inputs)
    assert "\n".join(render(done).splitlines()[inputs:]) == textwrap.dedent(after).strip()
    assert tuple(done.history[0].counts[key] for key in ("updates", "overwritten", "copied")) == counts
    assert done.inputs == program.inputs


def test_hints_of_symbolic_sizes_decide_nothing():
    """Where one slice ends is known when it runs only: it may reach into the other."""

    def slices(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = x.neg()
        early, late = a[: n.shape[0]], a[4:8]
        return late.sin(), early.cos()

    module = make_fx(slices, tracing_mode="symbolic")(torch.ones(8), torch.ones(3))
    done = run_passes(from_graph_module(module), [UpdateInPlace()])
    assert "aten.sin_" not in render(done)
    assert "aten.cos_" in render(done)
