"""Values are made where they are needed; nothing crosses an effect, and no order takes more memory than before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings

from crossfade.graph.memory import memory_curve
from crossfade.graph.passes import run_passes
from crossfade.graph.text import parse
from crossfade.simplify.reorder_for_locality import ReorderForLocality
from tests.growth import grows_linearly
from tests.properties.sampled_programs import Machine, Sampled, sampled_programs
from tests.simplify.holds import declines, program_of, rewrites

PASS = ReorderForLocality()
BARRIER = "a collective, a write, a random draw or a call of other graphs stands before its first user"
MEMORY = "what it reads would be kept longer, and that could take more memory"


def test_nodes_for_one_user_keep_their_order_and_chains_move_whole():
    rewrites(
        PASS,
        """
        x: f32[4] = input("x")
        a: f32[4] = aten.exp(x)
        b: f32[2, 2] = aten.view(a, [2, 2])
        c: f32[4] = aten.sin(x)
        d: f32[4] = aten.neg(x)
        e: f32[] = aten.sum(d)
        f: f32[4] = aten.mul.Tensor(c, e)
        g: f32[2, 2] = aten.mul.Tensor(b, e)
        return output("f", f), output("g", g)
        """,
        """
        x: f32[4] = input("x")
        d: f32[4] = aten.neg(x)
        e: f32[] = aten.sum(d)
        c: f32[4] = aten.sin(x)
        f: f32[4] = aten.mul.Tensor(c, e)
        a: f32[4] = aten.exp(x)
        b: f32[2, 2] = aten.view(a, [2, 2])
        g: f32[2, 2] = aten.mul.Tensor(b, e)
        return output("f", f), output("g", g)
        """,
        {"moved": 3},
    )


def test_a_user_that_sank_is_not_the_first_any_more():
    """`n` stands above `late` in the text, but must be above `early`, once `late` has gone down."""
    rewrites(
        PASS,
        """
        x: f32[4] = input("x")
        n: f32[2, 2] = aten.view(x, [2, 2])
        late: f32[2, 2] = aten.exp(n)
        q: f32[2, 2] = aten.sin(n)
        early: f32[2, 2] = aten.neg(q)
        r: f32[2, 2] = aten.mul.Tensor(early, late)
        return output("r", r)
        """,
        """
        x: f32[4] = input("x")
        n: f32[2, 2] = aten.view(x, [2, 2])
        q: f32[2, 2] = aten.sin(n)
        early: f32[2, 2] = aten.neg(q)
        late: f32[2, 2] = aten.exp(n)
        r: f32[2, 2] = aten.mul.Tensor(early, late)
        return output("r", r)
        """,
        {"moved": 1},
    )


BETWEEN = {
    "a start": 's: f32[4] = c10d.all_reduce(x, "sum", "dp")\n        w: f32[4] = c10d.wait_tensor(s)',
    "a write": "c: f32[4] = aten.clone(x)\n        w: f32[4] = aten.add_.Tensor(c, 1)",
    "a draw": "w: f32[4] = aten.rand_like(x)",
    "a check": 'k: b8[] = aten.any(x)\n        w: None = aten._assert_async.msg(k, "zeros")',
}


@pytest.mark.parametrize("name", BETWEEN)
def test_nothing_crosses(name: str):
    declines(
        PASS,
        f"""
        x: f32[4] = input("x")
        a: f32[4] = aten.exp(x)
        {BETWEEN[name]}
        y: f32[4] = aten.neg(a)
        return output("y", y)
        """,
        BARRIER,
        dp=2,
    )


def test_nothing_crosses_a_call_of_other_graphs():
    declines(
        PASS,
        """
        def body():
            row: f32[] = input("row")
            relu: f32[] = aten.relu(row)
            return output("0", relu)
        x: f32[4] = input("x")
        a: f32[4] = aten.exp(x)
        body: graph = constant("body")
        map_impl: (f32[4],) = higher_order.map_impl(body, [x], [])
        m: f32[4] = map_impl[0]
        y: f32[4] = aten.mul.Tensor(a, m)
        return output("y", y)
        """,
        BARRIER,
    )


def test_a_result_of_a_collective_in_flight_stays_with_it():
    text = """
        x: f32[4] = input("x")
        s: (f32[4],) = c10d.all_reduce_coalesced([x], "sum", "dp")
        r: f32[4] = s[0]
        a: f32[4] = aten.exp(x)
        w: f32[4] = c10d.wait_tensor(r)
        y: f32[4] = aten.mul.Tensor(a, w)
        return output("y", y)
    """
    done = run_passes(program_of(text, dp=2), [PASS])
    assert not done.history[0].changed


@pytest.mark.parametrize(
    "small",
    ["aten.sum.dim_IntList(big, [1])", "aten.exp(big)"],
    ids=["makes less than it frees", "makes as much as it frees"],
)
def test_what_frees_memory_stays_early(small: str):
    shape = "8" if "sum" in small else "8, 8"
    declines(
        PASS,
        f"""
        x: f32[8, 8] = input("x")
        big: f32[8, 8] = aten.neg(x)
        small: f32[{shape}] = {small}
        other: f32[8, 8] = aten.exp(x)
        low: f32[8, 8] = aten.neg(other)
        y: f32[8, 8] = aten.add.Tensor(low, small)
        return output("y", y)
        """,
        MEMORY,
    )


def test_what_makes_more_than_it_frees_stays_if_the_peak_would_rise():
    """Moved, `wide` would need `row` while `a` is alive, above `top`, which makes less than that."""
    text = """
        x: f32[8, 8] = input("x")
        row: f32[8] = aten.sum.dim_IntList(x, [1])
        wide: f32[64, 8] = aten.repeat(row, [64, 1])
        a: f32[8, 8] = aten.neg(x)
        top: f32[{made}] = aten.{user}(wide)
        return output("a", a), output("top", top)
    """
    declines(PASS, text.format(made="", user="sum"), MEMORY)
    program = program_of(text.format(made="64, 8", user="neg"))
    done = run_passes(program, [PASS])
    assert [node.name for node in done.graph.nodes][:-1] == ["x", "a", "row", "wide", "top"]
    assert memory_curve(done).peak == memory_curve(program).peak


def test_long_lists_stay_together():
    """Each tensor of a list lives as long as the list: what a move would keep is not looked for in long ones."""
    elements = [f"x{i}: f32[4] = input('x{i}')" for i in range(20)]
    names = ", ".join(f"x{i}" for i in range(20))
    lines = [*elements, f"l = aten._foreach_neg([{names}])", "a = l[0]"]
    lines += ["y = aten.neg(x0)", "b = aten.exp(y)", "c = aten.mul.Tensor(a, b)"]
    done = run_passes(parse("\n".join([*lines, 'return output("b", b), output("c", c)'])), [PASS])
    assert not done.history[0].changed
    assert {verdict.reason for verdict in done.history[0].verdicts} == {MEMORY}


@settings(max_examples=60, deadline=None)
@given(sampled_programs())
def test_sampled_programs_compute_the_same_in_no_more_memory(sampled: Sampled):
    """Once, and again on what that left: a node that went between two others can make room for another move."""
    before = sampled.program
    for _ in range(2):
        after = run_passes(before, [PASS])
        assert Machine().run(before, list(before.graph.nodes)) == Machine().run(after, list(after.graph.nodes))
        assert memory_curve(after).peak <= memory_curve(before).peak
        before = after


def test_work_grows_with_the_program():
    """Many values made far above their users, which stand in the opposite order."""

    def reordering(count: int) -> Callable[[], object]:
        lines = ["x: f32[4] = input('x')"]
        lines += [f"a{i} = aten.exp(x)" for i in range(count)]
        lines += ["s0 = aten.neg(x)"]
        lines += [f"s{i + 1} = aten.add.Tensor(s{i}, a{count - 1 - i})" for i in range(count)]
        program = parse("\n".join([*lines, f'return output("s", s{count})']))

        def run() -> None:
            assert ReorderForLocality().run(program).counts["moved"] == count - 1

        return run

    grows_linearly(reordering, 300)
