"""All-reduces sliced to a rank's own part become reduce-scatters: spellings, positions, refusals, numbers on ranks."""

from __future__ import annotations

import functools
import textwrap
from typing import Any

import pytest
import torch.distributed as dist

from crossfade.communicate.scatter_sliced_reductions import ScatterSlicedReductions
from crossfade.graph import collectives
from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify
from tests.communicate.on_ranks import differences

SECOND = ScatterSlicedReductions((("dp", 1),))


def scattered(text: str, pass_: ScatterSlicedReductions = SECOND, ranks: int = 2) -> Program:
    done = run_passes(parse(textwrap.dedent(text), groups={"dp": ranks, "tp": 2}), [pass_])
    verify(done, recompute=True)
    return done


def test_parts_of_another_dim_are_laid_along_the_first() -> None:
    done = scattered("""
        x: f32[3, 4] = input("x")
        s: f32[3, 4] = c10d.all_reduce(x, "avg", "dp")
        e: f32[3, 4] = aten.exp(x)
        w: f32[3, 4] = c10d.wait_tensor(s)
        a: f32[3, 2] = aten.slice.Tensor(w, 1, 2, 4)
        t: f32[2, 3] = aten.t(a)
        b: f32[3, 2] = aten.slice.Tensor(w, -1, 2, 9223372036854775807)
        n: f32[3, 2] = aten.neg(b)
        return output("t", t), output("n", n), output("e", e)
    """)
    assert (
        render(done)
        == textwrap.dedent("""
        x: f32[3, 4] = input("x")
        split: (f32[3, 2], f32[3, 2]) = aten.split.Tensor(x, 2, 1)
        getitem: f32[3, 2] = split[0]
        getitem_1: f32[3, 2] = split[1]
        cat: f32[6, 2] = aten.cat([getitem, getitem_1])
        reduce_scatter_tensor: f32[3, 2] = c10d.reduce_scatter_tensor(cat, "avg", 2, "dp")
        e: f32[3, 4] = aten.exp(x)
        wait_tensor: f32[3, 2] = c10d.wait_tensor(reduce_scatter_tensor)
        t: f32[2, 3] = aten.t(wait_tensor)
        n: f32[3, 2] = aten.neg(wait_tensor)
        return output("t", t), output("n", n), output("e", e)
        """).strip()
    )
    (verdict,) = done.history[0].verdicts
    assert str(verdict) == "s: replaced: only this rank's slice is used: 24 bytes less to send"
    assert verdict.bytes == 48
    assert done.history[0].counts == {"scattered": 1, "left": 0}


def reduced_and(taken: str, pass_: ScatterSlicedReductions = SECOND, ranks: int = 2) -> Program:
    """A program that takes `y` of an all-reduce's result `w`."""
    text = f"""
        x: f32[6, 4] = input("x")
        r: int = scalar("rank")
        s: f32[6, 4] = c10d.all_reduce(x, "sum", "dp")
        w: f32[6, 4] = c10d.wait_tensor(s)
        {taken}
        n = aten.neg(y)
        return output("n", n)
    """
    return scattered(text, pass_, ranks)


OWN = {
    "slice": "y: f32[3, 4] = aten.slice.Tensor(w, 0, 3, 6)",
    "slice to the end": "y: f32[3, 4] = aten.slice.Tensor(w, -2, 3)",
    "slice from behind": "y: f32[3, 4] = aten.slice.Tensor(w, 0, -3)",
    "slice by keyword": "y: f32[6, 2] = aten.slice.Tensor(w, dim=1, start=2)",
    "narrow": "y: f32[3, 4] = aten.narrow(w, 0, 3, 3)",
    "split": "p = aten.split.Tensor(w, 3)\n        y = p[1]",
    "split of another dim": "p = aten.split.Tensor(w, 2, -1)\n        y = p[-1]",
    "split with sizes": "p = aten.split_with_sizes(w, [3, 3])\n        y = p[1]",
    "unequal parts before": "p = aten.split_with_sizes(w, [1, 2, 3])\n        y = p[2]",
    "chunk": "p = aten.chunk(w, 2)\n        q = p[0]\n        y = p[1]",
}


@pytest.mark.parametrize("name", OWN)
def test_spellings_of_ones_own_part(name: str) -> None:
    done = reduced_and(OWN[name])
    assert [collective.kind.value for collective in collectives.find(done.graph)] == ["reduce_scatter"]
    assert [str(node.target) for node in done.graph.nodes][-2] == "aten.neg.default"


