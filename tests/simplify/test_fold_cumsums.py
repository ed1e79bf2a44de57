"""Running sums of one number are written down where every sum is exact, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from crossfade.graph.passes import run_passes
from crossfade.graph.program import from_graph_module
from crossfade.graph.text import DTYPES, parse
from crossfade.graph.verify import verify
from crossfade.simplify.fold_cumsums import FoldCumsums
from tests.simplify.holds import declines, rewrites

NAMES = {dtype: name for name, dtype in DTYPES.items()}


def test_one_line_needs_no_copy() -> None:
    rewrites(
        FoldCumsums(),
        """
        x: f32[5] = input("x")
        full: f32[5] = aten.full_like(x, -3)
        cumsum: f32[5] = aten.cumsum(full, -1)
        return output("y", cumsum)
        """,
        """
        x: f32[5] = input("x")
        arange: f32[5] = aten.arange.start_step(-3, -18, -3, dtype=f32, device=device("cpu"))
        return output("y", arange)
        """,
        {"cumsum-of-one-number": 1},
    )


def test_bools_are_summed_as_integers() -> None:
    rewrites(
        FoldCumsums(),
        """
        x: f32[1, 5] = input("x")
        ones: b8[1, 5] = aten.full([1, 5], 7, dtype=b8)
        cumsum: i64[1, 5] = aten.cumsum(ones, 1)
        other: b8[1, 5] = aten.logical_not(ones)
        return output("y", cumsum), output("z", other)
        """,
        """
        x: f32[1, 5] = input("x")
        ones: b8[1, 5] = aten.full([1, 5], 7, dtype=b8)
        arange: i64[5] = aten.arange.start_step(1, 6, dtype=i64, device=device("cpu"))
        view: i64[1, 5] = aten.view(arange, [1, 5])
        other: b8[1, 5] = aten.logical_not(ones)
        return output("y", view), output("z", other)
        """,
    )


LEFT = {
    "not filled": ('c: f32[4] = input("c")', "c, 0", "not a tensor filled with one number"),
    "a fraction": ("c: f32[4] = aten.full([4], 0.5)", "c, 0", "no whole number"),
    "a fraction made whole": ("c: i64[4] = aten.full([4], 1.5, dtype=i64)", "c, 0", "no whole number"),
    "infinity": ('c: f32[4] = aten.full([4], float("inf"))', "c, 0", "no whole number"),
    "not a number": ('c: f32[4] = aten.full([4], float("nan"))', "c, 0", "no whole number"),
    "zero": ("c: f32[4] = aten.zeros([4])", "c, 0", "the number is zero"),
    "negative zero": ("c: f32[4] = aten.full([4], -0.0)", "c, 0", "the number is zero"),
    "a rounded number": ("c: f32[4] = aten.full([4], 16777217.0)", "c, 0, dtype=f64", "not one that its dtype holds"),
    "complex": ("c: c64[4] = aten.ones([4], dtype=c64)", "c, 0", "not one that its dtype holds"),
    "complex sums": ("c: f32[4] = aten.ones([4])", "c, 0, dtype=c64", "sums of its dtype are not known"),
    "sums of bools": ("c: f32[4] = aten.ones([4])", "c, 0, dtype=b8", "sums of its dtype are not known"),
    "rounded sums": ("c: f32[9] = aten.full([9], 2097152.0)", "c, 0", "its sums leave the whole numbers"),
    "rounded halves": ("c: f16[2048] = aten.ones([2048], dtype=f16)", "c, 0", "its sums leave"),
    "sums that wrap": ("c: i64[200] = aten.ones([200], dtype=i64)", "c, 0, dtype=i8", "its sums leave"),
    "written": (
        "c: f32[4] = aten.ones([4])\nw: f32[4] = aten.add_.Tensor(c, 1)",
        "c, 0",
        "memory it is computed from, is written",
    ),
    "written through a view": (
        "c: f32[4] = aten.ones([4])\nv: f32[2, 2] = aten.view(c, [2, 2])\nw: f32[2, 2] = aten.add_.Tensor(v, 1)",
        "c, 0",
        "memory it is computed from, is written",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    made, arguments, reason = LEFT[name]
    declines(FoldCumsums(), f'{made}\ny = aten.cumsum({arguments})\nreturn output("y", y)', reason)


def test_symbolic_sizes_are_left() -> None:
    module = make_fx(lambda x: torch.ones_like(x).cumsum(0), tracing_mode="symbolic")(torch.ones(3))
    done = run_passes(from_graph_module(module), [FoldCumsums()])
    assert [verdict.reason for verdict in done.history[0].verdicts] == ["its size is not a known number"]


WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.sampled_from([0, 1, 2, 7, 40]), min_size=0, max_size=3),
    st.integers(-3, 2),
    st.sampled_from([1, -1, 2, 3, 51, 100, 2**20, 2**40, 0.25, -0.0]),
    st.sampled_from([*WHOLE, *FLOATS]),
    st.sampled_from([None, torch.int8, torch.int64, *FLOATS]),
)
def test_sampled_sums(shape: list[int], dim: int, value: float, dtype: torch.dtype, wanted: torch.dtype | None) -> None:
    dim = dim % len(shape) - len(shape) * (dim < 0) if shape else 0
    try:
        torch.full(shape, value, dtype=dtype)
    except RuntimeError:  # the number is not one of this dtype
        return
    given = f", dtype={NAMES[wanted]}" if wanted else ""
    full = f"full = aten.full({shape}, {value}, dtype={NAMES[dtype]})"
    program = parse(f'{full}\ny = aten.cumsum(full, {dim}{given})\nreturn output("y", y)')
    done = run_passes(program, [FoldCumsums()])
    verify(done, recompute=True)
    (expected,), (actual,) = program.module()(), done.module()()
    assert torch.equal(actual, expected) and actual.dtype == expected.dtype and actual.stride() == expected.stride()
    assert torch.equal(actual.signbit(), expected.signbit())
