"""Products that read a value, in all spellings: the exact equations of texts, and the numbers of every one."""

from __future__ import annotations

import pytest
import torch

from crossfade.graph.matmuls import Product, products_of
from tests.graph.traced_gathers import compared, read_lines, said

READ = {  # of x: the lines, and what is said of each reader
    "mm": (
        """
        x: f32[6, 8] = input("x")
        w: f32[8, 4] = input("w")
        y: f32[6, 4] = aten.mm(x, w)
        """,
        ["ab,bc->ac [6, 4]"],
    ),
    "mm on the right": (
        """
        x: f32[8, 4] = input("x")
        w: f32[6, 8] = input("w")
        y: f32[6, 4] = aten.mm(w, x)
        """,
        ["ab,ca->cb [6, 4]"],
    ),
    "linear": (
        """
        x: f32[2, 3, 8] = input("x")
        w: f32[4, 8] = input("w")
        b: f32[4] = input("b")
        y: f32[2, 3, 4] = aten.linear(x, w, b)
        """,
        ["abc,dc->abd [2, 3, 4]"],
    ),
    "a gathered weight of linear": (
        """
        x: f32[4, 8] = input("x")
        w: f32[2, 3, 8] = input("w")
        y: f32[2, 3, 4] = aten.linear(w, x)
        """,
        ["ab,cdb->cda [2, 3, 4]"],
    ),
    "view, addmm, view": (
        """
        x: f32[2, 3, 8] = input("x")
        w: f32[4, 8] = input("w")
        b: f32[4] = input("b")
        flat: f32[6, 8] = aten.view(x, [6, 8])
        t: f32[8, 4] = aten.t(w)
        mm: f32[6, 4] = aten.addmm(b, flat, t)
        y: f32[2, 3, 4] = aten.view(mm, [2, 3, 4])
        """,
        ["abc,cd->abd [2, 3, 4]"],
    ),
    "a bias for each row": (
        """
        x: f32[2, 3, 8] = input("x")
        w: f32[8, 4] = input("w")
        b: f32[6, 1] = input("b")
        flat: f32[6, 8] = aten.view(x, [6, 8])
        y: f32[6, 4] = aten.addmm(b, flat, w)
        """,
        ["abc,cd->abd [2, 3, 4], bias [2, 3, 1]"],
    ),
    "a bias for each element": (
        """
        x: f32[2, 3, 8] = input("x")
        w: f32[8, 4] = input("w")
        b: f32[6, 4] = input("b")
        flat: f32[6, 8] = aten.view(x, [6, 8])
        y: f32[6, 4] = aten.addmm(b, flat, w)
        """,
        ["abc,cd->abd [2, 3, 4], bias [2, 3, 4]"],
    ),
    "a weight's gradient": (
        """
        x: f32[2, 3, 8] = input("x")
        g: f32[6, 4] = input("g")
        flat: f32[6, 8] = aten.view(x, [6, 8])
        t: f32[8, 6] = aten.permute(flat, [1, 0])
        y: f32[8, 4] = aten.mm(t, g)
        """,
        ["abc,abd->cd [8, 4], other [2, 3, 4]"],
    ),
    "a weight's gradient, of the other side": (
        """
        x: f32[2, 3, 8] = input("x")
        g: f32[6, 4] = input("g")
        flat: f32[6, 8] = aten.view(x, [6, 8])
        t: f32[4, 6] = aten.t(g)
        y: f32[4, 8] = aten.mm(t, flat)
        """,
        ["abc,dab->dc [4, 8], other [4, 2, 3]"],
    ),
    "bmm": (
        """
        x: f32[2, 3, 8] = input("x")
        w: f32[2, 8, 4] = input("w")
        y: f32[2, 3, 4] = aten.bmm(x, w)
        """,
        ["abc,acd->abd [2, 3, 4]"],
    ),
    "baddbmm": (
        """
        x: f32[2, 3, 8] = input("x")
        w: f32[2, 8, 4] = input("w")
        b: f32[2, 1, 4] = input("b")
        y: f32[2, 3, 4] = aten.baddbmm(b, x, w)
        """,
        ["abc,acd->abd [2, 3, 4]"],
    ),
    "matmul spelled by expand and bmm": (
        """
        x: f32[2, 3, 8] = input("x")
        w: f32[8, 4] = input("w")
        e: f32[2, 3, 8] = aten.expand(x, [2, 3, 8])
        v: f32[2, 3, 8] = aten.view(e, [2, 3, 8])
        u: f32[1, 8, 4] = aten.unsqueeze(w, 0)
        r: f32[2, 8, 4] = aten.expand(u, [2, 8, 4])
        z: f32[2, 8, 4] = aten.view(r, [2, 8, 4])
        bmm: f32[2, 3, 4] = aten.bmm(v, z)
        y: f32[2, 3, 4] = aten._unsafe_view(bmm, [2, 3, 4])
        """,
        ["abc,cd->abd [2, 3, 4], other [8, 4]"],
    ),
    "the repeated one": (
        """
        x: f32[8, 4] = input("x")
        w: f32[2, 3, 8] = input("w")
        r: f32[2, 8, 4] = aten.expand(x, [2, 8, 4])
        y: f32[2, 3, 4] = aten.bmm(w, r)
        """,
        ["ab,cda->cdb [2, 3, 4]"],
    ),
    "both repeated": (
        """
        x: f32[8, 4] = input("x")
        w: f32[3, 8] = input("w")
        r: f32[2, 8, 4] = aten.expand(x, [2, 8, 4])
        s: f32[2, 3, 8] = aten.expand(w, [2, 3, 8])
        y: f32[2, 3, 4] = aten.bmm(s, r)
        """,
        ["ab,cda->cdb [2, 3, 4]"],
    ),
    "matmul with batches": (
        """
        x: f32[2, 5, 3, 8] = input("x")
        w: f32[5, 8, 4] = input("w")
        y: f32[2, 5, 3, 4] = aten.matmul(x, w)
        """,
        ["abcd,bde->abce [2, 5, 3, 4]"],
    ),
    "matmul that repeats": (
        """
        x: f32[2, 1, 3, 8] = input("x")
        w: f32[5, 8, 4] = input("w")
        y: f32[2, 5, 3, 4] = aten.matmul(x, w)
        """,
        ["abcd,edf->aebcf [2, 5, 1, 3, 4]"],
    ),
    "a batch of one": (
        """
        x: f32[1, 6, 8] = input("x")
        w: f32[8, 4] = input("w")
        flat: f32[6, 8] = aten.view(x, [6, 8])
        y: f32[6, 4] = aten.mm(flat, w)
        """,
        ["abc,cd->abd [1, 6, 4]"],
    ),
    "a batch of one, summed over": (
        """
        x: f32[1, 6, 8] = input("x")
        g: f32[6, 4] = input("g")
        flat: f32[6, 8] = aten.squeeze.dim(x, 0)
        t: f32[8, 6] = aten.t(flat)
        y: f32[8, 4] = aten.mm(t, g)
        """,
        ["abc,bd->acd [1, 8, 4]"],
    ),
    "a batch added": (
        """
        x: f32[6, 8] = input("x")
        w: f32[1, 8, 4] = input("w")
        one: f32[1, 6, 8] = aten.unsqueeze(x, 0)
        y: f32[1, 6, 4] = aten.bmm(one, w)
        """,
        ["ab,bc->ac [6, 4], other [8, 4]"],
    ),
    "heads beside one another": (
        """
        x: f32[2, 3, 5, 4] = input("x")
        w: f32[20, 7] = input("w")
        flat: f32[6, 20] = aten.view(x, [6, 20])
        y: f32[6, 7] = aten.mm(flat, w)
        """,
        ["abcd,cde->abe [2, 3, 7], other [5, 4, 7]"],
    ),
    "several readers": (
        """
        x: f32[2, 3, 8] = input("x")
        w: f32[8, 4] = input("w")
        flat: f32[6, 8] = aten.view(x, [6, 8])
        first: f32[6, 4] = aten.mm(flat, w)
        relu: f32[2, 3, 8] = aten.relu(x)
        second: f32[2, 3, 4] = aten.matmul(x, w)
        y: f32[6, 4] = aten.add.Tensor(first, 1)
        """,
        [
            "abc,cd->abd [2, 3, 4]",
            "something else than a matmul reads it: aten.relu.default reads x f32[2, 3, 8]",
            "abc,cd->abd [2, 3, 4]",
        ],
    ),
    "both operands": (
        """
        x: f32[6, 6] = input("x")
        t: f32[6, 6] = aten.t(x)
        y: f32[6, 6] = aten.mm(x, t)
        """,
        ["it is both operands of the matmul: of y f32[6, 6]"],
    ),
    "the bias": (
        """
        x: f32[4] = input("x")
        a: f32[6, 8] = input("a")
        w: f32[8, 4] = input("w")
        y: f32[6, 4] = aten.addmm(x, a, w)
        """,
        ["something else than a matmul reads it: aten.addmm.default reads x f32[4] beside its operands"],
    ),
    "a part": (
        """
        x: f32[6, 8] = input("x")
        w: f32[8, 4] = input("w")
        half: f32[3, 8] = aten.slice.Tensor(x, 0, 3, 6)
        y: f32[3, 4] = aten.mm(half, w)
        """,
        ["the matmul takes its dims apart: 3 of 6 along its dim 0"],
    ),
    "one of its rows": (
        """
        x: f32[2, 6, 8] = input("x")
        w: f32[8, 4] = input("w")
        row: f32[6, 8] = aten.select.int(x, 0, 1)
        y: f32[6, 4] = aten.mm(row, w)
        """,
        ["the matmul reads only a part of it: (6, 32) | (8, 4) + 192 over (2, 192) | (6, 32) | (8, 4)"],
    ),
    "a dim taken apart": (
        """
        x: f32[6, 8] = input("x")
        w: f32[4, 4] = input("w")
        v: f32[12, 4] = aten.view(x, [12, 4])
        y: f32[12, 4] = aten.mm(v, w)
        """,
        ["the matmul takes its dims apart: 2 of 8 along its dim 1"],
    ),
    "summed over repetitions": (
        """
        x: f32[6, 1] = input("x")
        w: f32[8, 4] = input("w")
        e: f32[6, 8] = aten.expand(x, [6, 8])
        y: f32[6, 4] = aten.mm(e, w)
        """,
        ["the matmul sums over repetitions of it: 8 times"],
    ),
    "weighed": (
        """
        x: f32[6, 8] = input("x")
        w: f32[8, 4] = input("w")
        b: f32[4] = input("b")
        y: f32[6, 4] = aten.addmm(b, x, w, beta=0.5)
        """,
        ["the matmul weighs its product or its bias: alpha=1, beta=0.5"],
    ),
    "whole numbers": (
        """
        x: i64[6, 8] = input("x")
        w: i64[8, 4] = input("w")
        y: i64[6, 4] = aten.mm(x, w)
        """,
        ["the matmul is not of floating-point numbers: y of torch.int64"],
    ),
    "another dtype's bytes": (
        """
        x: f16[6, 8] = input("x")
        w: bf16[8, 4] = input("w")
        v: bf16[6, 8] = aten.view.dtype(x, bf16)
        y: bf16[6, 4] = aten.mm(v, w)
        """,
        ["its bytes are seen as another dtype: x f16[6, 8] as v bf16[6, 8]"],
    ),
    "a vector": (
        """
        x: f32[6, 8] = input("x")
        w: f32[8] = input("w")
        y: f32[6] = aten.matmul(x, w)
        """,
        ["an operand of the matmul is a vector: f32[6, 8] by f32[8]"],
    ),
}


