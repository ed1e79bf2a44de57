"""Scans become loops that run to the same bits and carry what the scan carried."""

from __future__ import annotations

import textwrap

import pytest
import torch
from torch._higher_order_ops import scan
from torch.fx.experimental.proxy_tensor import make_fx

from crossfade.graph.passes import run_passes
from crossfade.graph.program import from_graph_module
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify
from crossfade.simplify.lower_scans import LowerScans
from tests.simplify.holds import declines, same_results

SCAN = """
    def body():
        total: {t}[3] = input("total")
        count: i64[] = input("count")
        row: {t}[3] = input("row")
        k: {t}[3] = input("k")
        a: {t}[3] = aten.mul.Tensor(row, k)
        b: {t}[3] = aten.add.Tensor(total, a)
        n: i64[] = aten.add.Tensor(count, 1)
        c: {t}[3] = aten.neg(total)
        return output("0", b), output("1", n), output("2", c), output("3", a)
    start: {t}[3] = input("start")
    x: {t}[4, 3] = input("x")
    k: {t}[3] = input("k")
    zero: i64[] = aten.full([], 0, dtype=i64)
    body: graph = constant("body")
    s: ({t}[3], i64[], {t}[4, 3], {t}[4, 3]) = higher_order.scan(body, [start, zero], [x], [k])
    last: {t}[3] = s[0]
    count: i64[] = s[1]
    y: {t}[4, 3] = s[2]
    z: {t}[4, 3] = s[3]
    return output("last", last), output("count", count), output("y", y), output("z", z)
"""


@pytest.mark.parametrize("dtype", ["f32", "bf16", "i64"])
def test_loops_give_the_same(dtype: str) -> None:
    program = parse(textwrap.dedent(SCAN.replace("{t}", dtype)))
    done = run_passes(program, [LowerScans()])
    verify(done, recompute=True)
    same_results(program, done, LowerScans.numerics)
    assert done.history[0].counts == {"lowered": 1, "left": 0}
    assert "higher_order.scan" not in render(done)


def test_what_torch_makes_of_a_scan() -> None:
    def step(total: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        new = total * 0.5 + row.sin()
        return new, new.cos()

    def function(start: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return scan(step, start, x, dim=0)

    start, x = torch.randn(3), torch.randn(5, 3)
    program = from_graph_module(make_fx(function, tracing_mode="fake")(start, x))
    done = run_passes(program, [LowerScans()])
    assert done.history[0].counts["lowered"] == 1
    for found, other in zip(done.module()(start, x), function(start, x), strict=True):
        torch.testing.assert_close(found, other, rtol=0, atol=0)


@pytest.mark.parametrize("results", [("b", "total"), ("b", "b"), ("b", "k")])
def test_what_is_carried_must_be_made_in_the_turn(results: tuple[str, str]) -> None:
    text = SCAN.replace("{t}", "f32").replace('output("0", b), output("1", n)', 'output("0", {}), output("1", {})')
    text = text.format(*results).replace("count: i64[]", "count: f32[3]").replace("n: i64[]", "n: f32[3]")
    text = text.replace("i64[],", "f32[3],").replace(
        "zero: i64[] = aten.full([], 0, dtype=i64)", "zero: f32[3] = aten.neg(k)"
    )
    declines(LowerScans(), text, "what it carries is what it was given, or one tensor twice")


DECLINED = {
    "what it carries is laid out differently in memory after a turn": """
        def body():
            total: f32[3, 3] = input("total")
            row: f32[3] = input("row")
            a: f32[3, 3] = aten.add.Tensor(total, row)
            b: f32[3, 3] = aten.t(a)
            c: f32[3] = aten.neg(row)
            return output("0", b), output("1", c)
        start: f32[3, 3] = input("start")
        x: f32[4, 3] = input("x")
        body: graph = constant("body")
        s: (f32[3, 3], f32[4, 3]) = higher_order.scan(body, [start], [x], [])
        last: f32[3, 3] = s[0]
        return output("last", last)
    """,
    "its graph writes memory or has another effect": """
        def body():
            total: f32[3] = input("total")
            row: f32[3] = input("row")
            a: f32[3] = aten.add.Tensor(total, row)
            b: f32[3] = aten.mul_.Tensor(a, 2)
            return output("0", b)
        start: f32[3] = input("start")
        x: f32[4, 3] = input("x")
        body: graph = constant("body")
        s: (f32[3],) = higher_order.scan(body, [start], [x], [])
        last: f32[3] = s[0]
        return output("last", last)
    """,
}


@pytest.mark.parametrize("reason", DECLINED)
def test_declined(reason: str) -> None:
    declines(LowerScans(), DECLINED[reason], reason)
