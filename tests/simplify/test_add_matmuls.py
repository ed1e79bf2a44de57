"""Sums of products accumulate or are concatenated; which, and why not, is said with numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfade.cost.presets import preset
from crossfade.graph.passes import Outcome, run_passes
from crossfade.simplify.add_matmuls import AddMatmuls
from tests.simplify.holds import declines, program_of, rewrites, run

H200 = AddMatmuls(machine=preset("h200-nvlink-node"))
TEXT = """
    a: {dtype}[{m}, {k}] = input("a")
    b: {dtype}[{k}, {n}] = input("b")
    c: {dtype}[{m}, {l}] = input("c")
    d: {dtype}[{l}, {n}] = input("d")
    p: {dtype}[{m}, {n}] = aten.mm(a, b)
    q: {dtype}[{m}, {n}] = aten.mm(c, d)
    s: {dtype}[{m}, {n}] = aten.add.Tensor(p, q{alpha})
    return output("s", s){more}
"""


def text(m: int = 4, k: int = 2, n: int = 3, l: int = 5, dtype: str = "f32", alpha: str = "", more: str = "") -> str:  # noqa: E741
    return TEXT.format(m=m, k=k, n=n, l=l, dtype=dtype, alpha=alpha, more=more)


HEAD = "\n".join(text().splitlines()[:6])


def test_the_second_is_scaled():
    after = (
        HEAD
        + """
    addmm: f32[4, 3] = aten.addmm(p, c, d, alpha=2)
    return output("s", addmm)
    """
    )
    rewrites(AddMatmuls(), text(alpha=", alpha=2"), after, {"accumulate": 1})


def test_the_first_accumulates_where_the_second_is_used_elsewhere():
    after = """
    a: f32[4, 2] = input("a")
    b: f32[2, 3] = input("b")
    c: f32[4, 5] = input("c")
    d: f32[5, 3] = input("d")
    q: f32[4, 3] = aten.mm(c, d)
    addmm: f32[4, 3] = aten.addmm(q, a, b)
    return output("s", addmm), output("q", q)
    """
    rewrites(AddMatmuls(), text(more=', output("q", q)'), after, {"accumulate": 1})


def test_thin_products_are_concatenated_on_a_machine():
    after = """
    a: f32[2048, 2] = input("a")
    b: f32[2, 2048] = input("b")
    c: f32[2048, 5] = input("c")
    d: f32[5, 2048] = input("d")
    cat: f32[2048, 7] = aten.cat([a, c], 1)
    cat_1: f32[7, 2048] = aten.cat([b, d])
    mm: f32[2048, 2048] = aten.mm(cat, cat_1)
    return output("s", mm)
    """
    done = rewrites(H200, text(2048, 2, 2048), after, {"concatenate": 1})
    (verdict,) = done.history[0].verdicts
    assert verdict.outcome is Outcome.REPLACED
    assert "us on h200-nvlink-node" in verdict.detail


def test_thick_products_accumulate_on_a_machine():
    done = run_passes(program_of(text(512, 512, 512, 512)), [H200])
    assert done.history[0].counts == {"accumulate": 1}


REASONS = {
    "both products have other users": (text(more=', output("p", p), output("q", q)'), AddMatmuls()),
    "a product has other users": (text(more=', output("p", p), output("q", q)'), H200),
    "its alpha is zero": (text(alpha=", alpha=0"), AddMatmuls()),
    "its products are of two dtypes": (
        """
        a: f32[2, 2] = input("a")
        b: f64[2, 2] = input("b")
        p: f32[2, 2] = aten.mm(a, a)
        q: f64[2, 2] = aten.mm(b, b)
        s: f64[2, 2] = aten.add.Tensor(p, q)
        return output("s", s)
        """,
        AddMatmuls(),
    ),
    "not provably of one shape": (
        """
        a: f32[1, 2] = input("a")
        b: f32[2, 2] = input("b")
        p: f32[1, 2] = aten.mm(a, b)
        q: f32[2, 2] = aten.mm(b, b)
        s: f32[2, 2] = aten.add.Tensor(p, q)
        return output("s", s)
        """,
        AddMatmuls(),
    ),
    "or are one": (
        """
        a: f32[2, 2] = input("a")
        p: f32[2, 2] = aten.mm(a, a)
        s: f32[2, 2] = aten.add.Tensor(p, p)
        return output("s", s)
        """,
        AddMatmuls(),
    ),
    "it would read later what is written to": (
        """
        a: f32[2, 2] = input("a")
        b: f32[2, 2] = input("b")
        p: f32[2, 2] = aten.mm(a, a)
        q: f32[2, 2] = aten.mm(b, b)
        w: f32[2, 2] = aten.add_.Tensor(b, 1)
        s: f32[2, 2] = aten.add.Tensor(p, q)
        return output("s", s)
        """,
        AddMatmuls(),
    ),
}


@pytest.mark.parametrize("reason", REASONS)
def test_declined(reason: str):
    program, step = REASONS[reason]
    declines(step, program, reason)


def test_a_scaled_sum_is_not_concatenated():
    done = run_passes(program_of(text(2048, 2, 2048, alpha=", alpha=2")), [H200])
    assert done.history[0].counts == {"accumulate": 1}


@settings(max_examples=20, deadline=None)
@given(st.tuples(*[st.integers(0, 9)] * 4), st.sampled_from(["f32", "bf16", "f64", "i64"]), st.booleans())
def test_values(sizes: tuple[int, ...], dtype: str, on_machine: bool):
    """Both forms against a sum in double precision: no worse than the separate products are."""
    program = program_of(text(*sizes, dtype=dtype))
    done = run_passes(program, [H200 if on_machine else AddMatmuls()])
    assert done.history[0].changed
    (found,), (a, b, c, d) = run(done, 0)
    expected = a.double() @ b.double() + c.double() @ d.double()
    tolerance = {"bf16": 0.06, "f32": 1e-5}.get(dtype, 1e-12)
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
