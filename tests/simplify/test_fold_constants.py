"""Constants are computed once: numbers, fulls that stay fulls, small tensors; never what is written or returned."""

from __future__ import annotations

import operator
import textwrap

import pytest
import torch

from crossfade.graph.passes import Outcome, run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify
from crossfade.simplify.fold_constants import FoldConstants
from tests.simplify.holds import declines, rewrites, same_results

FULL = 'layout=strided, device=device("cpu"), pin_memory=False'

FOLDED = {
    "numbers into their users": (
        """
        x: f32[4, 2] = input("x")
        n: int = aten.sym_size.int(x, 0)
        m: int = operator.mul(n, 2)
        k: int = operator.sub(m, 0)
        y: f32[8] = aten.view(x, [k])
        z: f32[8] = aten.neg(y)
        return output("z", z)
        """,
        """
        x: f32[4, 2] = input("x")
        y: f32[8] = aten.view(x, [8])
        z: f32[8] = aten.neg(y)
        return output("z", z)
        """,
        {"numbers": 3},
    ),
    "one value of any size": (
        """
        x: f32[300, 300] = input("x")
        a: f32[300, 300] = aten.ones([300, 300])
        b: f32[300] = aten.full([300], 0.5)
        c: f32[300, 300] = aten.expand(b, [300, 300])
        d: f32[300, 300] = aten.sub.Tensor(a, c)
        e: f64[300, 300] = aten._to_copy(d, dtype=f64)
        y: f64[300, 300] = aten.add.Tensor(x, e)
        return output("y", y)
        """,
        f"""
        x: f32[300, 300] = input("x")
        full: f64[300, 300] = aten.full([300, 300], 0.5, dtype=f64, {FULL})
        y: f64[300, 300] = aten.add.Tensor(x, full)
        return output("y", y)
        """,
        {"fulls": 1},
    ),
    "what is only laid out otherwise reads the full": (
        """
        x: f32[3, 4] = input("x")
        a: f32[4] = aten.ones([4])
        b: f32[4] = aten.neg(a)
        c: f32[3, 4] = aten.expand(b, [3, 4])
        y: f32[3, 4] = aten.add.Tensor(x, c)
        return output("y", y)
        """,
        f"""
        x: f32[3, 4] = input("x")
        full: f32[4] = aten.full([4], -1.0, dtype=f32, {FULL})
        c: f32[3, 4] = aten.expand(full, [3, 4])
        y: f32[3, 4] = aten.add.Tensor(x, c)
        return output("y", y)
        """,
        {"fulls": 1},
    ),
    "a result may be a new full": (
        """
        a: i64[4] = aten.full([4], 3)
        b: i64[4] = aten.neg(a)
        return output("b", b)
        """,
        f"""
        full: i64[4] = aten.full([4], -3, dtype=i64, {FULL})
        return output("b", full)
        """,
        {"fulls": 1},
    ),
    "comparisons that come out alike everywhere": (
        """
        x: b8[4] = input("x")
        a: i64[4] = aten.arange(4)
        b: b8[4] = aten.lt.Scalar(a, 9)
        y: b8[4] = aten.logical_and(x, b)
        return output("y", y)
        """,
        f"""
        x: b8[4] = input("x")
        full: b8[4] = aten.full([4], True, dtype=b8, {FULL})
        y: b8[4] = aten.logical_and(x, full)
        return output("y", y)
        """,
        {"fulls": 1},
    ),
}


@pytest.mark.parametrize("name", FOLDED)
def test_folded(name: str) -> None:
    rewrites(FoldConstants(), *FOLDED[name])


def folded(text: str, step: FoldConstants, constants: dict | None = None) -> tuple[Program, Program]:
    program = parse(textwrap.dedent(text), constants=constants)
    done = run_passes(program, [step])
    verify(done, recompute=True)
    return program, done


