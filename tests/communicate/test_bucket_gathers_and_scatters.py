"""Buckets of all-gathers and reduce-scatters: where they start, what stays apart, and the numbers on real ranks."""

from __future__ import annotations

import functools
import textwrap
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

import crossfade as cf
from crossfade.communicate.bucket_all_gathers import BucketAllGathers
from crossfade.communicate.bucket_reduce_scatters import BucketReduceScatters
from crossfade.compile import pipeline
from crossfade.graph import collectives
from crossfade.graph.passes import Pass, run_passes
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify
from tests.communicate.on_ranks import differences


def starts(text: str, pass_: Pass) -> list[str]:
    """The bucketed program's lines that start a collective or compute, in order."""
    done = run_passes(parse(textwrap.dedent(text), groups={"dp": 2, "tp": 2}), [pass_])
    verify(done, recompute=True)
    return [line.split(":")[0] for line in render(done).splitlines() if "= c10d." in line or "aten.neg" in line]


def test_a_bucket_of_gathers_starts_where_its_first_member_would() -> None:
    text = """
        a: f32[2] = input("a")
        b: f32[3] = input("b")
        s: f32[4] = c10d.all_gather_into_tensor(a, 2, "dp")
        w: f32[4] = c10d.wait_tensor(s)
        n: f32[4] = aten.neg(w)
        m: f32[4] = aten.neg(n)
        t: f32[6] = c10d.all_gather_into_tensor(b, 2, "dp")
        v: f32[6] = c10d.wait_tensor(t)
        k: f32[6] = aten.neg(v)
        return output("m", m), output("k", k)
    """
    assert starts(text, BucketAllGathers()) == ["all_gather_into_tensor", "wait_tensor", "n", "m", "k"]


def test_a_gather_of_something_computed_from_the_first_stays_apart() -> None:
    text = """
        a: f32[2] = input("a")
        s: f32[4] = c10d.all_gather_into_tensor(a, 2, "dp")
        w: f32[4] = c10d.wait_tensor(s)
        n: f32[4] = aten.neg(w)
        t: f32[8] = c10d.all_gather_into_tensor(n, 2, "dp")
        v: f32[8] = c10d.wait_tensor(t)
        k: f32[8] = aten.neg(v)
        return output("k", k)
    """
    program = parse(textwrap.dedent(text), groups={"dp": 2})
    plan = BucketAllGathers().plan(program)
    assert plan.buckets == ()
    assert [verdict.reason for verdict in plan.left] == ["its neighbour depends on its result"] * 2


def test_a_collective_fed_by_anothers_wait_follows_it() -> None:
    """As on a mesh of two axes: gathered over one, then over the other."""
    text = """
        a: f32[2] = input("a")
        b: f32[2] = input("b")
        s: f32[4] = c10d.all_gather_into_tensor(a, 2, "tp")
        t: f32[4] = c10d.all_gather_into_tensor(b, 2, "tp")
        w: f32[4] = c10d.wait_tensor(s)
        v: f32[4] = c10d.wait_tensor(t)
        s1: f32[8] = c10d.all_gather_into_tensor(w, 2, "dp")
        t1: f32[8] = c10d.all_gather_into_tensor(v, 2, "dp")
        w1: f32[8] = c10d.wait_tensor(s1)
        v1: f32[8] = c10d.wait_tensor(t1)
        n: f32[8] = aten.neg(w1)
        m: f32[8] = aten.neg(v1)
        return output("n", n), output("m", m)
    """
    found = starts(text, BucketAllGathers())
    assert found == ["all_gather_into_tensor", "wait_tensor", "all_gather_into_tensor_1", "wait_tensor_1", "n", "m"]


def scatters(*between: str) -> str:
    """Two reduce-scatters; of the first's result something is all-reduced, and computed, in the order given."""
    lines = "\n        ".join(between)
    return f"""
        x: f32[4] = input("x")
        y: f32[4] = input("y")
        s: f32[2] = c10d.reduce_scatter_tensor(x, "sum", 2, "dp")
        w: f32[2] = c10d.wait_tensor(s)
        {lines}
        t: f32[2] = c10d.reduce_scatter_tensor(e, "sum", 2, "dp")
        v: f32[2] = c10d.wait_tensor(t)
        return output("v", v), output("a", wa)
    """


def test_where_computation_stands_decides_nothing() -> None:
    dependent = 'a: f32[2] = c10d.all_reduce(w, "max", "tp")\n        wa: f32[2] = c10d.wait_tensor(a)'
    computed = "e: f32[4] = aten.exp(y)"
    plans = [
        str(BucketReduceScatters().plan(parse(textwrap.dedent(scatters(*lines)), groups={"dp": 2, "tp": 2})))
        for lines in ((dependent, computed), (computed, dependent))
    ]
    reason = "left alone: a collective that depends on its result would be delayed"
    assert plans[0] == plans[1] == f"s: {reason}\nt: {reason}"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ('a, "sum", 2, "dp"', 'a, "sum", 2, "tp"'),
        ('a, "sum", 2, "dp"', 'a, "avg", 2, "dp"'),
        ('a, "sum", 2, "dp"', 'h, "sum", 2, "dp"'),
    ],
    ids=["groups", "reductions", "dtypes"],
)
def test_scatters_of_another_kind_stay_apart(first: str, second: str) -> None:
    text = f"""
        a: f32[4] = input("a")
        h: f16[4] = input("h")
        s = c10d.reduce_scatter_tensor({first})
        w = c10d.wait_tensor(s)
        t = c10d.reduce_scatter_tensor({second})
        v = c10d.wait_tensor(t)
        return output("w", w), output("v", v)
    """
    program = parse(textwrap.dedent(text), groups={"dp": 2, "tp": 2})
    assert BucketReduceScatters().plan(program).buckets == ()


