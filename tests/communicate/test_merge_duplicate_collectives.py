"""Equal collectives become one: what counts as equal, what is held, written or returned, and bitwise on ranks."""

from __future__ import annotations

import functools
import textwrap
from typing import Any

import pytest

from crossfade.communicate.merge_duplicate_collectives import MergeDuplicateCollectives
from crossfade.graph import collectives
from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify
from tests.communicate.on_ranks import differences


def merged(text: str, *, hold: bool = False) -> Program:
    program = parse(textwrap.dedent(text), groups={"dp": 2, "tp": 2})
    done = run_passes(program, [MergeDuplicateCollectives(hold)])
    verify(done, recompute=True)
    return done


def verdicts(done: Program) -> list[str]:
    return [str(verdict) for verdict in done.history[0].verdicts]


def test_the_wait_of_the_later_may_come_first() -> None:
    done = merged("""
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        t: f32[4] = c10d.all_reduce(x, reduce_op="sum", group_name="dp")
        v: f32[4] = c10d.wait_tensor(t)
        n: f32[4] = aten.neg(v)
        w: f32[4] = c10d.wait_tensor(s)
        m: f32[4] = aten.exp(w)
        return output("n", n), output("m", m)
    """)
    assert (
        render(done)
        == textwrap.dedent("""
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        v: f32[4] = c10d.wait_tensor(s)
        n: f32[4] = aten.neg(v)
        w: f32[4] = c10d.wait_tensor(s)
        m: f32[4] = aten.exp(w)
        return output("n", n), output("m", m)
        """).strip()
    )
    assert verdicts(done) == ["t: removed: an equal one has the result already: that of s"]
    assert done.history[0].verdicts[0].bytes == 16
    assert done.history[0].counts == {"merged": 1, "left": 0}


def test_what_is_computed_from_merged_results_is_equal_too() -> None:
    done = merged("""
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        n: f32[4] = aten.mul.Tensor(w, x)
        g: f32[8] = c10d.all_gather_into_tensor(n, 2, "dp")
        gw: f32[8] = c10d.wait_tensor(g)
        t: f32[4] = c10d.all_reduce(x, "sum", "dp")
        v: f32[4] = c10d.wait_tensor(t)
        m: f32[4] = aten.mul.Tensor(v, x)
        h: f32[8] = c10d.all_gather_into_tensor(m, 2, "dp")
        hw: f32[8] = c10d.wait_tensor(h)
        add: f32[8] = aten.add.Tensor(gw, hw)
        return output("add", add)
    """)
    assert [collective.node.name for collective in collectives.find(done.graph)] == ["s", "g"]


