"""Maps become loops that run to the same bits; what cannot be a loop stays, with the reason."""

from __future__ import annotations

import textwrap

import pytest
import torch
from torch._higher_order_ops import map as torch_map
from torch.fx.experimental.proxy_tensor import make_fx

from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program, from_graph_module
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify
from crossfade.simplify.lower_maps import LowerMaps
from tests.simplify.holds import declines, same_results


def lowered(program: Program) -> Program:
    done = run_passes(program, [LowerMaps()])
    verify(done, recompute=True)
    same_results(program, done, LowerMaps.numerics)
    return done


PROGRAMS = {
    "two results, one of them a row itself": """
        def body():
            row: {t}[3] = input("row")
            other: {t}[] = input("other")
            k: {t}[3] = input("k")
            a: {t}[3] = aten.mul.Tensor(row, other)
            b: {t}[3] = aten.add.Tensor(a, k)
            s: {t}[] = aten.sum(b)
            return output("0", b), output("1", s), output("2", row)
        x: {t}[4, 3] = input("x")
        o: {t}[4] = input("o")
        k: {t}[3] = input("k")
        body: graph = constant("body")
        m: ({t}[4, 3], {t}[4], {t}[4, 3]) = higher_order.map_impl(body, [x, o], [k])
        u: {t}[4, 3] = m[0]
        v: {t}[4] = m[1]
        w: {t}[4, 3] = m[2]
        return output("u", u), output("v", v), output("w", w)
    """,
    "rows that do not lie one after the other": """
        def body():
            row: {t}[4] = input("row")
            a: {t}[4] = aten.neg(row)
            return output("0", a)
        x: {t}[4, 3] = input("x")
        t: {t}[3, 4] = aten.t(x)
        body: graph = constant("body")
        m: ({t}[3, 4],) = higher_order.map_impl(body, [t], [])
        u: {t}[3, 4] = m[-1]
        return output("u", u)
    """,
}


@pytest.mark.parametrize("dtype", ["f32", "bf16", "i64", "c64"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_loops_give_the_same(name: str, dtype: str) -> None:
    text = textwrap.dedent(PROGRAMS[name].replace("{t}", dtype))
    done = lowered(parse(text))
    assert "map_impl" not in render(done) and render(done).count("higher_order.while_loop") == 1


def test_draws_come_in_the_same_order() -> None:
    done = lowered(
        parse("""
def body():
    row: f32[3] = input("row")
    drawn: f32[3] = aten.rand_like(row)
    a: f32[3] = aten.add.Tensor(row, drawn)
    return output("0", a)
x: f32[4, 3] = input("x")
body: graph = constant("body")
m: (f32[4, 3],) = higher_order.map_impl(body, [x], [])
u: f32[4, 3] = m[0]
return output("u", u)
""")
    )
    assert done.history[0].counts == {"lowered": 1, "left": 0}


def test_maps_inside_maps() -> None:
    def inner(row: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return row * k

    def outer(rows: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch_map(inner, rows, k).cos()

    def function(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch_map(outer, x, k).sin()

    x, k = torch.randn(2, 3, 4), torch.randn(4)
    program = from_graph_module(make_fx(function, tracing_mode="fake")(x, k))
    done = lowered(program)
    assert render(done).count("higher_order.while_loop") == 2 and "higher_order.map_impl" not in render(done)
    torch.testing.assert_close(done.module()(x, k)[0], function(x, k), rtol=0, atol=0)


DECLINED = {
    "its graph writes memory or has another effect": """
        def body():
            row: f32[3] = input("row")
            c: f32[3] = aten.clone(row)
            a: f32[3] = aten.add_.Tensor(c, 1)
            return output("0", a)
        x: f32[2, 3] = input("x")
        body: graph = constant("body")
        m: (f32[2, 3],) = higher_order.map_impl(body, [x], [])
        u: f32[2, 3] = m[0]
        return output("u", u)
    """,
    "its values lie on several devices": """
        def body():
            row: f32[3] = input("row")
            a: f32[3] = aten._to_copy(row, device=device("cuda:0"))
            return output("0", a)
        x: f32[2, 3] = input("x")
        body: graph = constant("body")
        m: (f32[2, 3],) = higher_order.map_impl(body, [x], [])
        u: f32[2, 3] = m[0]
        return output("u", u)
    """,
    "no row of its dtype can be picked by an index": """
        def body():
            row: f32[3] = input("row")
            a: f8e5m2[3] = aten._to_copy(row, dtype=f8e5m2)
            return output("0", a)
        x: f32[2, 3] = input("x")
        body: graph = constant("body")
        m: (f8e5m2[2, 3],) = higher_order.map_impl(body, [x], [])
        u: f8e5m2[2, 3] = m[0]
        return output("u", u)
    """,
    "what it is given or returns is not all tensors": """
        def body():
            row: f32[3] = input("row")
            a: f32[3] = aten.neg(row)
            return output("0", a), output("1", None)
        x: f32[2, 3] = input("x")
        body: graph = constant("body")
        m: (f32[2, 3], None) = higher_order.map_impl(body, [x], [])
        u: f32[2, 3] = m[0]
        return output("u", u)
    """,
}


@pytest.mark.parametrize("reason", DECLINED)
def test_declined(reason: str) -> None:
    declines(LowerMaps(), DECLINED[reason], reason)


def test_sizes_that_are_not_known_are_left() -> None:
    module = make_fx(lambda x: torch_map(lambda row: row.neg(), x), tracing_mode="symbolic")(torch.randn(3, 2))
    done = run_passes(from_graph_module(module), [LowerMaps()])
    assert done.history[0].verdicts[0].reason == "its sizes are not known before it runs"


def test_results_that_lie_otherwise_or_are_used_whole_are_left() -> None:
    program = parse(textwrap.dedent(PROGRAMS["rows that do not lie one after the other"].replace("{t}", "f32")))
    call = next(node for node in program.graph.nodes if node.name == "m")
    value = call.meta["val"]
    call.meta["val"] = (value[0].t(),)
    assert LowerMaps().run(program).verdicts[0].reason == "its results would be laid out differently in memory"
    call.meta["val"] = value
    program.output_node.args = ((call,),)
    assert LowerMaps().run(program).verdicts[0].reason == "its results are used as a whole"