READ |= {
    "scaled, one for each row": (
        """
        x: f8e4m3[2, 8, 32] = input("x")
        w: f8e4m3[48, 32] = input("w")
        sx: f32[16, 1] = input("sx")
        sw: f32[1, 48] = input("sw")
        b: bf16[48] = input("b")
        v: f8e4m3[16, 32] = aten.view(x, [16, 32])
        t: f8e4m3[32, 48] = aten.t(w)
        y: bf16[16, 48] = aten._scaled_mm(v, t, sx, sw, b, None, bf16)
        """,
        ["abc,cd->abd [2, 8, 48], scale [2, 8, 1]"],
    ),
    "scaled, one for all": (
        """
        x: f8e4m3[16, 32] = input("x")
        w: f8e4m3[48, 32] = input("w")
        sx: f32[] = input("sx")
        sw: f32[1] = input("sw")
        t: f8e4m3[32, 48] = aten.t(w)
        y: bf16[16, 48] = aten._scaled_mm(x, t, sx, sw, out_dtype=bf16)
        """,
        ["ab,bc->ac [16, 48]"],
    ),
    "scaled, a weight turned about": (
        """
        x: f8e4m3[48, 32] = input("x")
        a: f8e4m3[16, 32] = input("a")
        sa: f32[16, 1] = input("sa")
        sx: f32[1, 48] = input("sx")
        t: f8e4m3[32, 48] = aten.t(x)
        y: bf16[16, 48] = aten._scaled_mm(a, t, sa, sx, out_dtype=bf16)
        """,
        ["ab,cb->ca [16, 48], scale [48, 1]"],
    ),
    "scaled by blocks": (
        """
        x: f8e4m3[16, 256] = input("x")
        w: f8e4m3[128, 256] = input("w")
        sx: f32[16, 2] = input("sx")
        sw: f32[2, 1] = input("sw")
        t: f8e4m3[256, 128] = aten.t(w)
        y: bf16[16, 128] = aten._scaled_mm(x, t, sx, sw, out_dtype=bf16)
        """,
        ["a scale is neither one for all nor one for each row: sx f32[16, 2] of f8e4m3[16, 256]"],
    ),
    "a scaled result": (
        """
        x: f8e4m3[16, 32] = input("x")
        w: f8e4m3[48, 32] = input("w")
        s: f32[] = input("s")
        t: f8e4m3[32, 48] = aten.t(w)
        y: f8e4m3[16, 48] = aten._scaled_mm(x, t, s, s, None, s, f8e4m3)
        """,
        ["the matmul scales its result: by s"],
    ),
}


@pytest.mark.parametrize("name", READ)
def test_readers_of_a_value(name: str) -> None:
    if name in ("scaled, one for each row", "scaled, a weight turned about") and torch.__version__ < "2.12":
        pytest.skip("torch's CPU kernel scales whole tensors only before 2.12")
    lines, expected = READ[name]
    nodes = read_lines(lines)
    found = [compared(product, nodes["x"].graph) for product in products_of(nodes["x"])]
    assert [said(product) for product in found] == expected


def test_letters_go_to_the_values_dims_first_and_then_to_those_that_only_the_other_has() -> None:
    nodes = read_lines("""
        x: f32[2, 3, 8] = input("x")
        w: f32[20, 8] = input("w")
        flat: f32[6, 8] = aten.view(x, [6, 8])
        t: f32[8, 20] = aten.t(w)
        y: f32[6, 20] = aten.mm(flat, t)
    """)
    (found,) = products_of(nodes["x"])
    assert isinstance(found, Product)
    assert (found.operand_letters, found.other_letters, found.result_letters) == ("abc", "cd", "abd")
    assert found.letters == ("ab", "d")  # the rows of y are two dims of x
    assert [found.result_dim(dim, 2) for dim in range(2)] == [0, 2]