DIFFERENT = {
    "another group": ('c10d.all_reduce(x, "sum", "dp")', 'c10d.all_reduce(x, "sum", "tp")'),
    "another reduction": ('c10d.all_reduce(x, "sum", "dp")', 'c10d.all_reduce(x, "max", "dp")'),
    "another kind": ('c10d.all_reduce(x, "sum", "dp")', 'c10d.broadcast(x, 0, "dp")'),
    "another source": ('c10d.broadcast(x, 1, "dp")', 'c10d.broadcast(x, 0, "dp")'),
    "another value": ('c10d.all_reduce(x, "sum", "dp")', 'c10d.all_reduce(y, "sum", "dp")'),
    "an integer and a float": ('c10d.all_reduce(one, "sum", "dp")', 'c10d.all_reduce(two, "sum", "dp")'),
    "zeros of two signs": ('c10d.all_reduce(zero, "sum", "dp")', 'c10d.all_reduce(minus, "sum", "dp")'),
    "random numbers": ('c10d.all_reduce(r, "sum", "dp")', 'c10d.all_reduce(q, "sum", "dp")'),
    "in place": ('c10d.all_reduce_(y, "sum", "dp")', 'c10d.all_reduce_(y, "sum", "dp")'),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_different(name: str) -> None:
    first, second = DIFFERENT[name]
    done = merged(f"""
        x: f32[4] = input("x")
        k: i64[4] = input("k")
        y: f32[4] = aten.neg(x)
        one: i64[4] = aten.mul.Tensor(k, 1)
        two: f32[4] = aten.mul.Tensor(k, 1.0)
        zero: f32[4] = aten.mul.Tensor(x, 0.0)
        minus: f32[4] = aten.mul.Tensor(x, -0.0)
        r: f32[4] = aten.rand_like(x)
        q: f32[4] = aten.rand_like(x)
        s = {first}
        w = c10d.wait_tensor(s)
        t = {second}
        v = c10d.wait_tensor(t)
        e = aten.exp(w)
        f = aten.exp(v)
        return output("e", e), output("f", f)
    """)
    assert not done.history[0].changed and not done.history[0].verdicts


def written(write: str, second: str = "x") -> Program:
    return merged(f"""
        x: f32[4] = input("x")
        v: f32[2, 2] = aten.view(x, [2, 2])
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        n: f32[4] = aten.neg(x)
        {write}
        t: f32[4] = c10d.all_reduce({second}, "sum", "dp")
        u: f32[4] = c10d.wait_tensor(t)
        add: f32[4] = aten.add.Tensor(w, u)
        return output("add", add), output("n", n)
    """)


def test_a_value_is_another_after_a_write_to_its_memory() -> None:
    assert written("p: f32[4] = aten.mul.Tensor(n, 2)").history[0].counts == {"merged": 1, "left": 0}
    assert written("p: f32[2, 2] = aten.mul_.Tensor(v, 2)").history[0].counts == {"merged": 0, "left": 0}


def test_a_result_that_is_written_is_not_shared() -> None:
    done = written("p: f32[4] = aten.mul_.Tensor(w, 2)")
    assert verdicts(done) == ["t: left alone: a result is written in place"]
    assert not done.history[0].changed


def test_returned_results_do_not_share_memory() -> None:
    done = merged("""
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        t: f32[4] = c10d.all_reduce(x, "sum", "dp")
        u: f32[4] = c10d.wait_tensor(t)
        v: f32[2, 2] = aten.view(u, [2, 2])
        return output("w", w), output("also w", w), output("v", v)
    """)
    assert render(done).splitlines()[-2:] == [
        "clone: f32[2, 2] = aten.clone(v)",
        'return output("w", w), output("also w", w), output("v", clone)',
    ]


def gathers(between: int, *, hold: bool = False) -> Program:
    """A parameter gathered twice, with other launches of its group in between."""
    lines = ['p: f32[2] = input("p")', 'q: f32[2] = input("q")']
    lines += ['g: f32[4] = c10d.all_gather_into_tensor(p, 2, "dp")', "gw: f32[4] = c10d.wait_tensor(g)"]
    for index in range(between):
        source = "q" if index == 0 else f"w{index - 1}"
        lines += [f's{index}: f32[2] = c10d.all_reduce({source}, "max", "dp")']
        lines += [f"w{index}: f32[2] = c10d.wait_tensor(s{index})"]
    lines += ['h: f32[4] = c10d.all_gather_into_tensor(p, 2, "dp")', "hw: f32[4] = c10d.wait_tensor(h)"]
    lines += ["b: f32[4] = aten.mul.Tensor(gw, hw)", f'return output("b", b), output("w", w{between - 1})']
    return merged("\n".join(lines), hold=hold)


def test_a_gather_is_not_held_between_its_uses_unless_asked() -> None:
    assert verdicts(gathers(5)) == [
        "h: left alone: it would be held in memory between its uses (remedy: hold=True merges it)"
    ]
    assert gathers(5).history[0].verdicts[0].bytes == 16
    assert verdicts(gathers(5, hold=True)) == ["h: removed: an equal one has the result already: that of g"]


def test_a_gather_soon_after_is_merged() -> None:
    assert gathers(4).history[0].counts == {"merged": 1, "left": 0}


SLICES = """
    x: f32[8] = input("x")
    a: f32[2] = aten.slice.Tensor(x, 0, 0, 2)
    b: f32[2] = aten.slice.Tensor(x, 0, {begin}, {end})
    s: f32[2] = c10d.all_reduce(a, "sum", "dp")
    w: f32[2] = c10d.wait_tensor(s)
    t: f32[2] = c10d.all_reduce(b, "sum", "dp")
    v: f32[2] = c10d.wait_tensor(t)
    return output("w", w), output("v", v)
"""


def test_what_may_differ_on_another_rank_is_not_equal_here() -> None:
    """Rank 0 of a program that reduces its own slice and the first one: equal there, different on rank 1."""
    counts = [merged(SLICES.format(begin=2 * rank, end=2 * rank + 2)).history[0].counts for rank in (0, 1)]
    assert counts == [{"merged": 0, "left": 0}] * 2


def test_a_gather_is_in_use_as_long_as_those_merged_into_it() -> None:
    done = merged("""
        p: f32[2] = input("p")
        g: f32[4] = c10d.all_gather_into_tensor(p, 2, "dp")
        h: f32[4] = c10d.all_gather_into_tensor(p, 2, "dp")
        gw: f32[4] = c10d.wait_tensor(g)
        hw: f32[4] = c10d.wait_tensor(h)
        i: f32[4] = c10d.all_gather_into_tensor(p, 2, "dp")
        iw: f32[4] = c10d.wait_tensor(i)
        b: f32[4] = aten.mul.Tensor(iw, hw)
        return output("b", b)
    """)
    assert done.history[0].counts == {"merged": 2, "left": 0}


@pytest.mark.ranks
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "i64"])
def test_ranks_get_the_same_bits(ranks: Any, count: int, dtype: str) -> None:
    text = f"""
        x: {dtype}[4, 3] = input("x")
        a: {dtype}[4, 3] = aten.neg(x)
        s: {dtype}[4, 3] = c10d.all_reduce(a, "sum", "dp")
        w: {dtype}[4, 3] = c10d.wait_tensor(s)
        b: {dtype}[4, 3] = aten.neg(x)
        t: {dtype}[4, 3] = c10d.all_reduce(b, "sum", "dp")
        u: {dtype}[4, 3] = c10d.wait_tensor(t)
        g = c10d.all_gather_into_tensor(x, {count}, "dp")
        h = c10d.all_gather_into_tensor(x, {count}, "dp")
        gw = c10d.wait_tensor(g)
        hw = c10d.wait_tensor(h)
        add = aten.add.Tensor(gw, hw)
        return output("w", w), output("u", u), output("add", add)
    """
    compare = functools.partial(differences, whole_numbers=dtype == "i64")
    assert ranks(count).run(compare, text, MergeDuplicateCollectives()) == [[0.0] * 3] * count


def test_a_list_is_another_value_after_a_write_to_an_element() -> None:
    done = merged("""
        x: f32[4] = input("x")
        parts: (f32[2], f32[2]) = aten.split_copy.Tensor(x, 2)
        first: f32[2] = parts[0]
        a: f32[4] = aten.cat(parts)
        s: f32[4] = c10d.all_reduce(a, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        z: f32[2] = aten.zero_(first)
        b: f32[4] = aten.cat(parts)
        t: f32[4] = c10d.all_reduce(b, "sum", "dp")
        v: f32[4] = c10d.wait_tensor(t)
        return output("w", w), output("v", v)
    """)
    assert done.history[0].counts == {"merged": 0, "left": 0}