NO_POSITION = "its position in the group is not known"
LEFT = {
    "another rank's": (OWN["slice"], ScatterSlicedReductions((("dp", 0),)), 2, "the slice is another rank's"),
    "position not known": (OWN["slice"], ScatterSlicedReductions((("tp", 1),)), 2, NO_POSITION),
    "rank of one of two groups": (
        "b: int = operator.mul(r, 3)\n        e: int = operator.add(b, 3)\n"
        "        y: f32[3, 4] = aten.slice.Tensor(w, 0, b, e)",
        SECOND,
        2,
        "where the slice begins or ends is not known before it runs",
    ),
    "size of the group": (OWN["slice"], SECOND, 0, "the size of its group is not known"),
    "not divisible": (OWN["slice"], SECOND, 4, "the dim does not divide by the group"),
    "a longer slice": (
        "y: f32[4, 4] = aten.slice.Tensor(w, 0, 2, 6)",
        SECOND,
        2,
        "more than this rank's slice is used",
    ),
    "two slices": (
        "z: f32[3, 4] = aten.slice.Tensor(w, 0, 0, 3)\n        m = aten.neg(z)\n        y = aten.slice.Tensor(w, 0, 3)",
        SECOND,
        2,
        "more than this rank's slice is used",
    ),
    "both halves": (
        "p = aten.split.Tensor(w, 3)\n        q = p[0]\n        o = p[1]\n        y = aten.add.Tensor(q, o)",
        SECOND,
        2,
        "more than this rank's slice is used",
    ),
    "a shorter slice": ("y = aten.slice.Tensor(w, 0, 3, 5)", SECOND, 2, "less than a whole part of it is used"),
    "written input": (
        "z = aten.mul_.Tensor(x, 2)\n        y = aten.slice.Tensor(w, 0, 3)",
        SECOND,
        2,
        "its input is written in place",
    ),
    "strides": (
        "z = aten.slice.Tensor(w, 0, 3)\n        y = aten.as_strided(z, [3, 4], [4, 1], 12)",
        SECOND,
        2,
        "a view of it counts in strides",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_left(name: str) -> None:
    taken, pass_, ranks, reason = LEFT[name]
    done = reduced_and(taken, pass_, ranks)
    assert not done.history[0].changed
    remedy = "positions=(('dp', ...),) says it" if reason == NO_POSITION else ""
    assert [(v.outcome.value, v.reason, v.remedy) for v in done.history[0].verdicts] == [("left alone", reason, remedy)]


NO_SLICE = {
    "whole": "y = aten.neg(w)",
    "a slice and the whole": "z = aten.slice.Tensor(w, 0, 3)\n        a = aten.neg(z)\n        y = aten.exp(w)",
    "every second": "y = aten.slice.Tensor(w, 0, 0, 6, 2)",
}


@pytest.mark.parametrize("name", NO_SLICE)
def test_no_candidate(name: str) -> None:
    done = reduced_and(NO_SLICE[name])
    assert not done.history[0].changed and not done.history[0].verdicts


EXCHANGE = """
    x: {dtype}[8, 12] = input("x")
    rank: int = scalar("rank")
    s: {dtype}[8, 12] = c10d.all_reduce(x, "{op}", "dp")
    w: {dtype}[8, 12] = c10d.wait_tensor(s)
    b: int = operator.mul(rank, {rows})
    e: int = operator.add(b, {rows})
    y = aten.slice.Tensor(w, 0, b, e)
    v = aten.neg(y)
    n: {dtype}[8, 12] = aten.neg(x)
    q: {dtype}[8, 12] = c10d.all_reduce(n, "{op}", "dp")
    u: {dtype}[8, 12] = c10d.wait_tensor(q)
    p = aten.split.Tensor(u, {columns}, 1)
    z = p[{position}]
    t = aten.t(z)
    return output("v", v), output("z", z), output("t", t)
"""


def compared(dtype: str, op: str, *, whole_numbers: bool) -> list[float]:
    """Slices by the rank that is an input, and by the position that is an option."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    sizes = {"rows": 8 // ranks, "columns": 12 // ranks, "position": rank}
    pass_ = ScatterSlicedReductions((("dp", rank),))
    return differences(EXCHANGE.format(dtype=dtype, op=op, **sizes), pass_, whole_numbers=whole_numbers)


@pytest.mark.ranks
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("op", ["sum", "max"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "i64"])
def test_ranks_get_the_same_numbers(ranks: Any, count: int, dtype: str, op: str) -> None:
    compare = functools.partial(compared, whole_numbers=True)
    assert ranks(count).run(compare, dtype, op) == [[0.0] * 3] * count


@pytest.mark.ranks
@pytest.mark.parametrize("count", [2, 4])
def test_sums_differ_by_rounding_only(ranks: Any, count: int) -> None:
    for found in ranks(count).run(functools.partial(compared, whole_numbers=False), "f32", "sum"):
        assert max(found) < 1e-6
