"""Averages become a division and a sum where the backend only sums; what stays says why."""

from __future__ import annotations

import textwrap

import pytest

from crossfade.communicate.lower_averages import LowerAverages
from crossfade.graph.passes import run_passes
from crossfade.graph.text import parse, render


def lowered(text: str, groups: dict[str, int] | None = None):
    return run_passes(parse(textwrap.dedent(text), groups=groups or {"dp": 4, "tp": 2}), [LowerAverages()])


def test_size_of_the_group_divides_and_two_waits_follow():
    done = lowered("""
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, reduce_op="avg", group_name="dp")
        w: f32[4] = c10d.wait_tensor(s)
        w1: f32[4] = c10d.wait_tensor(s)
        return output("y", w), output("z", w1)
    """)
    assert render(done).splitlines()[1:3] == [
        "mul: f32[4] = aten.mul.Tensor(x, 0.25)",
        'all_reduce: f32[4] = c10d.all_reduce(mul, "sum", "dp")',
    ]
    assert render(done).splitlines()[3] == "w: f32[4] = c10d.wait_tensor(all_reduce)"
    assert done.history[0].counts == {"lowered": 1}
    assert [str(verdict) for verdict in done.history[0].verdicts] == [
        "s: replaced: divided before it is summed, since its backend may not average"
    ]


@pytest.mark.parametrize(("dtype", "ranks"), [("f32", 3), ("c64", 4)])
def test_what_a_multiplication_would_round_in_another_way_is_divided(dtype: str, ranks: int):
    done = lowered(
        f"""
        x: {dtype}[4] = input("x")
        s: {dtype}[4] = c10d.all_reduce(x, "avg", "dp")
        w: {dtype}[4] = c10d.wait_tensor(s)
        return output("y", w)
        """,
        {"dp": ranks},
    )
    assert render(done).splitlines()[1] == f"div: {dtype}[4] = aten.div.Tensor(x, {ranks})"


LEFT = {
    "its group's backend averages by itself": ('s: f32[4] = c10d.all_reduce(x, "avg", "tp")', "f32", None),
    "the size of its group is not known": ('s: f32[4] = c10d.all_reduce(x, "avg", "dp")', "f32", {"dp": 0}),
    "a division of integers would not stay in its dtype": ('s: i64[4] = c10d.all_reduce(x, "avg", "dp")', "i64", None),
    "only the plain all-reduce is lowered": ('s: f32[4] = c10d.all_reduce_(x, "avg", "dp")', "f32", None),
}


@pytest.mark.parametrize("reason", LEFT)
def test_left(reason: str):
    line, dtype, groups = LEFT[reason]
    text = f'x: {dtype}[4] = input("x")\n{line}\nw: {dtype}[4] = c10d.wait_tensor(s)\nreturn output("y", w)'
    done = lowered(text, groups)
    assert render(done) == text
    assert [str(v) for v in done.history[0].verdicts] == [f"s: left alone: {reason}"]


def test_sums_are_no_business_of_this_pass():
    done = lowered("""
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        return output("y", w)
    """)
    assert not done.history[0].changed and not done.history[0].verdicts
