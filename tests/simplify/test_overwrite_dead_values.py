"""Only what nothing reads again is overwritten; inputs only where they are to be overwritten anyway."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from crossfade.graph.passes import run_passes
from crossfade.graph.program import from_graph_module
from crossfade.graph.text import render
from crossfade.graph.verify import verify
from crossfade.simplify.overwrite_dead_values import OverwriteDeadValues
from tests.growth import grows_linearly
from tests.simplify.holds import declines, program_of, rewrites

X = 'x: f32[4] = input("x")'
CASES = {
    "a chain in one piece of memory": (
        f"""
        {X}
        a: f32[4] = aten.neg(x)
        b: f32[4] = aten.exp(a)
        c: f32[4] = aten.mul.Tensor(b, b)
        return output("c", c)
        """,
        f"""
        {X}
        a: f32[4] = aten.neg(x)
        b: f32[4] = aten.exp_(a)
        c: f32[4] = aten.mul_.Tensor(b, b)
        return output("c", c)
        """,
        {"overwritten": 2},
    ),
    "index_put into a dead base": (
        """
        x: f32[4, 2] = input("x")
        i: i64[1] = input("i")
        v: f32[1, 2] = input("v")
        z: f32[4, 2] = aten.zeros_like(x)
        y: f32[4, 2] = aten.index_put(z, [i], v)
        return output("y", y)
        """,
        """
        x: f32[4, 2] = input("x")
        i: i64[1] = input("i")
        v: f32[1, 2] = input("v")
        z: f32[4, 2] = aten.zeros_like(x)
        y: f32[4, 2] = aten.index_put_(z, [i], v)
        return output("y", y)
        """,
        {"overwritten": 1},
    ),
    "a product accumulates": (
        """
        x: f32[4, 4] = input("x")
        p: f32[4, 4] = aten.mm(x, x)
        y: f32[4, 4] = aten.addmm(p, x, x)
        return output("y", y)
        """,
        """
        x: f32[4, 4] = input("x")
        p: f32[4, 4] = aten.mm(x, x)
        y: f32[4, 4] = aten.addmm_(p, x, x)
        return output("y", y)
        """,
        {"overwritten": 1},
    ),
    "scatters one after another": (
        """
        x: f32[4, 4] = input("x")
        v: f32[4] = input("v")
        n: f32[4, 4] = aten.neg(x)
        a: f32[4, 4] = aten.select_scatter(n, v, 0, 1)
        b: f32[4, 4] = aten.diagonal_scatter(a, v)
        c: f32[4, 4] = aten.exp(b)
        return output("c", c)
        """,
        """
        x: f32[4, 4] = input("x")
        v: f32[4] = input("v")
        n: f32[4, 4] = aten.neg(x)
        select: f32[4] = aten.select.int(n, 0, 1)
        copy_: f32[4] = aten.copy_(select, v)
        diagonal: f32[4] = aten.diagonal(n, 0, 0, 1)
        copy__1: f32[4] = aten.copy_(diagonal, v)
        c: f32[4, 4] = aten.exp_(n)
        return output("c", c)
        """,
        {"scattered": 2, "overwritten": 1},
    ),
    "what was scattered into lives on": (
        """
        x: f32[4] = input("x")
        v: f32[2] = input("v")
        n: f32[4] = aten.neg(x)
        a: f32[4] = aten.slice_scatter(n, v, 0, 0, 2)
        b: f32[4] = aten.exp(a)
        c: f32[4] = aten.mul.Tensor(a, b)
        return output("c", c)
        """,
        """
        x: f32[4] = input("x")
        v: f32[2] = input("v")
        n: f32[4] = aten.neg(x)
        slice_1: f32[2] = aten.slice.Tensor(n, 0, 0, 2, 1)
        copy_: f32[2] = aten.copy_(slice_1, v)
        b: f32[4] = aten.exp(n)
        c: f32[4] = aten.mul_.Tensor(n, b)
        return output("c", c)
        """,
        {"scattered": 1, "overwritten": 1},
    ),
    "parts of a buffer die apart": (
        """
        x: f32[4] = input("x")
        n: f32[4] = aten.neg(x)
        a: f32[2] = aten.slice.Tensor(n, 0, 0, 2)
        b: f32[2] = aten.slice.Tensor(n, 0, 2, 4)
        e: f32[2] = aten.exp(a)
        s: f32[2] = aten.add.Tensor(e, b)
        t: f32[1] = aten.sum.dim_IntList(s, [0], True)
        return output("t", t)
        """,
        """
        x: f32[4] = input("x")
        n: f32[4] = aten.neg(x)
        a: f32[2] = aten.slice.Tensor(n, 0, 0, 2)
        b: f32[2] = aten.slice.Tensor(n, 0, 2, 4)
        e: f32[2] = aten.exp_(a)
        s: f32[2] = aten.add_.Tensor(e, b)
        t: f32[1] = aten.sum.dim_IntList(s, [0], True)
        return output("t", t)
        """,
        {"overwritten": 2},
    ),
    "an input that is to be updated": (
        f"""
        {X}
        g: f32[4] = input("g")
        a: f32[4] = aten.mul.Tensor(x, 0.5)
        b: f32[4] = aten.add.Tensor(a, g)
        c: f32[4] = aten.copy_(x, b)
        n: f32[4] = aten.neg(b)
        return output("n", n)
        """,
        f"""
        {X}
        g: f32[4] = input("g")
        a: f32[4] = aten.mul_.Tensor(x, 0.5)
        b: f32[4] = aten.add_.Tensor(a, g)
        n: f32[4] = aten.neg(b)
        return output("n", n)
        """,
        {"inputs": 1},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_overwritten(name: str):
    rewrites(OverwriteDeadValues(), *CASES[name])


REASONS = {
    "its argument is read again": f"""
        {X}
        a: f32[4] = aten.neg(x)
        b: f32[4] = aten.exp(a)
        c: f32[4] = aten.mul.Tensor(x, a)
        return output("b", b), output("c", c)
    """,
    "its argument is given to the program": f"""
        {X}
        v: f32[2, 2] = aten.view(x, [2, 2])
        b: f32[2, 2] = aten.exp(v)
        return output("b", b)
    """,
    "its result does not fit where its argument lies": f"""
        {X}
        a: f32[4] = aten.neg(x)
        e: f32[3, 4] = aten.expand(a, [3, 4])
        b: f32[3, 4] = aten.exp(e)
        return output("b", b)
    """,
    "another argument shares memory with the one to write": """
        x: f32[4, 4] = input("x")
        a: f32[4, 4] = aten.neg(x)
        t: f32[4, 4] = aten.t(a)
        b: f32[4, 4] = aten.add.Tensor(a, t)
        return output("b", b)
    """,
    "a result of the program would be a part of something larger": f"""
        {X}
        a: f32[4] = aten.neg(x)
        s: f32[2] = aten.slice.Tensor(a, 0, 0, 2)
        b: f32[2] = aten.exp(s)
        return output("b", b)
    """,
    "its old value is read again": f"""
        {X}
        a: f32[4] = aten.neg(x)
        s: f32[4] = aten.sin(x)
        c: f32[4] = aten.copy_(x, a)
        return output("s", s)
    """,
    "its new value is a result of the program": f"""
        {X}
        a: f32[4] = aten.neg(x)
        c: f32[4] = aten.copy_(x, a)
        return output("a", a)
    """,
    "the copy's result is used": f"""
        {X}
        a: f32[4] = aten.neg(x)
        c: f32[4] = aten.copy_(x, a)
        return output("c", c)
    """,
    "its new value is not computed from it step by step": """
        x: f32[4, 4] = input("x")
        a: f32[4, 4] = aten.mm(x, x)
        c: f32[4, 4] = aten.copy_(x, a)
        return
    """,
}


@pytest.mark.parametrize("reason", REASONS)
def test_declined(reason: str):
    declines(OverwriteDeadValues(), REASONS[reason], reason)


@pytest.mark.parametrize(
    "text",
    [
        # a step that reads the input by another view
        """
        x: f32[4, 4] = input("x")
        t: f32[4, 4] = aten.t(x)
        a: f32[4, 4] = aten.add.Tensor(x, t)
        c: f32[4, 4] = aten.copy_(x, a)
        return
        """,
        # dtypes differ: exp of integers is a float
        """
        x: i64[4] = input("x")
        a: i64[4] = aten.neg(x)
        b: f32[4] = aten.exp(a)
        return output("b", b)
        """,
        # the list of parts is read as a whole after one of them
        """
        x: f32[4] = input("x")
        p: (f32[2], f32[2]) = aten.split_copy.Tensor(x, 2)
        a: f32[2] = p[0]
        b: f32[2] = aten.exp(a)
        s: f32[1] = aten.sum.dim_IntList(b, [0], True)
        c: f32[4] = aten.cat(p)
        return output("s", s), output("c", c)
        """,
        # a constant
        """
        k: f32[4] = constant("k")
        b: f32[4] = aten.exp(k)
        return output("b", b)
        """,
        # complex values with a conjugate bit
        """
        x: c64[4] = input("x")
        n: c64[4] = aten.neg(x)
        j: c64[4] = aten._conj(n)
        b: c64[4] = aten.exp(j)
        return output("b", b)
        """,
    ],
)
def test_left_as_it_is(text: str):
    program = program_of(text)
    program.constants = {"k": torch.ones(4)}
    done = run_passes(program, [OverwriteDeadValues()])
    assert render(done) == render(program)


def test_what_a_collective_reads_is_not_written_before_its_wait():
    text = """
        x: f32[4] = input("x")
        a: f32[4] = aten.neg(x)
        start: f32[8] = c10d.all_gather_into_tensor(a, 2, "dp")
        {first}
        {second}
        d: f32[8] = aten.sin(done)
        return output("b", b), output("d", d)
    """
    exp, wait = "b: f32[4] = aten.exp(a)", "done: f32[8] = c10d.wait_tensor(start)"
    before, after = (text.format(first=first, second=second) for first, second in ((exp, wait), (wait, exp)))
    written = "d: f32[8] = aten.sin_(done)"
    assert render(run_passes(program_of(before, dp=2), [OverwriteDeadValues()])) == (
        textwrap.dedent(before).strip().replace("d: f32[8] = aten.sin(done)", written)
    )
    changed = textwrap.dedent(after).strip().replace("aten.exp(a)", "aten.exp_(a)")
    done = run_passes(program_of(after, dp=2), [OverwriteDeadValues()])
    assert render(done) == changed.replace("d: f32[8] = aten.sin(done)", written)
    verify(done)


def test_symbolic_sizes_are_compared_by_proof():
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((x + 1).exp() * y).neg()

    module = make_fx(function, tracing_mode="symbolic")(torch.ones(5, 3), torch.ones(5, 3))
    program = from_graph_module(module)
    done = run_passes(program, [OverwriteDeadValues()])
    assert done.history[0].counts["overwritten"] == 3
    x, y = torch.randn(7, 3), torch.randn(7, 3)
    torch.testing.assert_close(done.module()(x, y)[0], function(x, y))


def test_work_grows_with_long_chains_and_many_readers():
    def overwriting(count: int) -> Callable[[], object]:
        def function(x: torch.Tensor) -> list[torch.Tensor]:
            total = y = x * 2
            for _ in range(count):
                total = total + 1
            return [total, *(y + number for number in range(count))]

        program = from_graph_module(make_fx(function, tracing_mode="fake")(torch.ones(3)))

        def run() -> None:
            done = run_passes(program, [OverwriteDeadValues()], keep_text=False)
            assert done.history[0].counts["overwritten"] == count

        return run

    grows_linearly(overwriting, 200)
