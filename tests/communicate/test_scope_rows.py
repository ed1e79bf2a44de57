"""One test for each owed capability of data-parallel fusion (D) and bucketing (B), named by its id."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

import crossfade as cf
from crossfade.communicate.bucket_all_gathers import BucketAllGathers
from crossfade.communicate.bucket_all_reduces import BucketAllReduces
from crossfade.communicate.bucket_plan import MB
from crossfade.communicate.bucket_reduce_scatters import BucketReduceScatters
from crossfade.communicate.buckets import BucketPass
from crossfade.communicate.lower_all_gathers import LowerAllGathers
from crossfade.compile import pipeline
from crossfade.graph import collectives
from crossfade.graph.collectives import Kind
from crossfade.graph.order import Order, move_together
from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program, from_graph_module
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify


def program_of(text: str) -> Program:
    return parse(textwrap.dedent(text), groups={"dp": 2, "tp": 2})


def names(program: Program) -> str:
    return " ".join(node.name for node in program.graph.nodes)


def after(text: str, *passes: Any) -> str:
    """The program that passes make of another, checked and printed."""
    done = run_passes(program_of(text), passes)
    verify(done, recompute=True)
    return render(done)


def lines_with(text: str, *words: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if any(word in line for word in words)]


GRADIENTS = """
    w: f32[4] = input("w")
    v: f32[2, 2] = input("v")
    x: f32[4] = input("x")
    gw: f32[4] = aten.mul.Tensor(w, x)
    dw: f32[4] = aten.div.Tensor(gw, 2)
    sw: f32[4] = c10d.all_reduce(dw, "sum", "dp")
    ww: f32[4] = c10d.wait_tensor(sw)
    step: f32[4] = aten.sub.Tensor(w, ww)
    gv: f32[2, 2] = aten.mul.Tensor(v, v)
    dv: f32[2, 2] = aten.div.Tensor(gv, 2)
    sv: f32[2, 2] = c10d.all_reduce(dv, "sum", "dp")
    wv: f32[2, 2] = c10d.wait_tensor(sv)
    return output("w", step), output("v", wv)
