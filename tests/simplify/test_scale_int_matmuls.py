"""Conversions of integer products go into the multiplication that scales them, bit by bit the same."""

from __future__ import annotations

import pytest
import torch

from crossfade.graph.passes import run_passes
from crossfade.graph.text import DTYPES
from crossfade.simplify.scale_int_matmuls import ScaleIntMatmuls
from tests.simplify.holds import declines, program_of, rewrites

HEAD = """
    a: i8[32, 8] = input("a")
    b: i8[8, 16] = input("b")
    scale: {dtype}[{scale}] = input("scale")
    p: i32[32, 16] = aten._int_mm(a, b)"""
TAIL = """
    f: {dtype}[32, 16] = {convert}
    y: {result}[32, 16] = aten.mul.Tensor({factors})
    return output("y", y){more}
"""


def text(
    scale: str = "16",
    dtype: str = "f32",
    convert: str = "aten._to_copy(p, dtype=f32)",
    factors: str = "f, scale",
    more: str = "",
) -> str:
    return (HEAD + TAIL).format(scale=scale, dtype=dtype, convert=convert, factors=factors, more=more, result=dtype)


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("scale", ["16", "32, 1", ""])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("convert", ["aten._to_copy(p, dtype={})", "aten.to.dtype(p, {})"])
def test_converted_by_the_multiplication(dtype: str, scale: str, swapped: bool, convert: str):
    factors = "scale, f" if swapped else "f, scale"
    after = (
        HEAD.format(dtype=dtype, scale=scale)
        + f"""
    mul: {dtype}[32, 16] = aten.mul.Tensor({factors.replace("f", "p")})
    return output("y", mul)
    """
    )
    rewrites(ScaleIntMatmuls(), text(scale, dtype, convert.format(dtype), factors), after, {"conversion": 1})


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("shape", [(16,), (32, 1), ()])
def test_large_products_are_rounded_alike(dtype: str, shape: tuple[int, ...]):
    program = program_of(text(", ".join(map(str, shape)), dtype, f"aten._to_copy(p, dtype={dtype})"))
    done = run_passes(program, [ScaleIntMatmuls()])
    a = torch.randint(-128, 128, (32, 8), dtype=torch.int8)
    b = torch.randint(-128, 128, (8, 16), dtype=torch.int8)
    scale = torch.randn(shape).to(DTYPES[dtype])
    (expected,), (found,) = (version.module()(a, b, scale) for version in (program, done))
    assert torch.equal(expected, found)


def test_declined():
    step = ScaleIntMatmuls()
    declines(step, text(more=', output("f", f)'), "the converted product has other users")
    declines(step, text(factors="f, 0.5"), "its scale is a number")
    declines(step, text(factors="f, f"), "the converted product has other users")
    mixed = text().replace('scale: f32[16] = input("scale")', 'scale: f64[16] = input("scale")')
    declines(step, mixed.replace("y: f32", "y: f64"), "its scale has another dtype")
    whole = text().replace('scale: f32[16] = input("scale")', 'scale: i32[16] = input("scale")')
    declines(step, whole, "its scale has another dtype")


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_half_precision_is_declined(dtype: str):
    """A product of one element is multiplied by torch before it is rounded."""
    declines(ScaleIntMatmuls(), text().replace("f32", dtype), "its scale is of half precision")
