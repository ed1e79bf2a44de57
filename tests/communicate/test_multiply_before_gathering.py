"""X'X of gathered rows, XX' of gathered columns: multiplied in parts, unless that sends more or X is needed whole."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable

import pytest

from crossfade import Ranks
from crossfade.communicate.multiply_before_gathering import MultiplyBeforeGathering
from crossfade.graph import collectives
from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse
from crossfade.graph.verify import verify
from tests.communicate.on_ranks import differences

ROWS = """
    x: f32[64, 8] = input("x")
    g: f32[128, 8] = c10d.all_gather_into_tensor(x, 2, "dp")
    w: f32[128, 8] = c10d.wait_tensor(g)
    t: f32[8, 128] = aten.permute(w, [1, 0])
    y: f32[8, 8] = aten.mm(t, w)
    z: f32[8, 8] = aten.mm(y, y)
    return output("z", z)
"""

COLUMNS = """
    x: f32[8, 64] = input("x")
    g: f32[16, 64] = c10d.all_gather_into_tensor(x, 2, "dp")
    w: f32[16, 64] = c10d.wait_tensor(g)
    s: (f32[8, 64], f32[8, 64]) = aten.split.Tensor(w, 8)
    a: f32[8, 64] = s[0]
    b: f32[8, 64] = s[1]
    c: f32[8, 128] = aten.cat([a, b], 1)
    t: f32[128, 8] = aten.transpose.int(c, 0, 1)
    y: f32[8, 8] = aten.mm(c, t)
    return output("y", y)
"""


BATCHED = """
    x: f32[3, 64, 8] = input("x")
    bias: f32[8, 8] = input("bias")
    g: f32[6, 64, 8] = c10d.all_gather_into_tensor(x, 2, "dp")
    w: f32[6, 64, 8] = c10d.wait_tensor(g)
    s: (f32[3, 64, 8], f32[3, 64, 8]) = aten.split.Tensor(w, 3)
    a: f32[3, 64, 8] = s[0]
    b: f32[3, 64, 8] = s[1]
    c: f32[3, 128, 8] = aten.cat([a, b], 1)
    t: f32[3, 8, 128] = aten.transpose.int(c, -1, -2)
    y: f32[3, 8, 8] = aten.baddbmm(bias, t, c)
    m: f32[3, 8, 8] = aten.matmul(t, c)
    return output("y", y), output("m", m)
"""

LINEAR = """
    x: f32[8, 64] = input("x")
    bias: f32[8] = input("bias")
    g: f32[16, 64] = c10d.all_gather_into_tensor(x, 2, "dp")
    w: f32[16, 64] = c10d.wait_tensor(g)
    s: (f32[8, 64], f32[8, 64]) = aten.split.Tensor(w, 8)
    a: f32[8, 64] = s[0]
    b: f32[8, 64] = s[1]
    c: f32[8, 128] = aten.cat([a, b], 1)
    t: f32[128, 8] = aten.permute(c, [1, 0])
    again: f32[8, 128] = aten.t(t)
    y: f32[8, 8] = aten.linear(c, again, bias)
    return output("y", y)
"""


def multiplied(text: str) -> Program:
    done = run_passes(parse(textwrap.dedent(text), groups={"dp": 2}), [MultiplyBeforeGathering()])
    verify(done, recompute=True)
    return done


@pytest.mark.parametrize("text", [ROWS, COLUMNS, LINEAR, BATCHED], ids=["rows", "columns", "linear", "batched"])
def test_only_the_product_travels(text: str) -> None:
    done = multiplied(text)
    sums = [(collectives.Kind.ALL_REDUCE, 3 * 256)] * 2 if text is BATCHED else [(collectives.Kind.ALL_REDUCE, 256)]
    assert [(c.kind, c.bytes) for c in collectives.find(done.graph)] == sums
    assert done.history[0].counts == {"replaced": 1, "left": 0}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (ROWS.replace("[64, 8]", "[4, 8]").replace("128", "8"), "its products would travel longer"),
        (ROWS.replace('output("z", z)', 'output("z", z), output("w", w)'), "something else needs it whole"),
        (ROWS.replace("z: f32[8, 8] = aten.mm(y, y)", "z: f32[128, 8] = aten.neg(w)"), "something else needs it whole"),
    ],
    ids=["square", "returned", "used"],
)
def test_refusals(text: str, reason: str) -> None:
    done = multiplied(text)
    assert not done.history[0].changed
    assert [verdict.reason for verdict in done.history[0].verdicts] == [reason]


def test_what_is_added_is_added_once() -> None:
    """Not by every rank before the products are summed."""
    done = multiplied(LINEAR)
    assert str(done).splitlines()[2:] == [
        "t_1: f32[64, 8] = aten.t(x)",
        "mm: f32[8, 8] = aten.mm(x, t_1)",
        'all_reduce: f32[8, 8] = c10d.all_reduce(mm, "sum", "dp")',
        "wait_tensor: f32[8, 8] = c10d.wait_tensor(all_reduce)",
        "add: f32[8, 8] = aten.add.Tensor(wait_tensor, bias)",
        'return output("y", add)',
    ]


def test_what_is_scaled_beside_its_sum_is_no_candidate() -> None:
    weighed = LINEAR.replace(
        "y: f32[8, 8] = aten.linear(c, again, bias)", "y: f32[8, 8] = aten.addmm(bias, c, t, beta=2)"
    )
    assert not multiplied(weighed).history[0].verdicts


def test_other_products_are_no_candidates() -> None:
    """XX' of rows needs all of them, and W'X is another matrix."""
    for product in ("y: f32[128, 128] = aten.mm(w, t)", "y: f32[8, 8] = aten.mm(v, w)"):
        text = ROWS.replace("y: f32[8, 8] = aten.mm(t, w)", "v: f32[8, 128] = aten.neg(t)\n    " + product)
        text = text.replace("z: f32[8, 8] = aten.mm(y, y)", "z: f32[] = aten.sum(y)")
        assert not multiplied(text).history[0].verdicts


@pytest.mark.parametrize("text", [ROWS, COLUMNS, LINEAR, BATCHED], ids=["rows", "columns", "linear", "batched"])
def test_numbers_are_the_same(ranks: Callable[[int], Ranks], text: str) -> None:
    same = functools.partial(differences, whole_numbers=True)
    for found in ranks(2).run(same, text, MultiplyBeforeGathering()):
        assert set(found) == {0.0}
