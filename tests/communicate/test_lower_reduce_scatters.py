"""Reduce-scatters become exchanges and local reductions; pieces, places, refusals, and the numbers on real ranks."""

from __future__ import annotations

import functools
import textwrap
from collections import Counter
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from crossfade.communicate.lower_reduce_scatters import LowerReduceScatters
from crossfade.errors import PassError
from crossfade.graph import collectives
from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program, from_graph_module
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify
from tests.communicate.on_ranks import differences

MB = 2**20


def lowered(text: str, pass_: LowerReduceScatters | None = None) -> Program:
    done = run_passes(parse(textwrap.dedent(text), groups={"dp": 2, "tp": 2}), [pass_ or LowerReduceScatters()])
    verify(done, recompute=True)
    return done


def test_each_group_has_its_own_pieces() -> None:
    done = lowered(
        """
        x: f32[8] = input("x")
        s: f32[4] = c10d.reduce_scatter_tensor(x, "sum", 2, "dp")
        w: f32[4] = c10d.wait_tensor(s)
        t: f32[4] = c10d.reduce_scatter_tensor(x, "sum", 2, "tp")
        u: f32[4] = c10d.wait_tensor(t)
        return output("w", w), output("u", u)
        """,
        LowerReduceScatters(("dp", "tp"), piece_mb=(8 / MB, 16 / MB)),
    )
    assert Counter(collective.group for collective in collectives.find(done.graph)) == {"dp": 4, "tp": 2}


@pytest.mark.parametrize("piece_mb", [0.0, -1.0, (1.0,), (1.0, 0.0)])
def test_pieces_are_for_all_groups_or_for_each(piece_mb: float | tuple[float, ...]) -> None:
    with pytest.raises(PassError, match="a number for all groups, or a tuple with one for each"):
        LowerReduceScatters(("dp", "tp"), piece_mb)


def test_pieces_start_together_and_are_reduced_at_the_first_wait() -> None:
    done = lowered(
        """
        x: f32[4, 5] = input("x")
        t: f32[5, 4] = aten.t(x)
        c: f32[4, 5] = aten.neg(x)
        s: f32[2, 5] = c10d.reduce_scatter_tensor(c, "sum", 2, "dp")
        e: f32[5, 4] = aten.exp(t)
        w: f32[2, 5] = c10d.wait_tensor(s)
        n: f32[2, 5] = aten.neg(w)
        w2: f32[2, 5] = c10d.wait_tensor(s)
        return output("n", n), output("w2", w2), output("e", e)
        """,
        LowerReduceScatters(piece_mb=30 / MB),
    )
    assert (
        render(done)
        == textwrap.dedent("""
        x: f32[4, 5] = input("x")
        t: f32[5, 4] = aten.t(x)
        c: f32[4, 5] = aten.neg(x)
        view: f32[2, 10] = aten.view(c, [2, 10])
        split: (f32[2, 4], f32[2, 4], f32[2, 2]) = aten.split.Tensor(view, 4, 1)
        getitem: f32[2, 4] = split[0]
        getitem_1: f32[2, 4] = split[1]
        getitem_2: f32[2, 2] = split[2]
        clone: f32[2, 4] = aten.clone(getitem, memory_format=contiguous_format)
        all_to_all_single: f32[2, 4] = c10d.all_to_all_single(clone, [1, 1], [1, 1], "dp")
        clone_1: f32[2, 4] = aten.clone(getitem_1, memory_format=contiguous_format)
        all_to_all_single_1: f32[2, 4] = c10d.all_to_all_single(clone_1, [1, 1], [1, 1], "dp")
        clone_2: f32[2, 2] = aten.clone(getitem_2, memory_format=contiguous_format)
        all_to_all_single_2: f32[2, 2] = c10d.all_to_all_single(clone_2, [1, 1], [1, 1], "dp")
        e: f32[5, 4] = aten.exp(t)
        wait_tensor: f32[2, 4] = c10d.wait_tensor(all_to_all_single)
        unbind: (f32[4], f32[4]) = aten.unbind.int(wait_tensor)
        getitem_3: f32[4] = unbind[0]
        getitem_4: f32[4] = unbind[1]
        add: f32[4] = aten.add.Tensor(getitem_3, getitem_4)
        wait_tensor_1: f32[2, 4] = c10d.wait_tensor(all_to_all_single_1)
        unbind_1: (f32[4], f32[4]) = aten.unbind.int(wait_tensor_1)
        getitem_5: f32[4] = unbind_1[0]
        getitem_6: f32[4] = unbind_1[1]
        add_1: f32[4] = aten.add.Tensor(getitem_5, getitem_6)
        wait_tensor_2: f32[2, 2] = c10d.wait_tensor(all_to_all_single_2)
        unbind_2: (f32[2], f32[2]) = aten.unbind.int(wait_tensor_2)
        getitem_7: f32[2] = unbind_2[0]
        getitem_8: f32[2] = unbind_2[1]
        add_2: f32[2] = aten.add.Tensor(getitem_7, getitem_8)
        cat: f32[10] = aten.cat([add, add_1, add_2])
        view_1: f32[2, 5] = aten.view(cat, [2, 5])
        n: f32[2, 5] = aten.neg(view_1)
        return output("n", n), output("w2", view_1), output("e", e)
        """).strip()
    )
    assert done.history[0].counts == {"lowered": 1, "left": 0}
    (verdict,) = done.history[0].verdicts
    assert str(verdict) == "s: replaced: exchanged, then reduced where it arrives: 3 pieces of all-to-all"
    assert verdict.bytes == 80