def test_the_cap_closes_a_bucket() -> None:
    lines = ['x: f32[262144] = input("x")']
    for index in range(5):
        lines.append(f's{index}: f32[131072] = c10d.reduce_scatter_tensor(x, "sum", 2, "dp")')
        lines.append(f"w{index}: f32[131072] = c10d.wait_tensor(s{index})")
    lines.append("return " + ", ".join(f'output("{index}", w{index})' for index in range(5)))
    plan = BucketReduceScatters(cap_mb=2.0, first_mb=1.0).plan(parse("\n".join(lines), groups={"dp": 2}))
    assert [str(bucket) for bucket in plan.buckets] == [
        "2 reduce-scatters, 2.00 MB: s1, s2",
        "2 reduce-scatters, 2.00 MB: s3, s4",
    ]


def gathered_and_scattered(ranks: int) -> list[bool]:
    """Run a sharded exchange of odd shapes with and without buckets; True where results are bitwise equal."""
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]

    def exchange(shards: list[torch.Tensor]) -> list[torch.Tensor]:
        wholes = [collectives.wait(collectives.all_gather(shard, ranks, group)) for shard in shards]
        products = [whole * whole.sum() for whole in wholes]
        return [collectives.wait(collectives.reduce_scatter(p, "sum", ranks, group)) for p in products]

    generator = torch.Generator().manual_seed(dist.get_rank())
    shards = [torch.randint(-8, 8, shape, generator=generator).float() for shape in [(1,), (3, 2), (2, 1, 5), (7,)]]
    module = make_fx(exchange)(shards)
    done = cf.optimize(module, passes=[BucketAllGathers(), BucketReduceScatters(first_mb=2.0)], groups={group: ranks})
    assert {kind: number for kind, (number, _) in done.report.collectives_after.items()} == {
        "all_gather": 1,
        "reduce_scatter": 1,
    }
    return [torch.equal(a, b) for a, b in zip(module(shards), done.module(shards), strict=True)]


@pytest.mark.ranks
@pytest.mark.parametrize("count", [2, 4])
def test_buckets_gather_and_scatter_the_same_numbers(ranks: Any, count: int) -> None:
    """Integers in float32: every order of summation gives the same, so equality is exact."""
    assert ranks(count).run(gathered_and_scattered, count) == [[True] * 4] * count


MIXED = """
    a: f32[2, 3] = input("a")
    b: bf16[3] = input("b")
    c: f32[5] = input("c")
    d: f64[1] = input("d")
    hc: bf16[5] = aten._to_copy(c, dtype=bf16)
    hd: f32[1] = aten._to_copy(d, dtype=f32)
    s: f32[4, 3] = c10d.all_gather_into_tensor(a, 2, "dp")
    t: bf16[6] = c10d.all_gather_into_tensor(b, 2, "dp")
    u: bf16[10] = c10d.all_gather_into_tensor(hc, 2, "dp")
    v: f32[2] = c10d.all_gather_into_tensor(hd, 2, "dp")
    ws: f32[4, 3] = c10d.wait_tensor(s)
    wt: bf16[6] = c10d.wait_tensor(t)
    wu: bf16[10] = c10d.wait_tensor(u)
    wv: f32[2] = c10d.wait_tensor(v)
    return output("s", ws), output("t", wt), output("u", wu), output("v", wv)
"""


def test_several_dtypes_travel_as_bytes_converted_by_one_copy_each() -> None:
    done = run_passes(parse(textwrap.dedent(MIXED), groups={"dp": 2}), pipeline.optimization())
    verify(done, recompute=True)
    lines = [
        line for line in render(done).splitlines() if "pack(" in line or "cat(" in line or "gather_into_tensor(" in line
    ]
    assert lines == [
        "pack: f32[1] = crossfade.pack([d], dtype=f32)",
        "pack_1: bf16[5] = crossfade.pack([c], dtype=bf16)",
        "cat: u8[44] = aten.cat([detach, detach_1, detach_2, detach_3])",
        'all_gather_into_tensor: u8[88] = c10d.all_gather_into_tensor(cat, 2, "dp")',
    ]
    assert "_to_copy" not in render(done)


@pytest.mark.ranks
def test_several_dtypes_arrive_as_they_were(ranks: Any) -> None:
    for mode in ("auto", "concat", "copy-kernel"):
        pass_ = BucketAllGathers(mixed_dtypes=True, mode=mode)  # type: ignore[arg-type]
        compare = functools.partial(differences, whole_numbers=False)
        assert ranks(2).run(compare, MIXED, pass_) == [[0.0] * 4] * 2
