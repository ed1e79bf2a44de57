"""Whatever a product can add itself, it adds; every other sum stays, with the reason."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfade.graph.passes import run_passes
from crossfade.graph.text import render
from crossfade.simplify.form_addmm import FormAddmm
from crossfade.simplify.unfuse_bias import UnfuseBias
from tests.simplify.holds import declines, program_of, rewrites, run

HEAD = """
    x: {dtype}[4, 2] = input("x")
    w: {dtype}[2, 3] = input("w")
    bias: {dtype}[{bias}] = input("bias")"""
SUM = """
    mm: {dtype}[4, 3] = aten.mm(x, w)
    s: {dtype}[4, 3] = aten.add.Tensor({arguments})
    return output("s", s)
"""


def text(bias: str = "3", arguments: str = "mm, bias", dtype: str = "f32") -> str:
    return (HEAD + SUM).format(bias=bias, arguments=arguments, dtype=dtype)


@pytest.mark.parametrize("bias", ["3", "4, 3", "4, 1", "1, 3", "1", ""])
@pytest.mark.parametrize(
    ("arguments", "scale", "rule"),
    [
        ("mm, bias", "", "product-plus-bias"),
        ("bias, mm", "", "bias-plus-product"),
        ("mm, bias, alpha=3", ", beta=3", "product-plus-bias"),
        ("bias, mm, alpha=3", ", alpha=3", "bias-plus-product"),
        ("mm, other=bias", "", "product-plus-bias"),
    ],
)
@pytest.mark.parametrize("dtype", ["f32", "i64"])
def test_formed(bias: str, arguments: str, scale: str, rule: str, dtype: str):
    after = (
        HEAD.format(bias=bias, dtype=dtype)
        + f"""
    addmm: {dtype}[4, 3] = aten.addmm(bias, x, w{scale})
    return output("s", addmm)
    """
    )
    rewrites(FormAddmm(), text(bias, arguments, dtype), after, {rule: 1})


def test_the_second_product_is_formed_where_the_first_is_used_elsewhere():
    rewrites(
        FormAddmm(),
        """
        x: f32[2, 2] = input("x")
        p: f32[2, 2] = aten.mm(x, x)
        t: f32[2, 2] = aten.t(x)
        q: f32[2, 2] = aten.mm(x, t)
        s: f32[2, 2] = aten.add.Tensor(p, q)
        return output("s", s), output("p", p)
        """,
        """
        x: f32[2, 2] = input("x")
        p: f32[2, 2] = aten.mm(x, x)
        t: f32[2, 2] = aten.t(x)
        addmm: f32[2, 2] = aten.addmm(p, x, t)
        return output("s", addmm), output("p", p)
        """,
        {"bias-plus-product": 1},
    )


def pointwise(result: str = "r") -> str:
    return text().replace('return output("s", s)', f'r: f32[4, 3] = aten.relu(s)\n    return output("r", {result})')


REASONS = {
    "the product has other users": text().rstrip() + ', output("mm", mm)\n',
    "what is added is a number": text(arguments="mm, 2.0"),
    "its alpha is zero": text(arguments="mm, bias, alpha=0"),
    "another dtype": """
    x: f32[4, 2] = input("x")
    w: f32[2, 3] = input("w")
    bias: f64[] = input("bias")
    mm: f32[4, 3] = aten.mm(x, w)
    s: f32[4, 3] = aten.add.Tensor(mm, bias)
    return output("s", s)
    """,
    "more dims": """
    x: f32[4, 2] = input("x")
    w: f32[2, 3] = input("w")
    bias: f32[1, 4, 3] = input("bias")
    mm: f32[4, 3] = aten.mm(x, w)
    s: f32[1, 4, 3] = aten.add.Tensor(mm, bias)
    return output("s", s)
    """,
    "does not provably broadcast": """
    x: f32[1, 2] = input("x")
    w: f32[2, 3] = input("w")
    bias: f32[4, 3] = input("bias")
    mm: f32[1, 3] = aten.mm(x, w)
    s: f32[4, 3] = aten.add.Tensor(mm, bias)
    return output("s", s)
    """,
}


@pytest.mark.parametrize("reason", REASONS)
def test_declined(reason: str):
    declines(FormAddmm(), REASONS[reason], reason)


def test_a_sum_with_itself_is_no_bias():
    declines(
        FormAddmm(),
        """
        x: f32[2, 2] = input("x")
        p: f32[2, 2] = aten.mm(x, x)
        s: f32[2, 2] = aten.add.Tensor(p, p)
        return output("s", s)
        """,
        "the product has other users",
    )


def test_a_compiler_fuses_sums_that_pointwise_ops_read():
    declines(FormAddmm(compiled=True), pointwise(), "its users are pointwise")
    assert run_passes(program_of(pointwise()), [FormAddmm()]).history[0].changed
    assert run_passes(program_of(text()), [FormAddmm(compiled=True)]).history[0].changed


@pytest.mark.parametrize("given_text", [text(), pointwise()])
def test_the_two_passes_do_not_undo_one_another(given_text: str):
    once = run_passes(program_of(given_text), [FormAddmm(compiled=True), UnfuseBias()])
    again = run_passes(once, [FormAddmm(compiled=True), UnfuseBias()])
    assert render(once) == render(again)
    assert not any(record.changed for record in again.history[2:])


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(["3", "4, 3", "4, 1", ""]), st.sampled_from(["f32", "bf16", "f16", "c64"]))
def test_values(bias: str, dtype: str):
    done = run_passes(program_of(text(bias, "mm, bias, alpha=2", dtype)), [FormAddmm()])
    assert done.history[0].changed
    (found,), (x, w, b) = run(done, 0)
    wide = torch.complex128 if dtype == "c64" else torch.float64
    expected = x.to(wide) @ w.to(wide) + 2 * b.to(wide)
    tolerance = {"bf16": 0.06, "f16": 0.01}.get(dtype, 1e-5)
    torch.testing.assert_close(found.to(wide), expected, rtol=tolerance, atol=tolerance)