def test_small_tensors_become_constants() -> None:
    before, done = folded(
        """
        x: f32[4, 4] = input("x")
        a: i64[4] = aten.arange(4)
        b: i64[4, 1] = aten.unsqueeze(a, 1)
        c: b8[4, 4] = aten.le.Tensor(a, b)
        y: f32[4, 4] = aten.mul.Tensor(x, c)
        return output("y", y)
        """,
        FoldConstants(),
    )
    assert (
        render(done)
        == textwrap.dedent("""
        x: f32[4, 4] = input("x")
        folded_0: b8[4, 4] = constant("folded_0")
        y: f32[4, 4] = aten.mul.Tensor(x, folded_0)
        return output("y", y)
    """).strip()
    )
    assert torch.equal(done.constants["folded_0"], torch.ones(4, 4).tril().bool())
    same_results(before, done, FoldConstants.numerics)
    assert not run_passes(done, [FoldConstants()]).history[-1].changed


KEPT = """
    x: f32[4] = input("x")
    k: f32[4] = constant("k")
    m: (f32[], i64[]) = aten.max.dim(k, 0)
    i: i64[] = m[1]
    y: f32[4] = aten.add.Tensor(x, i)
    return output("y", y)
"""


def test_tensors_that_the_program_keeps_need_a_promise() -> None:
    constants = {"k": torch.tensor([1.0, 5.0, 2.0, 3.0])}
    _, done = folded(KEPT, FoldConstants(), constants)
    assert [verdict.reason for verdict in done.history[0].verdicts] == [
        "the tensors that the program keeps may change from run to run"
    ]
    before, done = folded(KEPT, FoldConstants(kept=True), constants)
    assert render(done).splitlines()[1] == f"full: i64[] = aten.full([], 1, dtype=i64, {FULL})"
    same_results(before, done, FoldConstants.numerics)


@pytest.mark.parametrize(
    ("step", "line", "reason"),
    [
        (FoldConstants(limit_bytes=15, kept=True), "w: f32[4] = aten.neg(x)", "its values take more than limit_bytes"),
        (FoldConstants(kept=True), "w: f32[4] = aten.add_.Tensor(k, x)", "its memory is written to"),
    ],
)
def test_kept_tensors_that_are_not_folded_say_why(step: FoldConstants, line: str, reason: str) -> None:
    text = f"""
        x: f32[4] = input("x")
        k: f32[4] = constant("k")
        n: f32[4] = aten.neg(k)
        {line}
        return output("n", n), output("w", w)
    """
    _, done = folded(text, step, {"k": torch.tensor([1.0, 5.0, 2.0, 3.0])})
    assert [verdict.reason for verdict in done.history[0].verdicts] == [reason]


def test_nans_of_other_bits_are_not_fulls() -> None:
    """Zero times infinity is a NaN whose sign differs from the one that a full would have, on some processors."""
    before, done = folded(
        """
        m: b8[4] = input("m")
        x: f32[4] = input("x")
        a: f32[4] = aten.full([4], float("inf"))
        b: f32[4] = aten.mul.Tensor(a, 0.0)
        y: f32[4] = aten.where.self(m, b, x)
        return output("y", y)
        """,
        FoldConstants(),
    )
    torch.manual_seed(0)
    inputs = [torch.tensor([True, False, True, False]), torch.randn(4)]
    expected, other = before.module()(*inputs)[0], done.module()(*inputs)[0]
    assert torch.equal(expected.view(torch.int32), other.view(torch.int32))


