"""Products that made a value, in all spellings: the exact equations of texts, and the numbers of every one."""

from __future__ import annotations

import pytest

from crossfade.graph.matmuls import Product, product_before
from tests.graph.traced_gathers import compared, read_lines, said

MADE = {  # y: the lines, what is said, the letters of its dims
    "mm, view": (
        """
        a: f32[6, 8] = input("a")
        w: f32[8, 4] = input("w")
        mm: f32[6, 4] = aten.mm(a, w)
        y: f32[2, 3, 4] = aten.view(mm, [2, 3, 4])
        """,
        "abc,cd->abd [2, 3, 4], operand [2, 3, 8]",
        ("a", "b", "d"),
    ),
    "linear": (
        """
        a: f32[2, 3, 8] = input("a")
        w: f32[4, 8] = input("w")
        b: f32[4] = input("b")
        y: f32[2, 3, 4] = aten.linear(a, w, b)
        """,
        "abc,dc->abd [2, 3, 4]",
        ("a", "b", "d"),
    ),
    "turned": (
        """
        a: f32[6, 8] = input("a")
        w: f32[8, 4] = input("w")
        b: f32[4] = input("b")
        mm: f32[6, 4] = aten.addmm(b, a, w)
        y: f32[4, 6] = aten.t(mm)
        """,
        "ab,bc->ca [4, 6], bias [4, 1]",
        ("c", "a"),
    ),
    "columns apart": (
        """
        a: f32[6, 8] = input("a")
        w: f32[8, 12] = input("w")
        mm: f32[6, 12] = aten.mm(a, w)
        v: f32[6, 3, 4] = aten.view(mm, [6, 3, 4])
        y: f32[3, 6, 4] = aten.permute(v, [1, 0, 2])
        """,
        "ab,bcd->cad [3, 6, 4], other [8, 3, 4]",
        ("c", "a", "d"),
    ),
    "heads put beside one another": (
        """
        a: f32[10, 3, 8] = input("a")
        w: f32[10, 8, 4] = input("w")
        bmm: f32[10, 3, 4] = aten.bmm(a, w)
        v: f32[2, 5, 3, 4] = aten.view(bmm, [2, 5, 3, 4])
        p: f32[2, 3, 5, 4] = aten.permute(v, [0, 2, 1, 3])
        y: f32[2, 3, 20] = aten.reshape(p, [2, 3, 20])
        """,
        "abcd,abde->acbe [2, 3, 5, 4], operand [2, 5, 3, 8], other [2, 5, 8, 4]",
        ("a", "c", "be"),
    ),
    "a repeated weight": (
        """
        a: f32[2, 3, 8] = input("a")
        w: f32[8, 4] = input("w")
        r: f32[2, 8, 4] = aten.expand(w, [2, 8, 4])
        y: f32[2, 3, 4] = aten.bmm(a, r)
        """,
        "abc,cd->abd [2, 3, 4]",
        ("a", "b", "d"),
    ),
    "both repeated": (
        """
        a: f32[3, 8] = input("a")
        w: f32[8, 4] = input("w")
        s: f32[2, 3, 8] = aten.expand(a, [2, 3, 8])
        r: f32[2, 8, 4] = aten.expand(w, [2, 8, 4])
        y: f32[2, 3, 4] = aten.bmm(s, r)
        """,
        "ab,cbd->cad [2, 3, 4]",
        ("c", "a", "d"),
    ),
    "a dim of one": (
        """
        a: f32[6, 8] = input("a")
        w: f32[8, 4] = input("w")
        mm: f32[6, 4] = aten.mm(a, w)
        y: f32[1, 6, 4] = aten.unsqueeze(mm, 0)
        """,
        "ab,bc->ac [6, 4]",
        ("", "a", "c"),
    ),
    "a bias turned about": (
        """
        a: f32[6, 8] = input("a")
        w: f32[8, 4] = input("w")
        b: f32[6, 4] = input("b")
        mm: f32[6, 4] = aten.addmm(b, a, w)
        y: f32[4, 6] = aten.t(mm)
        """,
        "its letters are in another order: the bias b f32[6, 4]: ba against ab",
        (),
    ),
    "a part": (
        """
        a: f32[6, 8] = input("a")
        w: f32[8, 4] = input("w")
        mm: f32[6, 4] = aten.mm(a, w)
        y: f32[3, 4] = aten.slice.Tensor(mm, 0, 0, 3)
        """,
        "it is not all of the matmul's result: (3, 16) | (4, 4) over (6, 16) | (4, 4)",
        (),
    ),
    "something else": (
        """
        a: f32[6, 8] = input("a")
        n: f32[6, 8] = aten.neg(a)
        y: f32[8, 6] = aten.t(n)
        """,
        "something else than a matmul made it: n f32[6, 8] is made by aten.neg.default",
        (),
    ),
    "an input": (
        """
        y: f32[6, 8] = input("y")
        """,
        "something else than a matmul made it: y f32[6, 8] is made by placeholder",
        (),
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_the_maker_of_a_value(name: str) -> None:
    lines, expected, letters = MADE[name]
    nodes = read_lines(lines)
    found = compared(product_before(nodes["y"]), nodes["y"].graph)
    assert said(found) == expected
    assert (found.letters if isinstance(found, Product) else ()) == letters


def test_where_a_dim_of_the_value_is_in_the_result() -> None:
    nodes = read_lines(MADE["heads put beside one another"][0])
    found = product_before(nodes["y"])
    assert isinstance(found, Product)
    assert [found.result_dim(dim, 5) for dim in range(3)] == [None, None, 2]
    assert found.result_dim(1, 3) == 1


def test_letters_are_the_pieces_of_result_dims_in_the_values_dims() -> None:
    nodes = read_lines("""
        a: f32[6, 8] = input("a")
        w: f32[8, 20] = input("w")
        mm: f32[6, 20] = aten.mm(a, w)
        heads: f32[6, 4, 5] = aten.view(mm, [6, 4, 5])
        y: f32[4, 6, 5] = aten.permute(heads, [1, 0, 2])
    """)
    found = product_before(nodes["y"])
    assert isinstance(found, Product)
    assert (found.operand_letters, found.other_letters, found.result_letters) == ("ab", "bcd", "cad")
    assert found.letters == ("c", "a", "d")  # the columns of the matmul are two dims of y
    assert (found.operand_shape, found.other_shape) == (None, (8, 4, 5))
