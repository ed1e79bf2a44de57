"""One pair of matrices is multiplied as such; several stay a batch, and half precision is added up as before."""

from __future__ import annotations

import pytest

from crossfade.compile.pipeline import simplification
from crossfade.graph.passes import run_passes
from crossfade.simplify.unbatch_matmuls import UnbatchMatmuls
from tests.simplify.holds import declines, program_of, rewrites, same_results

HEAD = """
    x: f32[1, 4, 2] = input("x")
    w: f32[1, 2, 3] = input("w")
    bias: f32[{bias}] = input("bias")"""
ADDED = {"1, 4, 3": "squeeze_2", "1, 1, 3": "squeeze_2", "4, 3": "bias", "3": "bias"}


@pytest.mark.parametrize("bias", ADDED)
@pytest.mark.parametrize("scales", ["", ", beta=2, alpha=0.5"])
def test_a_sum_of_one_product(bias: str, scales: str) -> None:
    before = f"""{HEAD.format(bias=bias)}
    y: f32[1, 4, 3] = aten.baddbmm(bias, x, w{scales})
    return output("y", y)
    """
    done = run_passes(program_of(before), [UnbatchMatmuls()])
    assert done.history[0].counts == {"baddbmm": 1}
    (addmm,) = [node for node in done.graph.nodes if node.name == "addmm"]
    assert (addmm.args[0].name == "bias") == (ADDED[bias] == "bias")
    assert addmm.kwargs == ({"beta": 2, "alpha": 0.5} if scales else {})
    same_results(program_of(before), done, UnbatchMatmuls.numerics)


def test_later_passes_take_the_product_further() -> None:
    before = """
        a: f32[1, 4, 2] = input("a")
        b: f32[1, 2, 3] = input("b")
        c: f32[1, 4, 2] = input("c")
        d: f32[1, 2, 3] = input("d")
        ab: f32[1, 4, 3] = aten.bmm(a, b)
        cd: f32[1, 4, 3] = aten.bmm(c, d)
        m: f32[4, 3] = aten.view(ab, [4, 3])
        n: f32[4, 3] = aten.view(cd, [4, 3])
        y: f32[4, 3] = aten.add.Tensor(m, n)
        return output("y", y)
    """
    done = run_passes(program_of(before), simplification(matmuls=True))
    assert {record.name: record.counts for record in done.history}["unbatch-matmuls"]["bmm"] == 2
    products = [node.target.__name__ for node in done.graph.nodes if "mm" in str(node.target)]
    assert products == ["mm.default", "addmm.default"]  # add-matmuls knows no batches
    same_results(program_of(before), done, UnbatchMatmuls.numerics)


REASONS = {
    "it multiplies several matrices": """
        x: f32[2, 4, 2] = input("x")
        w: f32[2, 2, 3] = input("w")
        y: f32[2, 4, 3] = aten.bmm(x, w)
        return output("y", y)
    """,
}


@pytest.mark.parametrize("reason", REASONS)
def test_left_alone(reason: str) -> None:
    declines(UnbatchMatmuls(), REASONS[reason], reason)


def test_a_product_of_the_same_shape_is_exact_in_whole_numbers() -> None:
    before = """
        x: i64[1, 4, 2] = input("x")
        w: i64[1, 2, 3] = input("w")
        y: i64[1, 4, 3] = aten.bmm(x, w)
        z: i64[1, 4, 3] = aten.neg(y)
        return output("z", z)
    """
    after = """
        x: i64[1, 4, 2] = input("x")
        w: i64[1, 2, 3] = input("w")
        squeeze: i64[4, 2] = aten.squeeze.dim(x, 0)
        squeeze_1: i64[2, 3] = aten.squeeze.dim(w, 0)
        mm: i64[4, 3] = aten.mm(squeeze, squeeze_1)
        unsqueeze: i64[1, 4, 3] = aten.unsqueeze(mm, 0)
        z: i64[1, 4, 3] = aten.neg(unsqueeze)
        return output("z", z)
    """
    rewrites(UnbatchMatmuls(), before, after, {"bmm": 1})