DECLINED = {
    "larger than allowed": (
        """
        x: i64[5] = input("x")
        a: i64[5] = aten.arange(5)
        b: i64[5] = aten.mul.Tensor(a, 2)
        y: i64[5] = aten.add.Tensor(x, b)
        return output("y", y)
        """,
        "its values take more than limit_bytes",
        FoldConstants(limit_bytes=39),
    ),
    "made of what is larger than allowed": (
        """
        a: f32[5] = aten.ones([5])
        b: f32[1] = aten.sum.dim_IntList(a, [0], True)
        return output("b", b)
        """,
        "what it is made of is known only to be of one value",
        FoldConstants(limit_bytes=19),
    ),
    "the same bits as other numbers": (
        """
        x: f32[2] = input("x")
        a: i64[2] = aten.full_like(x, 1, dtype=i64)
        b: i32[4] = aten.view.dtype(a, dtype=i32)
        c: i32[4] = aten._to_copy(b, dtype=i32)
        return output("c", c)
        """,
        "what it is made of is known only to be of one value",
        FoldConstants(),
    ),
    "matrix products": (
        """
        x: f32[2, 2] = input("x")
        a: f32[2, 2] = aten.ones([2, 2])
        b: f32[2, 2] = aten.mm(a, a)
        y: f32[2, 2] = aten.add.Tensor(x, b)
        return output("y", y)
        """,
        "its last bits may depend on threads and alignment",
        FoldConstants(),
    ),
    "what is written": (
        """
        x: i64[4] = input("x")
        a: i64[4] = aten.arange(4)
        b: i64[4] = aten.neg(a)
        w: i64[4] = aten.add_.Tensor(b, x)
        return output("w", w)
        """,
        "its memory is written to",
        FoldConstants(),
    ),
    "one value that lies otherwise": (
        """
        x: f32[3, 2] = input("x")
        a: f32[2, 3] = aten.ones([2, 3])
        b: f32[3, 2] = aten.t(a)
        c: f32[3, 2] = aten.neg(b)
        y: f32[3, 2] = aten.add.Tensor(x, c)
        return output("y", y)
        """,
        "it is of one value, but lies in memory as no `full` does",
        FoldConstants(),
    ),
    "results own their memory": (
        """
        a: i64[4] = aten.arange(4)
        b: i64[4] = aten.neg(a)
        c: i64[2, 2] = aten.view(b, [2, 2])
        return output("c", c)
        """,
        "a result of the program would share memory with a constant",
        FoldConstants(),
    ),
    "what torch refuses": (
        """
        x: i64[4] = input("x")
        a: i64[4] = aten.arange(4)
        b: i64[4] = aten.add.Tensor(a, 9)
        c: i64[4] = aten.index_select(a, 0, b)
        y: i64[4] = aten.add.Tensor(x, c)
        return output("y", y)
        """,
        "torch refuses to compute it",
        FoldConstants(),
    ),
}


@pytest.mark.parametrize("name", DECLINED)
def test_declined(name: str) -> None:
    text, reason, step = DECLINED[name]
    if name == "what torch refuses":  # its input can still be folded
        done = run_passes(parse(textwrap.dedent(text)), [step])
        assert next(v.reason for v in done.history[0].verdicts if v.outcome is Outcome.LEFT).startswith(reason)
    else:
        declines(step, text, reason)


def test_other_devices_are_left() -> None:
    text = textwrap.dedent("""
        a: i64[4] = aten.arange(4, device=device("cuda"))
        b: i64[4] = aten.neg(a)
        c: i64[4] = aten.full([4], 1, device=device("cuda"))
        d: i64[2, 2] = aten.view(c, [2, 2])
        e: i64[2, 2] = aten.neg(d)
        return output("b", b), output("e", e)
    """).strip()
    done = run_passes(parse(text), [FoldConstants()])
    assert [str(verdict) for verdict in done.history[0].verdicts] == [
        "b: left alone: only what lies on the CPU is computed now",
        "e: left alone: only what lies on the CPU is computed now",
    ]
    assert 'aten.full([2, 2], 1, dtype=i64, layout=strided, device=device("cuda' in render(done)


def test_zeros_of_either_sign_stay_apart() -> None:
    before, done = folded(
        """
        x: f32[4] = input("x")
        a: f32[4] = aten.zeros([4])
        b: f32[4] = aten.neg(a)
        y: f32[4] = aten.div.Tensor(x, b)
        return output("y", y)
        """,
        FoldConstants(),
    )
    assert "aten.full([4], -0.0, dtype=f32" in render(done)
    same_results(before, done, FoldConstants.numerics)


def test_division_by_zero_stays_until_it_runs() -> None:
    text = textwrap.dedent("""
        x: f32[4] = input("x")
        return output("x", x)
    """).strip()
    program = parse(text)
    with program.graph.inserting_before(program.output_node):
        node = program.graph.call_function(operator.floordiv, (1, 0))
    node.meta["val"] = 1
    assert not FoldConstants().run(program).changed