@pytest.mark.parametrize(("megabytes", "count"), [(1, 1), (1.25, 1), (1.75, 2), (2, 2), (3.75, 4), (60, 60)])
def test_pieces_are_of_about_the_size_asked_for(megabytes: float, count: int) -> None:
    elements = int(megabytes * MB / 4)
    done = lowered(f"""
        x: f32[{elements}] = input("x")
        s: f32[{elements // 2}] = c10d.reduce_scatter_tensor(x, "sum", 2, "dp")
        w: f32[{elements // 2}] = c10d.wait_tensor(s)
        return output("w", w)
    """)
    assert [collective.kind.value for collective in collectives.find(done.graph)] == ["all_to_all"] * count
    assert max(collective.bytes for collective in collectives.find(done.graph)) <= 1.5 * MB


LEFT = {
    "its group's backend scatters well by itself": 's = c10d.reduce_scatter_tensor(x, "sum", 2, "tp")',
    "its reduction has no local form": 's = c10d.reduce_scatter_tensor(x, "bxor", 2, "dp")',
    "a division of integers would not stay in its dtype": 's = c10d.reduce_scatter_tensor(i, "avg", 2, "dp")',
    "only the plain reduce-scatter is lowered": (
        'c = c10d.reduce_scatter_tensor_coalesced([x], "sum", 2, "dp")\n        s = c[0]'
    ),
}


@pytest.mark.parametrize("reason", LEFT)
def test_left(reason: str) -> None:
    done = lowered(f"""
        x: f32[4] = input("x")
        i: i64[4] = input("i")
        {LEFT[reason]}
        w = c10d.wait_tensor(s)
        return output("w", w)
    """)
    assert not done.history[0].changed
    assert [(v.outcome.value, v.reason) for v in done.history[0].verdicts] == [("left alone", reason)]


def test_other_collectives_are_no_business_of_this_pass() -> None:
    done = lowered("""
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        return output("w", w)
    """)
    assert not done.history[0].changed and not done.history[0].verdicts


def symbolic(*sizes: int) -> Program:
    """A reduce-scatter of a tensor whose sizes are all symbols."""

    def scatter(x: torch.Tensor) -> torch.Tensor:
        return collectives.wait(collectives.reduce_scatter(x, "sum", 2, "dp"))

    return from_graph_module(make_fx(scatter, tracing_mode="symbolic")(torch.ones(*sizes)))


def test_one_unknown_size_travels_at_once() -> None:
    done = run_passes(symbolic(6), [LowerReduceScatters(piece_mb=1e-6)])
    assert done.history[0].counts == {"lowered": 1, "left": 0}
    assert "aten.view(x_1, [2, -1])" in render(done)


def test_two_unknown_sizes_are_left() -> None:
    done = run_passes(symbolic(6, 3), [LowerReduceScatters()])
    (verdict,) = done.history[0].verdicts
    assert verdict.reason == "more than one of its sizes is not known before it runs"


EXCHANGE = """
    x: {dtype}[12, 3] = input("x")
    t: {dtype}[3, 12] = aten.t(x)
    c: {dtype}[12, 3] = aten.neg(x)
    s = c10d.reduce_scatter_tensor(c, "{op}", {ranks}, "dp")
    w = c10d.wait_tensor(s)
    v = aten.neg(w)
    s2 = c10d.reduce_scatter_tensor(x, "{op}", {ranks}, "dp")
    w2 = c10d.wait_tensor(s2)
    return output("v", v), output("w2", w2)
"""


def test_one_fed_by_anothers_wait_follows_it() -> None:
    text = """
        x: f32[8] = input("x")
        s: f32[4] = c10d.reduce_scatter_tensor(x, "sum", 2, "tp")
        w: f32[4] = c10d.wait_tensor(s)
        t: f32[2] = c10d.reduce_scatter_tensor(w, "sum", 2, "dp")
        v: f32[2] = c10d.wait_tensor(t)
        return output("v", v)
    """
    program = parse(textwrap.dedent(text), groups={"dp": 2, "tp": 2})
    done = run_passes(program, [LowerReduceScatters(groups=("dp", "tp"))])
    verify(done, recompute=True)
    assert done.history[0].counts == {"lowered": 2, "left": 0}


@pytest.mark.ranks
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("op", ["sum", "max", "min", "product"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "i64"])
@pytest.mark.parametrize("piece", [1.0, 40 / MB], ids=["whole", "pieces"])
def test_ranks_get_the_same_numbers(ranks: Any, count: int, op: str, dtype: str, piece: float) -> None:
    text = EXCHANGE.format(dtype=dtype, op=op, ranks=count)
    compare = functools.partial(differences, whole_numbers=True)
    assert ranks(count).run(compare, text, LowerReduceScatters(piece_mb=piece)) == [[0.0, 0.0]] * count


@pytest.mark.ranks
@pytest.mark.parametrize("count", [2, 4])
def test_sums_differ_by_rounding_only(ranks: Any, count: int) -> None:
    compare = functools.partial(differences, whole_numbers=False)
    text = EXCHANGE.format(dtype="f32", op="sum", ranks=count)
    for found in ranks(count).run(compare, text, LowerReduceScatters()):
        assert max(found) < 1e-6
