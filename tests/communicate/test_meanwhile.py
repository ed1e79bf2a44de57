"""Matmuls beside a scatter that are computed while it travels: which, where they and their readers go, which not."""

from __future__ import annotations

import textwrap

import pytest
import torch

from crossfade.communicate import collective_matmul, fuse_scatters_into_matmuls, meanwhile
from crossfade.communicate.fuse_scatters_into_matmuls import FuseScattersIntoMatmuls
from crossfade.cost.presets import preset
from crossfade.graph.collective_matmul import MEANWHILE_OPERATOR, SCATTER_OPERATOR
from crossfade.graph.passes import Outcome, run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify
from tests.communicate.all_collective_matmul_ranks import run_ranks

TOLD = FuseScattersIntoMatmuls(form="ring", chunks=2)

HALF = "half: bf16[6, 4] = aten._to_copy(turned, dtype=bf16)"

BACKWARD = """
    g: f32[8, 6] = input("g")
    x: f32[8, 4] = input("x")
    w: f32[4, 6] = parameter("w")
    xt: f32[4, 8] = aten.t(x)
    of_w: f32[4, 6] = aten.mm(xt, g)
    turned: f32[6, 4] = aten.t(of_w)
    half: bf16[6, 4] = aten._to_copy(turned, dtype=bf16)
    wt: f32[6, 4] = aten.t(w)
    m: f32[8, 4] = aten.mm(g, wt)
    s: f32[4, 4] = c10d.reduce_scatter_tensor(m, "sum", 2, "tp")
    d: f32[4, 4] = c10d.wait_tensor(s)
    return output("d", d), output("half", half)
"""


def program_of(text: str) -> Program:
    return parse(textwrap.dedent(text), groups={"tp": 2})


def fused(text: str, pass_: FuseScattersIntoMatmuls = TOLD) -> Program:
    """The program after the pass, once it computes what it did."""
    program = program_of(text)
    done = run_passes(program, [pass_])
    verify(done, recompute=True)
    torch.manual_seed(0)
    given = [[torch.randn(node.meta["val"].shape) for node in program.placeholders] for _ in range(2)]
    for before, after in zip(run_ranks(program, given), run_ranks(done, given), strict=True):
        torch.testing.assert_close(after, before)
    return done


def test_a_weights_gradient_joins_and_what_reads_it_goes_below() -> None:
    done = fused(BACKWARD)
    assert (
        render(done)
        == textwrap.dedent("""
        g: f32[8, 6] = input("g")
        x: f32[8, 4] = input("x")
        w: f32[4, 6] = parameter("w")
        xt: f32[4, 8] = aten.t(x)
        wt: f32[6, 4] = aten.t(w)
        matmul_scatter_meanwhile: (f32[4, 4], f32[4, 6]) = crossfade.matmul_scatter_meanwhile(g, wt, None, [], "ab,bc->ac", 0, "sum", 2, "ring", 2, "tp", [xt, g])
        getitem: f32[4, 4] = matmul_scatter_meanwhile[0]
        getitem_1: f32[4, 6] = matmul_scatter_meanwhile[1]
        turned: f32[6, 4] = aten.t(getitem_1)
        half: bf16[6, 4] = aten._to_copy(turned, dtype=bf16)
        return output("d", getitem), output("half", half)
        """).strip()  # noqa: E501
    )
    said = {verdict.subject: (verdict.outcome, verdict.reason, verdict.detail) for verdict in done.history[0].verdicts}
    assert said["of_w"] == (Outcome.FUSED, fuse_scatters_into_matmuls.MEANWHILE, "s")
    assert said["s"][2] == "ring in 2 pieces, as asked for, with m, meanwhile of_w"


def test_a_matmul_further_down_is_raised_with_what_it_needs() -> None:
    done = fused("""
        g: f32[8, 6] = input("g")
        x: f32[8, 4] = input("x")
        w: f32[6, 4] = parameter("w")
        m: f32[8, 4] = aten.mm(g, w)
        s: f32[4, 4] = c10d.reduce_scatter_tensor(m, "sum", 2, "tp")
        d: f32[4, 4] = c10d.wait_tensor(s)
        xt: f32[4, 8] = aten.t(x)
        of_w: f32[4, 6] = aten.mm(xt, g)
        return output("d", d), output("of_w", of_w)
    """)
    lines = render(done).splitlines()
    assert lines[3] == "xt: f32[4, 8] = aten.t(x)"
    assert lines[4].endswith('"tp", [xt, g])')


TWO = """
    g: f32[8, 6] = input("g")
    h: f32[8, 8] = input("h")
    n: f32[4, 8] = input("n")
    w: f32[6, 4] = parameter("w")
    a: f32[8, 6] = aten.mm(h, g)
    b: f32[8, 6] = aten.mm(h, a)
    m: f32[8, 4] = aten.mm(g, w)
    s: f32[4, 4] = c10d.reduce_scatter_tensor(m, "sum", 2, "tp")
    d: f32[4, 4] = c10d.wait_tensor(s)
    e: f32[4, 8] = aten.mm(d, n)
    return output("d", d), output("b", b), output("e", e)
"""


def test_the_nearest_is_taken_and_what_follows_from_the_scatter_is_not() -> None:
    done = fused(TWO)
    (operator,) = done.graph.find_nodes(op="call_function", target=MEANWHILE_OPERATOR)
    assert [node.name for node in operator.args[-1]] == ["h", "a"]


