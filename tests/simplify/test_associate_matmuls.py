"""Chains are computed in the best of all orders, and only those that nothing looks into."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfade.cost.presets import preset
from crossfade.graph.passes import Outcome, run_passes
from crossfade.simplify.associate_matmuls import AssociateMatmuls
from tests.simplify.holds import declines, program_of, rewrites, run

CPU = AssociateMatmuls(machine=preset("loopback-gloo"))


def chain(sizes: tuple[int, ...], dtype: str = "f32") -> str:
    """Matrices multiplied from the left."""
    lines = [f'm{i}: {dtype}[{a}, {b}] = input("m{i}")' for i, (a, b) in enumerate(itertools.pairwise(sizes))]
    last = "m0"
    for i in range(1, len(sizes) - 1):
        lines.append(f"p{i}: {dtype}[{sizes[0]}, {sizes[i + 1]}] = aten.mm({last}, m{i})")
        last = f"p{i}"
    return "\n".join([*lines, f'return output("y", {last})'])


def fewest(sizes: tuple[int, ...]) -> int:
    """The floating-point operations of the best order, by trying all."""

    @cache
    def best(i: int, j: int) -> int:
        options = [best(i, k) + best(k, j) + 2 * sizes[i] * sizes[k] * sizes[j] for k in range(i + 1, j)]
        return min(options, default=0)

    return best(0, len(sizes) - 1)


def flops(program) -> int:
    products = program.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    shapes = [(*product.args[0].meta["val"].shape, product.args[1].meta["val"].shape[1]) for product in products]
    return sum(2 * m * k * n for m, k, n in shapes)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=4, max_size=7).map(tuple), st.sampled_from(["f32", "bf16", "f64", "i64"]))
def test_the_best_order_of_all(sizes: tuple[int, ...], dtype: str):
    program = program_of(chain(sizes, dtype))
    done = run_passes(program, [AssociateMatmuls()])
    (verdict,) = done.history[0].verdicts
    assert (verdict.outcome is Outcome.REPLACED) == done.history[0].changed
    if verdict.reason != "it does not need less of everything, and no machine says what that costs":
        assert flops(done) == fewest(sizes)
    (found,), inputs = run(done, 0)
    expected = torch.linalg.multi_dot([matrix.double() for matrix in inputs])
    scale = torch.linalg.multi_dot([matrix.double().abs() for matrix in inputs]).clamp(min=1)
    tolerance = {"bf16": 0.05, "f32": 1e-5}.get(dtype, 1e-12)
    assert ((found.double() - expected).abs() <= tolerance * scale).all()


def test_numbers_are_told():
    done = run_passes(program_of(chain((64, 2, 64, 2))), [AssociateMatmuls()])
    (verdict,) = done.history[0].verdicts
    assert verdict.detail == "32768 FLOP, 34816 B, 2 calls -> 1024 FLOP, 2080 B, 2 calls"


def test_a_machine_decides_by_seconds():
    done = run_passes(program_of(chain((512, 16, 512, 16))), [CPU])
    (verdict,) = done.history[0].verdicts
    assert verdict.outcome is Outcome.REPLACED
    assert "us on loopback-gloo" in verdict.detail
    declines(CPU, chain((4, 3, 4, 3)), "it would not be faster on this machine")


def test_branches_are_part_of_the_chain():
    rewrites(
        AssociateMatmuls(),
        """
        a: f32[9, 2] = input("a")
        b: f32[2, 9] = input("b")
        c: f32[9, 2] = input("c")
        d: f32[2, 9] = input("d")
        p: f32[9, 9] = aten.mm(a, b)
        q: f32[9, 9] = aten.mm(c, d)
        y: f32[9, 9] = aten.mm(p, q)
        return output("y", y)
        """,
        """
        a: f32[9, 2] = input("a")
        b: f32[2, 9] = input("b")
        c: f32[9, 2] = input("c")
        d: f32[2, 9] = input("d")
        mm: f32[2, 2] = aten.mm(b, c)
        mm_1: f32[9, 2] = aten.mm(a, mm)
        mm_2: f32[9, 9] = aten.mm(mm_1, d)
        return output("y", mm_2)
        """,
        {"chains": 1},
    )


def test_products_that_others_read_are_no_part_of_a_chain():
    text = chain((64, 2, 64, 2)) + ', output("p1", p1)'
    done = run_passes(program_of(text), [AssociateMatmuls()])
    assert not done.history[0].changed
    assert done.history[0].verdicts == ()


def test_a_square_is_one_product():
    """Both factors are one value: written out, it would be computed twice."""
    text = """
        a: f32[9, 2] = input("a")
        b: f32[2, 9] = input("b")
        p: f32[9, 9] = aten.mm(a, b)
        y: f32[9, 9] = aten.mm(p, p)
        return output("y", y)
    """
    assert not run_passes(program_of(text), [AssociateMatmuls()]).history[0].changed


WRITTEN = """
    a: f32[64, 2] = input("a")
    b: f32[2, 64] = input("b")
    c: f32[64, 2] = input("c")
    p: f32[64, 64] = aten.mm(a, b)
    w: f32[2, 64] = aten.add_.Tensor(b, 1)
    y: f32[64, 2] = aten.mm(p, c)
    return output("y", y)
"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (chain((2, 9, 2, 9)), "no other order of its chain is cheaper"),
        (chain((2,) * 60), "its chain is too long"),
        (WRITTEN, "it would read later what is written to"),
        (chain((3, 2, 4, 8)), "it does not need less of everything"),
    ],
)
def test_declined(text: str, reason: str):
    declines(AssociateMatmuls(), text, reason)
