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
    declines(UnfuseBias(), text(scales=", beta=2"), "it scales the bias or the product")
    declines(UnfuseBias(), text(scales=", alpha=2"), "it scales the bias or the product")
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