def test_of_two_that_follow_from_each_other_one_is_taken() -> None:
    done = fused("""
        g: f32[8, 6] = input("g")
        h: f32[8, 8] = input("h")
        w: f32[6, 4] = parameter("w")
        a: f32[8, 6] = aten.mm(h, g)
        m: f32[8, 4] = aten.mm(g, w)
        s: f32[4, 4] = c10d.reduce_scatter_tensor(m, "sum", 2, "tp")
        b: f32[8, 6] = aten.mm(h, a)
        d: f32[4, 4] = c10d.wait_tensor(s)
        return output("d", d), output("b", b), output("a", a)
    """)
    (operator,) = done.graph.find_nodes(op="call_function", target=MEANWHILE_OPERATOR)
    assert [node.name for node in operator.args[-1]] == ["h", "a"]


def test_what_another_scatter_took_needs_stays_above_that() -> None:
    """`b` rises to the first scatter, so `a` may not sink to the second, though all that reads it stands below."""
    done = fused("""
        g: f32[8, 6] = input("g")
        h: f32[8, 8] = input("h")
        w: f32[6, 4] = parameter("w")
        a: f32[8, 6] = aten.mm(h, g)
        n1: f32[8, 6] = aten.neg(g)
        n2: f32[8, 6] = aten.neg(n1)
        m: f32[8, 4] = aten.mm(n2, w)
        s: f32[4, 4] = c10d.reduce_scatter_tensor(m, "sum", 2, "tp")
        m2: f32[8, 8] = aten.mm(h, h)
        s2: f32[4, 8] = c10d.reduce_scatter_tensor(m2, "sum", 2, "tp")
        b: f32[8, 6] = aten.mm(h, a)
        d: f32[4, 4] = c10d.wait_tensor(s)
        d2: f32[4, 8] = c10d.wait_tensor(s2)
        return output("d", d), output("b", b), output("a", a), output("d2", d2)
    """)
    (operator,) = done.graph.find_nodes(op="call_function", target=MEANWHILE_OPERATOR)
    assert [node.name for node in operator.args[-1]] == ["h", "a"]
    assert done.history[0].counts["collective matmuls"] == 2


@pytest.mark.parametrize(
    ("line", "instead", "reason"),
    [
        (
            "m: f32[8, 4] = aten.mm(g, wt)",
            "back: f32[8, 6] = aten.mm(x, of_w)\n    m: f32[8, 4] = aten.mm(back, wt)",
            None,
        ),
        (HALF, "half: f32[6, 4] = aten.bernoulli(turned)", meanwhile.READ),
        (HALF, "half: f32[6, 4] = aten.neg_(turned)", collective_matmul.WRITTEN),
        (HALF, "half: f32[4, 8] = aten.neg_(xt)", collective_matmul.WRITTEN),
    ],
    ids=["leads to the scatter", "is drawn from", "is written", "reads what is written"],
)
def test_what_has_its_place_stays_there_and_says_why(line: str, instead: str, reason: str | None) -> None:
    done = run_passes(program_of(BACKWARD.replace(line, instead)), [TOLD])
    verify(done, recompute=True)
    assert done.graph.find_nodes(op="call_function", target=SCATTER_OPERATOR)
    assert not done.graph.find_nodes(op="call_function", target=MEANWHILE_OPERATOR)
    said = [
        verdict.reason
        for verdict in done.history[0].verdicts
        if verdict.subject == "of_w" and verdict.outcome is Outcome.LEFT
    ]
    assert said == ([] if reason is None else [reason])


def test_no_matmul_is_taken_twice() -> None:
    both = BACKWARD.replace(
        "    return",
        "    m2: f32[8, 4] = aten.mm(g, wt)\n"
        '    s2: f32[4, 4] = c10d.reduce_scatter_tensor(m2, "sum", 2, "tp")\n'
        "    d2: f32[4, 4] = c10d.wait_tensor(s2)\n"
        '    return output("d2", d2),',
    )
    done = fused(both)
    assert len(done.graph.find_nodes(op="call_function", target=MEANWHILE_OPERATOR)) == 1
    assert len(done.graph.find_nodes(op="call_function", target=SCATTER_OPERATOR)) == 1


@pytest.mark.parametrize(("inner", "needed"), [(64, True), (65536, False)])
def test_what_hides_itself_needs_none(inner: int, needed: bool) -> None:
    """The longer the sums of the scattered product, the more of its travel they cover."""
    done = run_passes(
        program_of(f"""
            g: f32[4096, {inner}] = input("g")
            x: f32[4096, 1024] = input("x")
            w: f32[{inner}, 1024] = parameter("w")
            xt: f32[1024, 4096] = aten.t(x)
            of_w: f32[1024, {inner}] = aten.mm(xt, g)
            m: f32[4096, 1024] = aten.mm(g, w)
            s: f32[2048, 1024] = c10d.reduce_scatter_tensor(m, "sum", 2, "tp")
            d: f32[2048, 1024] = c10d.wait_tensor(s)
            return output("d", d), output("of_w", of_w)
            """),
        [FuseScattersIntoMatmuls(preset("ethernet-10gbit"), form="chunked")],
    )
    assert bool(done.graph.find_nodes(op="call_function", target=MEANWHILE_OPERATOR)) is needed