"""


def test_D1_a_collective_moves_as_one_thing() -> None:
    program = program_of("""
        x: f32[4] = input("x")
        y: f32[4] = aten.exp(x)
        pair: (f32[4], f32[4]) = c10d.all_reduce_coalesced([x, y], "sum", "dp")
        first: f32[4] = pair[0]
        second: f32[4] = pair[1]
        w1: f32[4] = c10d.wait_tensor(first)
        w2: f32[4] = c10d.wait_tensor(second)
        n: f32[4] = aten.neg(x)
        m: f32[4] = aten.neg(w1)
        return output("m", m), output("n", n), output("w", w2)
    """)
    nodes = {node.name: node for node in program.graph.nodes}
    (collective,) = collectives.find(program.graph)
    assert [node.name for node in collective.inputs] == ["x", "y"]
    assert [node.name for node in collective.nodes] == ["pair", "first", "second", "w1", "w2"]
    assert str(move_together(Order(program.graph), collective.nodes, before=nodes["output"])) == "m uses w1"
    assert str(move_together(Order(program.graph), collective.nodes, before=nodes["y"])) == "y is an input of pair"
    assert names(program) == "x y pair first second w1 w2 n m output", "nothing moves unless all can"
    assert move_together(Order(program.graph), collective.nodes, before=nodes["m"]) is None
    assert names(program) == "x y n pair first second w1 w2 m output"
    verify(program)


def test_D2_gradients_are_recognised_and_others_left_alone() -> None:
    program = program_of("""
        x: f32[4] = input("x")
        grad: f32[4] = input("grad")
        d: f32[4] = aten.div.Tensor(x, 2)
        averaged: f32[4] = c10d.all_reduce(d, "sum", "dp")
        w1: f32[4] = c10d.wait_tensor(averaged)
        plain: f32[4] = c10d.all_reduce(x, "sum", "dp")
        w2: f32[4] = c10d.wait_tensor(plain)
        half: f32[4] = aten.mul.Tensor(w2, 0.5)
        into: f32[4] = aten.copy_(grad, half)
        activation: f32[4] = c10d.all_reduce(x, "sum", "dp")
        w3: f32[4] = c10d.wait_tensor(activation)
        y: f32[4] = aten.add.Tensor(w3, x)
        return output("gradient", w1), output("y", y)
    """)
    plan = BucketAllReduces(only_gradients=True).plan(program)
    assert [bucket.members for bucket in plan.buckets] == [("averaged", "plain")]
    assert [str(verdict) for verdict in plan.left] == [
        "activation: left alone: it is no gradient's: its result is computed with"
    ]
    assert BucketAllReduces().plan(program).buckets[0].members == ("averaged", "plain", "activation")


def test_D3_a_small_first_bucket_in_the_order_gradients_become_ready() -> None:
    lines = ['x: f32[1] = input("x")']
    for index in range(6):
        source = "x" if index == 0 else f"g{index - 1}"
        lines.append(f"g{index}: f32[1] = aten.neg({source})")
        lines.append(f's{index}: f32[1] = c10d.all_reduce(g{index}, "avg", "dp")')
        lines.append(f"w{index}: f32[1] = c10d.wait_tensor(s{index})")
    lines.append("return " + ", ".join(f'output("{i}", w{i})' for i in range(6)))
    plan = BucketAllReduces(cap_mb=16 / MB, first_mb=8 / MB).plan(program_of("\n".join(lines)))
    assert [bucket.members for bucket in plan.buckets] == [("s0", "s1"), ("s2", "s3", "s4", "s5")]


def test_D4_fused_by_concatenation_or_coalesced_with_one_division() -> None:
    concatenated = after(GRADIENTS, BucketAllReduces(mode="concat"))
    assert lines_with(concatenated, "div", "c10d", "cat") == [
        "cat: f32[8] = aten.cat([gw, view])",
        "div: f32[8] = aten.div.Tensor(cat, 2.0)",
        'all_reduce: f32[8] = c10d.all_reduce(div, "sum", "dp")',
        "wait_tensor: f32[8] = c10d.wait_tensor(all_reduce)",
    ]
    assert lines_with(after(GRADIENTS, BucketAllReduces(mode="coalesced")), "c10d", "coalesced[") == [
        'all_reduce_coalesced: (f32[4], f32[2, 2]) = c10d.all_reduce_coalesced([dw, dv], "sum", "dp")',
        "getitem: f32[4] = all_reduce_coalesced[0]",
        "getitem_1: f32[2, 2] = all_reduce_coalesced[1]",
        "wait_tensor: f32[4] = c10d.wait_tensor(getitem)",
        "wait_tensor_1: f32[2, 2] = c10d.wait_tensor(getitem_1)",
    ]


def test_D4_divisions_by_different_numbers_stay() -> None:
    text = GRADIENTS.replace("aten.div.Tensor(gv, 2)", "aten.div.Tensor(gv, 4)")
    assert [line[:2] for line in lines_with(after(text, BucketAllReduces()), "aten.div")] == ["dw", "dv"]
    assert len(lines_with(after(text, BucketAllReduces()), "c10d.all_reduce")) == 1


def test_D5_early_users_come_after_the_fused_wait() -> None:
    order = lines_with(after(GRADIENTS, BucketAllReduces()), "all_reduce:", "wait_tensor:", "step:", "gv:")
    assert [line.split(":")[0] for line in order] == ["gv", "all_reduce", "wait_tensor", "step"]


def test_D6_launches_rise_to_their_inputs_and_waits_sink_to_their_uses() -> None:
    text = """
        x: f32[4] = input("x")
        g: f32[4] = aten.neg(x)
        a: f32[4] = aten.exp(x)
        s: f32[4] = c10d.all_reduce(g, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        b: f32[4] = aten.exp(a)
        y: f32[4] = aten.add.Tensor(w, b)
        return output("y", y)
    """
    done = run_passes(
        program_of(text), [p for p in pipeline.communication() if p.name in ("raise-launches", "sink-waits")]
    )
    assert names(done) == "x g s a b w y output"


def test_D7_the_list_of_passes_is_the_users() -> None:
    module = program_of(GRADIENTS).module()
    mine = [pass_ for pass_ in pipeline.communication() if not isinstance(pass_, BucketPass)]
    without = cf.optimize(module, passes=mine, groups={"dp": 2, "tp": 2})
    assert without.report.collectives_after["all_reduce"][0] == 2
    replaced = cf.optimize(module, passes=[BucketAllReduces(mode="coalesced"), *mine], groups={"dp": 2, "tp": 2})
    assert replaced.report.collectives_after["all_reduce"][0] == 1
    assert [record.name for record in replaced.report.records] == [
        "bucket-all-reduces",
        *(pass_.name for pass_ in mine),
    ]


def test_B1_grouped_by_process_group_dtype_and_reduction_also_when_they_alternate() -> None:
    text = """
        a: f32[4] = input("a")
        b: bf16[4] = input("b")
        g0: f32[8] = c10d.all_gather_into_tensor(a, 2, "dp")
        g1: bf16[8] = c10d.all_gather_into_tensor(b, 2, "dp")
        g2: f32[8] = c10d.all_gather_into_tensor(a, 2, "tp")
        g3: f32[8] = c10d.all_gather_into_tensor(a, 2, "dp")
        g4: bf16[8] = c10d.all_gather_into_tensor(b, 2, "dp")
        g5: f32[8] = c10d.all_gather_into_tensor(a, 2, "tp")
        w0: f32[8] = c10d.wait_tensor(g0)
        w1: bf16[8] = c10d.wait_tensor(g1)
        w2: f32[8] = c10d.wait_tensor(g2)
        w3: f32[8] = c10d.wait_tensor(g3)
        w4: bf16[8] = c10d.wait_tensor(g4)
        w5: f32[8] = c10d.wait_tensor(g5)
        return output("0", w0), output("1", w1), output("2", w2), output("3", w3), output("4", w4), output("5", w5)
    """

    def members(pass_: BucketPass) -> list[tuple[str, ...]]:
        return [bucket.members for bucket in pass_.plan(program_of(text)).buckets]

    assert members(BucketAllGathers()) == [("g0", "g3"), ("g1", "g4"), ("g2", "g5")]
    assert members(BucketAllGathers(mixed_dtypes=True)) == [("g0", "g1", "g3", "g4"), ("g2", "g5")]
    mixed = after(text, BucketAllGathers(mixed_dtypes=True))
    assert lines_with(mixed, '2, "dp")') == [
        'all_gather_into_tensor: u8[96] = c10d.all_gather_into_tensor(cat, 2, "dp")'
    ]


def test_B2_the_cap_is_a_function_of_the_index_and_nothing_depends_on_its_own_bucket() -> None:
    text = """
        x: f32[2] = input("x")
        s0: f32[1] = c10d.reduce_scatter_tensor(x, "sum", 2, "dp")
        w0: f32[1] = c10d.wait_tensor(s0)
        s1: f32[1] = c10d.reduce_scatter_tensor(x, "sum", 2, "dp")
        w1: f32[1] = c10d.wait_tensor(s1)
        y: f32[2] = aten.expand(w0, [2])
        s2: f32[1] = c10d.reduce_scatter_tensor(y, "sum", 2, "dp")
        w2: f32[1] = c10d.wait_tensor(s2)
        s3: f32[1] = c10d.reduce_scatter_tensor(x, "sum", 2, "dp")
        w3: f32[1] = c10d.wait_tensor(s3)
        return output("1", w1), output("2", w2), output("3", w3)
    """
    plan = BucketReduceScatters().plan(program_of(text))
    assert [bucket.members for bucket in plan.buckets] == [("s0", "s1"), ("s2", "s3")]
    asked: list[int] = []

    def cap(index: int) -> float:
        asked.append(index)
        return 8 / MB

    assert BucketReduceScatters(cap_mb=cap).plan(program_of(text)).buckets == ()
    assert sorted(set(asked)) == [0, 1, 2, 3], "every bucket's index is asked for"


def test_B3_gathers_merge_with_their_conversion_in_the_copy() -> None:
    text = """
        a: f32[4] = input("a")
        b: f32[2, 3] = input("b")
        ha: bf16[4] = aten._to_copy(a, dtype=bf16)
        s: bf16[8] = c10d.all_gather_into_tensor(ha, 2, "dp")
        w: bf16[8] = c10d.wait_tensor(s)
        hb: bf16[2, 3] = aten._to_copy(b, dtype=bf16)
        t: bf16[4, 3] = c10d.all_gather_into_tensor(hb, 2, "dp")
        v: bf16[4, 3] = c10d.wait_tensor(t)
        y: bf16[8] = aten.neg(w)
        z: bf16[4, 3] = aten.neg(v)
        return output("y", y), output("z", z)
    """
    expected = """
        a: f32[4] = input("a")
        b: f32[2, 3] = input("b")
        pack: bf16[10] = crossfade.pack([a, b], dtype=bf16)
        all_gather_into_tensor: bf16[20] = c10d.all_gather_into_tensor(pack, 2, "dp")
        wait_tensor: bf16[20] = c10d.wait_tensor(all_gather_into_tensor)
        unpack: (bf16[2, 4], bf16[2, 6]) = crossfade.unpack(wait_tensor, 2, [4, 6])
        getitem: bf16[2, 4] = unpack[0]
        getitem_1: bf16[2, 6] = unpack[1]
        view: bf16[8] = aten.view(getitem, [8])
        view_1: bf16[4, 3] = aten.view(getitem_1, [4, 3])
        y: bf16[8] = aten.neg(view)
        z: bf16[4, 3] = aten.neg(view_1)
        return output("y", y), output("z", z)
    """
    assert after(text, BucketAllGathers()) == textwrap.dedent(expected).strip()
    assert "pack" not in after(text, BucketAllGathers(fold=False))


def test_B3_a_source_that_is_written_later_is_converted_where_it_was() -> None:
    text = """
        a: f32[4] = input("a")
        ha: bf16[4] = aten._to_copy(a, dtype=bf16)
        s: bf16[8] = c10d.all_gather_into_tensor(ha, 2, "dp")
        w: bf16[8] = c10d.wait_tensor(s)
        write: f32[4] = aten.add_.Tensor(a, 1)
        t: bf16[8] = c10d.all_gather_into_tensor(ha, 2, "dp")
        v: bf16[8] = c10d.wait_tensor(t)
        return output("w", w), output("v", v)
    """
    one_use = text.replace(
        "t: bf16[8] = c10d.all_gather_into_tensor(ha,",
        "hb: bf16[4] = aten._to_copy(a, dtype=bf16)\n        t: bf16[8] = c10d.all_gather_into_tensor(hb,",
    )
    for given in (text, one_use):
        assert "crossfade.pack" not in after(given, BucketAllGathers(mode="auto"))


def test_B4_scatters_and_reductions_merge_in_the_order_asked_for() -> None:
    text = """
        a: f32[2, 2] = input("a")
        b: f32[4] = input("b")
        s: f32[1, 2] = c10d.reduce_scatter_tensor(a, "sum", 2, "dp")
        w: f32[1, 2] = c10d.wait_tensor(s)
        t: f32[2] = c10d.reduce_scatter_tensor(b, "sum", 2, "dp")
        v: f32[2] = c10d.wait_tensor(t)
        p: f32[2, 2] = c10d.all_reduce(a, "sum", "dp")
        q: f32[2, 2] = c10d.wait_tensor(p)
        r: f32[4] = c10d.all_reduce(b, "sum", "dp")
        u: f32[4] = c10d.wait_tensor(r)
        return output("w", w), output("v", v), output("q", q), output("u", u)
    """
    forwards = after(text, BucketReduceScatters(), BucketAllReduces())
    assert lines_with(forwards, "aten.cat") == [
        "cat: f32[2, 4] = aten.cat([view, view_1], 1)",
        "cat_1: f32[8] = aten.cat([view_4, b])",
    ]
    backwards = after(text, BucketReduceScatters(packing="reversed"), BucketAllReduces(packing="reversed"))
    assert lines_with(backwards, "aten.cat")[1] == "cat_1: f32[8] = aten.cat([b, view_4])"


@pytest.mark.parametrize("kind", [BucketAllReduces, BucketAllGathers, BucketReduceScatters])
def test_B5_modes(kind: type[BucketPass]) -> None:
    call = {
        Kind.ALL_REDUCE: 'c10d.all_reduce({x}, "sum", "dp")',
        Kind.ALL_GATHER: 'c10d.all_gather_into_tensor({x}, 2, "dp")',
        Kind.REDUCE_SCATTER: 'c10d.reduce_scatter_tensor({x}, "sum", 2, "dp")',
    }[kind.kind]
    text = f"""
        a: f32[4] = input("a")
        b: f32[6] = input("b")
        s = {call.format(x="a")}
        w = c10d.wait_tensor(s)
        t = {call.format(x="b")}
        v = c10d.wait_tensor(t)
        return output("w", w), output("v", v)
    """
    used = {"concat": "aten.cat", "copy-kernel": "crossfade.pack", "coalesced": "_coalesced("}
    for mode, word in used.items():
        done = run_passes(program_of(text), [kind(mode=mode)])  # type: ignore[arg-type]
        verify(done, recompute=True)
        assert len(lines_with(render(done), word)) == 1 and len(collectives.find(done.graph)) == 1
        details = [verdict.detail for verdict in done.history[0].verdicts]
        assert all(detail.endswith(f"by {mode}") for detail in details), details


def test_B6_a_bucket_carries_metadata_and_provenance() -> None:
    program = program_of(GRADIENTS)
    for collective in collectives.find(program.graph):
        collective.node.meta["stack_trace"] = (
            f'File "model.py", line {7 if collective.node.name == "sw" else 9}, in loss'
        )
    done = run_passes(program, [BucketAllReduces()])
    verify(done, recompute=True)
    made = [node for node in done.graph.nodes if node.name in ("cat", "all_reduce", "wait_tensor", "getitem", "view_1")]
    assert len(made) == 5
    assert all('"model.py", line 9' in node.meta["stack_trace"] for node in made)
    assert [verdict.source for verdict in done.history[0].verdicts] == ["model.py:7", "model.py:9"]


def dynamic(ranks: int) -> list[str]:
    """Trace once with a symbolic batch, bucket, and run with two batch sizes; what differs, in words."""
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]

    def exchange(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        blocks = x.view(x.shape[0], 1, 3).expand(-1, 4, 3).reshape(-1, 3)  # four times the symbolic size
        values = [x * 2, x @ w, w.t() @ x.t(), x.sum(0), blocks]
        reduced = [collectives.wait(collectives.all_reduce(v, "sum", group)) for v in values]
        gathered = [collectives.wait(collectives.all_gather(v, ranks, group)) for v in values]
        scattered = [collectives.wait(collectives.reduce_scatter(v, "sum", ranks, group)) for v in [*gathered, blocks]]
        return [*reduced, *scattered]

    def inputs(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(batch + 100 * dist.get_rank())
        shapes = [(batch, 3), (3, 5)]
        return tuple(torch.randint(-4, 5, shape, generator=generator).float() for shape in shapes)  # type: ignore[return-value]

    traced = make_fx(exchange, tracing_mode="symbolic")(*inputs(6))
    guards = from_graph_module(traced, groups={group: ranks}).fake_mode.shape_env.guards
    traced_with = len(guards)
    problems = []
    for mode in ("concat", "copy-kernel", "coalesced"):
        passes = [kind(mode=mode) for kind in (BucketAllGathers, BucketReduceScatters, BucketAllReduces)]
        done = cf.optimize(traced, passes=[*passes, LowerAllGathers((group,))], groups={group: ranks})
        counts = {kind: number for kind, (number, _) in done.report.collectives_after.items()}
        if counts != {"all_reduce": 1, "all_gather": 5 if mode == "coalesced" else 1, "reduce_scatter": 1}:
            problems.append(f"{mode}: {counts}")
        for batch in (6, 4, 8):
            given = inputs(batch)
            if not all(torch.equal(a, b) for a, b in zip(exchange(*given), done.module(*given), strict=True)):
                problems.append(f"{mode}: batch {batch} differs")
    if len(guards) > traced_with:
        problems.append(f"guards: {guards[traced_with:]}")
    return problems


@pytest.mark.ranks
@pytest.mark.parametrize("count", [2, 4])
def test_B7_symbolic_sizes_stay_symbolic(ranks: Any, count: int) -> None:
    assert ranks(count).run(dynamic, count) == [[]] * count


def test_G13_what_is_gathered_twice_or_for_nothing_is_gathered_once_by_the_default_pipeline() -> None:
    text = """
        p: f32[2] = input("p")
        g: f32[4] = input("g")
        a: f32[4] = c10d.all_gather_into_tensor(p, 2, "dp")
        wa: f32[4] = c10d.wait_tensor(a)
        f: f32[4] = aten.exp(wa)
        b: f32[4] = c10d.all_gather_into_tensor(p, 2, "dp")
        wb: f32[4] = c10d.wait_tensor(b)
        h: f32[4] = aten.sin(wb)
        r: f32[2] = c10d.reduce_scatter_tensor(g, "sum", 2, "dp")
        wr: f32[2] = c10d.wait_tensor(r)
        s: f32[4] = c10d.all_gather_into_tensor(wr, 2, "dp")
        ws: f32[4] = c10d.wait_tensor(s)
        y: f32[4] = aten.cos(ws)
        return output("f", f), output("h", h), output("y", y)
    """
    expected = """
        p: f32[2] = input("p")
        g: f32[4] = input("g")
        a: f32[4] = c10d.all_gather_into_tensor(p, 2, "dp")
        all_reduce: f32[4] = c10d.all_reduce(g, "sum", "dp")
        wa: f32[4] = c10d.wait_tensor(a)
        f: f32[4] = aten.exp(wa)
        wb: f32[4] = c10d.wait_tensor(a)
        h: f32[4] = aten.sin(wb)
        ws: f32[4] = c10d.wait_tensor(all_reduce)
        y: f32[4] = aten.cos(ws)
        return output("f", f), output("h", h), output("y", y)
    """
    assert after(text, *pipeline.optimization()) == textwrap.dedent(expected).strip()
