"""Products bound by memory are written out where that is one loop with what follows."""

from __future__ import annotations

import pytest
import torch

from crossfade.cost.presets import preset
from crossfade.graph.passes import Outcome, run_passes
from crossfade.simplify.decompose_thin_matmuls import DecomposeThinMatmuls
from tests.simplify.holds import declines, program_of, rewrites, run

H200 = DecomposeThinMatmuls(machine=preset("h200-nvlink-node"))
TEXT = """
    a: {dtype}[{m}, {k}] = input("a")
    b: {dtype}[{k}, {n}] = input("b")
    p: {dtype}[{m}, {n}] = aten.mm(a, b)
    y: {dtype}[{m}, {n}] = aten.{user}
    return output("y", y)
"""


def text(m: int, k: int, n: int, dtype: str = "f32", user: str = "relu(p)") -> str:
    return TEXT.format(m=m, k=k, n=n, dtype=dtype, user=user)


def test_a_thin_product_on_a_machine():
    after = """
    a: f32[20480, 2] = input("a")
    b: f32[2, 16] = input("b")
    unsqueeze: f32[20480, 2, 1] = aten.unsqueeze(a, 2)
    unsqueeze_1: f32[1, 2, 16] = aten.unsqueeze(b, 0)
    mul: f32[20480, 2, 16] = aten.mul.Tensor(unsqueeze, unsqueeze_1)
    sum_1: f32[20480, 16] = aten.sum.dim_IntList(mul, [1])
    y: f32[20480, 16] = aten.relu(sum_1)
    return output("y", y)
    """
    done = rewrites(H200, text(20480, 2, 16), after, {"product": 1})
    (verdict,) = done.history[0].verdicts
    assert verdict.outcome is Outcome.REPLACED
    assert "us on h200-nvlink-node" in verdict.detail


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64"])
@pytest.mark.parametrize("sizes", [(64, 1, 32), (20480, 2, 16), (30000, 4, 1), (0, 2, 3), (1, 3, 30000)])
def test_values(sizes: tuple[int, int, int], dtype: str):
    """As exact as the product itself: half precision is summed in float32."""
    done = run_passes(program_of(text(*sizes, dtype=dtype)), [H200])
    (found,), (a, b) = run(done, 0)
    tolerance = {"bf16": 0.01, "f16": 2e-3, "f32": 1e-5}.get(dtype, 1e-12)
    expected = (a.double() @ b.double()).relu()
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    assert found.dtype == a.dtype


REASONS = [
    (DecomposeThinMatmuls(compiled=False), text(64, 1, 32), "run op by op"),
    (DecomposeThinMatmuls(), text(64, 1, 32, "i64"), "not a floating-point one"),
    (DecomposeThinMatmuls(), text(64, 1, 32, user="cumsum(p, 0)"), "not all its users are pointwise"),
    (DecomposeThinMatmuls(), text(64, 2, 32), "it is no outer product"),
    (H200, text(2048, 2048, 2048), "plain arithmetic would take longer than its memory on this machine"),
    (H200, text(4096, 4096, 1), "it would not be faster on this machine"),
]


@pytest.mark.parametrize(("step", "program", "reason"), REASONS)
def test_declined(step: DecomposeThinMatmuls, program: str, reason: str):
    declines(step, program, reason)
    if "machine" in reason:
        (verdict,) = run_passes(program_of(program), [step]).history[0].verdicts
        assert "FLOP" in verdict.detail
