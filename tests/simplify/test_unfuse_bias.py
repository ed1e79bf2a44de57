"""Biases come out only where pointwise ops would take them in."""

from __future__ import annotations

import pytest
import torch

from crossfade.graph.passes import run_passes
from crossfade.simplify.unfuse_bias import UnfuseBias
from tests.simplify.holds import declines, program_of, rewrites, run

TEXT = """
    x: {dtype}[4, 2] = input("x")
    w: {dtype}[2, 3] = input("w")
    bias: {dtype}[{bias}] = input("bias")
    addmm: {dtype}[4, 3] = aten.addmm(bias, x, w{scales})
    r: {dtype}[4, 3] = aten.{user}(addmm)
    return output("r", r){more}
"""


def text(bias: str = "3", scales: str = "", user: str = "relu", more: str = "", dtype: str = "f32") -> str:
    return TEXT.format(bias=bias, scales=scales, user=user, more=more, dtype=dtype)


@pytest.mark.parametrize("bias", ["3", "4, 3", "4, 1", "1", ""])
def test_apart(bias: str):
    after = f"""
    x: f32[4, 2] = input("x")
    w: f32[2, 3] = input("w")
    bias: f32[{bias}] = input("bias")
    mm: f32[4, 3] = aten.mm(x, w)
    add: f32[4, 3] = aten.add.Tensor(mm, bias)
    r: f32[4, 3] = aten.relu(add)
    return output("r", r)
    """
    rewrites(UnfuseBias(), text(bias), after, {"bias": 1})


def test_declined():
    viewed = text().replace(
        "r: f32[4, 3] = aten.relu(addmm)", "v: f32[12] = aten.view(addmm, [12])\n    r: f32[12] = {}"
    )
    declines(UnfuseBias(), viewed.format("aten.cumsum(v, 0)"), "not all its users are pointwise")
    declines(UnfuseBias(), viewed.replace("r: f32[12] = {}", "").replace('"r", r', '"r", v'), "not all its users are")
    written = viewed.format("aten.mul_.Tensor(v, 2)")
    assert not run_passes(program_of(written), [UnfuseBias()]).history[0].changed, "its memory is written to"
    declines(UnfuseBias(), text(user="clone", more=', output("a", addmm)'), "not all its users are pointwise")
    declines(UnfuseBias(), text(user="cumsum").replace("(addmm)", "(addmm, 0)"), "not all its users are pointwise")
    declines(UnfuseBias(devices=("cuda",)), text(), "its device is not one on which a compiler fuses")


@pytest.mark.parametrize(("dtype", "tolerance"), [("f32", 1e-5), ("bf16", 0.06)])
def test_values(dtype: str, tolerance: float):
    done = run_passes(program_of(text(dtype=dtype)), [UnfuseBias()])
    assert done.history[0].changed
    (found,), (x, w, b) = run(done, 0)
    expected = (x.double() @ w.double() + b.double()).relu()
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("scales", "lines"),
    {
        ", beta=2": "mul: f32[3] = aten.mul.Tensor(bias, 2)\n    add: f32[4, 3] = aten.add.Tensor(mm, mul)",
        ", alpha=0.5": "mul: f32[4, 3] = aten.mul.Tensor(mm, 0.5)\n    add: f32[4, 3] = aten.add.Tensor(mul, bias)",
        ", beta=3, alpha=2": "mul: f32[4, 3] = aten.mul.Tensor(mm, 2)\n    mul_1: f32[3] = aten.mul.Tensor(bias, 3)"
        "\n    add: f32[4, 3] = aten.add.Tensor(mul, mul_1)",
    }.items(),
)
def test_scales_go_into_the_loop_too(scales: str, lines: str):
    after = f"""
    x: f32[4, 2] = input("x")
    w: f32[2, 3] = input("w")
    bias: f32[3] = input("bias")
    mm: f32[4, 3] = aten.mm(x, w)
    {lines}
    r: f32[4, 3] = aten.relu(add)
    return output("r", r)
    """
    rewrites(UnfuseBias(), text(scales=scales), after, {"bias": 1})


def test_a_bias_that_does_not_count_is_left_out():
    done = run_passes(program_of(text(scales=", beta=0")), [UnfuseBias()])
    x, w = torch.randn(4, 2), torch.randn(2, 3)
    found = done.module()(x, w, torch.full((3,), torch.nan))[0]
    torch.testing.assert_close(found, (x @ w).relu())


def test_behind_views():
    before = """
    x: f32[4, 2] = input("x")
    w: f32[2, 3] = input("w")
    bias: f32[3] = input("bias")
    addmm: f32[4, 3] = aten.addmm(bias, x, w)
    v: f32[2, 2, 3] = aten.view(addmm, [2, 2, 3])
    t: f32[2, 3, 2] = aten.transpose.int(v, 1, 2)
    r: f32[2, 3, 2] = aten.relu(t)
    n: f32[4, 3] = aten.neg(addmm)
    return output("r", r), output("n", n)
    """
    after = before.replace(
        "addmm: f32[4, 3] = aten.addmm(bias, x, w)",
        "mm: f32[4, 3] = aten.mm(x, w)\n    add: f32[4, 3] = aten.add.Tensor(mm, bias)",
    ).replace("(addmm", "(add")
    rewrites(UnfuseBias(), before, after, {"bias": 1})
