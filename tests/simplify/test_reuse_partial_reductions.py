"""A reduction of many dims starts from that of some, and it does not show: not by NaNs, nor by the signs of zeros."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfade.graph.passes import run_passes
from crossfade.graph.text import DTYPES, parse
from crossfade.graph.verify import verify
from crossfade.simplify.reuse_partial_reductions import ReusePartialReductions
from tests.simplify.holds import declines, rewrites

NAMES = {dtype: name for name, dtype in DTYPES.items()}

CASES = {
    "the one that leaves least to do": (
        """
        x: i64[2, 3, 4] = input("x")
        a: i64[2, 3] = aten.amin(x, [2])
        b: i64[2] = aten.amin(x, [-2, -1])
        c: i64[] = aten.min(x)
        return output("a", a), output("b", b), output("c", c)
        """,
        """
        x: i64[2, 3, 4] = input("x")
        a: i64[2, 3] = aten.amin(x, [2])
        amin: i64[2] = aten.amin(a, [1])
        amin_2: i64[] = aten.amin(amin, [0])
        return output("a", a), output("b", amin), output("c", amin_2)
        """,
        {"partly-reduced": 2, "wholly-reduced": 1},
    ),
    "dims that were not kept": (
        """
        x: f32[2, 3, 4] = input("x")
        some: b8[2, 4] = aten.any.dim(x, 1)
        all_of_it: b8[1, 1, 4] = aten.any.dims(x, [0, 1], True)
        return output("a", some), output("b", all_of_it)
        """,
        """
        x: f32[2, 3, 4] = input("x")
        some: b8[2, 4] = aten.any.dim(x, 1)
        any_1: b8[1, 4] = aten.any.dims(some, [0], True)
        unsqueeze: b8[1, 1, 4] = aten.unsqueeze(any_1, 1)
        return output("a", some), output("b", unsqueeze)
        """,
        {"partly-reduced": 1},
    ),
    "no negative zeros through views": (
        """
        x: bf16[2, 12] = input("x")
        a: bf16[2, 12] = aten.abs(x)
        f: f32[2, 12] = aten._to_copy(a, dtype=f32)
        v: f32[2, 3, 4] = aten.view(f, [2, 3, 4])
        row: f32[2, 3, 1] = aten.amax(v, [2], True)
        whole: f32[] = aten.max(v)
        return output("a", row), output("b", whole)
        """,
        """
        x: bf16[2, 12] = input("x")
        a: bf16[2, 12] = aten.abs(x)
        f: f32[2, 12] = aten._to_copy(a, dtype=f32)
        v: f32[2, 3, 4] = aten.view(f, [2, 3, 4])
        row: f32[2, 3, 1] = aten.amax(v, [2], True)
        amax: f32[] = aten.amax(row, [0, 1, 2])
        return output("a", row), output("b", amax)
        """,
        {"wholly-reduced": 1},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_reused(name: str) -> None:
    rewrites(ReusePartialReductions(), *CASES[name])


LEFT = {
    "alone": ("b: i64[] = aten.amax(x)", "no other reduction of this kind"),
    "of the same dims": (
        "a: i64[3, 1] = aten.amax(x, [1], True)\nb: i64[3] = aten.amax(x, [-1])",
        "no other reduction of this kind",
    ),
    "of other dims": (
        "a: i64[4] = aten.amax(x, [0])\nb: i64[3] = aten.amax(x, [1])",
        "no other reduction of this kind",
    ),
    "of another kind": ("a: i64[4] = aten.amin(x, [0])\nb: i64[] = aten.amax(x)", "no other reduction of this kind"),
    "below": ("b: i64[] = aten.amax(x)\na: i64[4] = aten.amax(x, [0])", "stands below it"),
    "zeros of both signs": ("a: f32[4] = aten.amax(f, [0])\nb: f32[] = aten.amax(f)", "zeros of both signs"),
    "written in between": (
        "k: i64[3, 4] = aten.clone(x)\na: i64[4] = aten.amax(k, [0])\nw: i64[3, 4] = aten.add_.Tensor(k, 1)\n"
        "b: i64[] = aten.amax(k)",
        "is written to",
    ),
    "written afterwards": (
        "a: i64[4] = aten.amax(x, [0])\nw: i64[4] = aten.add_.Tensor(a, 1)\nb: i64[] = aten.amax(x)",
        "is written to",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    body, reason = LEFT[name]
    results = ", ".join(f'output("{name}", {name})' for name in "ab" if f"\n{name}: " in f"\n{body}")
    head = 'x: i64[3, 4] = input("x")\nf: f32[3, 4] = input("f")'
    declines(ReusePartialReductions(), f"{head}\n{body}\nreturn {results}", reason)


def test_sums_are_left() -> None:
    program = parse("""
        x: f32[3, 4] = input("x")
        a: f32[4] = aten.sum.dim_IntList(x, [0])
        b: f32[] = aten.sum(x)
        return output("a", a), output("b", b)
    """)
    assert not run_passes(program, [ReusePartialReductions()]).history[0].changed


EDGES = [0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 1e-40]
DIMS = st.sets(st.integers(0, 2), max_size=3).map(sorted)


@settings(deadline=None, max_examples=50)
@given(
    st.sampled_from(["amax", "amin", "any.dims", "all.dims"]),
    DIMS,
    DIMS,
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32, torch.float64]),
    st.integers(0, 2**32 - 1),
)
def test_sampled_reductions(
    kind: str, few: list[int], more: list[int], kept: bool, keep: bool, dtype: torch.dtype, seed: int
) -> None:
    many = sorted({*few, *more})
    made = "aten.abs(x)" if dtype.is_floating_point else "aten.clone(x)"
    program = parse(f"""
        x: {NAMES[dtype]}[3, 9, 17] = input("x")
        v = {made}
        a = aten.{kind}(v, {few}, {kept})
        b = aten.{kind}(v, {[dim - 3 for dim in many]}, {keep})
        return output("a", a), output("b", b)
    """)
    done = run_passes(program, [ReusePartialReductions()])
    verify(done, recompute=True)
    draw = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        x = torch.tensor(EDGES)[torch.randint(0, draw_from(seed), (3, 9, 17), generator=draw)].to(dtype)
    else:
        x = torch.randint(0, 2 + seed % 3, (3, 9, 17), generator=draw).to(dtype)
    for expected, actual in zip(program.module()(x), done.module()(x), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
        assert actual.stride() == expected.stride()
        if dtype.is_floating_point and expected.is_floating_point():
            assert torch.equal(actual.signbit(), expected.signbit())
    reused = set(few) < set(many) and (few or not kind.startswith("a") or kind.startswith(("any", "all")))
    assert done.history[0].changed == bool(reused)


def draw_from(seed: int) -> int:
    """How many of the edge cases to draw from: zeros alone, or with more."""
    return (2, 4, 6, len(EDGES))[seed % 4]
