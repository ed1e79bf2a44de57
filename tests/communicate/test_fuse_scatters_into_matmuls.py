"""Matmuls and their reduce-scatters become collective matmuls: exact programs, and every reason to leave one alone."""

from __future__ import annotations

import textwrap

import pytest

from crossfade.communicate import collective_matmul, fuse_scatters_into_matmuls
from crossfade.communicate.fuse_scatters_into_matmuls import FuseScattersIntoMatmuls
from crossfade.cost.presets import preset
from crossfade.graph.passes import Outcome, run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify

TOLD = FuseScattersIntoMatmuls(form="ring", chunks=2)


def program_of(text: str) -> Program:
    return parse(textwrap.dedent(text), groups={"tp": 2})


def fused(text: str, pass_: FuseScattersIntoMatmuls = TOLD) -> Program:
    done = run_passes(program_of(text), [pass_])
    verify(done, recompute=True)
    return done


def left_alone(text: str, reason: str, pass_: FuseScattersIntoMatmuls = TOLD) -> str:
    done = fused(text, pass_)
    assert render(done) == render(program_of(text))
    found = [verdict for verdict in done.history[0].verdicts if verdict.subject == "s"]
    assert [(verdict.outcome, verdict.reason) for verdict in found] == [(Outcome.LEFT, reason)]
    return found[0].detail


def test_the_dim_is_followed_through_reshapes_and_the_bias_goes_along() -> None:
    done = fused(
        """
        x: f32[2, 6, 8] = input("x")
        w: f32[4, 8] = parameter("w")
        b: f32[4] = parameter("b")
        flat: f32[12, 8] = aten.view(x, [12, 8])
        t: f32[8, 4] = aten.t(w)
        mm: f32[12, 4] = aten.addmm(b, flat, t)
        y: f32[2, 6, 4] = aten._unsafe_view(mm, [2, 6, 4])
        parts: (f32[2, 3, 4], f32[2, 3, 4]) = aten.split.Tensor(y, 3, 1)
        one: f32[2, 3, 4] = parts[0]
        two: f32[2, 3, 4] = parts[1]
        both: f32[4, 3, 4] = aten.cat([one, two])
        s: f32[2, 3, 4] = c10d.reduce_scatter_tensor(both, "avg", 2, "tp")
        d: f32[2, 3, 4] = c10d.wait_tensor(s)
        n: f32[2, 3, 4] = aten.neg(d)
        return output("n", n), output("saved", d)
        """
    )
    assert (
        render(done)
        == textwrap.dedent("""
        x: f32[2, 6, 8] = input("x")
        w: f32[4, 8] = parameter("w")
        b: f32[4] = parameter("b")
        flat: f32[12, 8] = aten.view(x, [12, 8])
        t: f32[8, 4] = aten.t(w)
        view: f32[2, 6, 8] = aten.view(flat, [2, 6, 8])
        matmul_scatter: f32[2, 3, 4] = crossfade.matmul_scatter(view, t, b, [], "abc,cd->abd", 1, "avg", 2, "ring", 2, "tp")
        n: f32[2, 3, 4] = aten.neg(matmul_scatter)
        return output("n", n), output("saved", matmul_scatter)
        """).strip()  # noqa: E501
    )
    said = {verdict.subject: (verdict.outcome, verdict.reason) for verdict in done.history[0].verdicts}
    assert said == {
        "s": (Outcome.FUSED, collective_matmul.IN_PIECES),
        "mm": (Outcome.FUSED, collective_matmul.IN_PIECES),
    }


def test_columns_are_scattered_too() -> None:
    done = fused(
        """
        x: f32[5, 8] = input("x")
        w: f32[8, 6] = parameter("w")
        mm: f32[5, 6] = aten.mm(x, w)
        parts: (f32[5, 3], f32[5, 3]) = aten.split.Tensor(mm, 3, 1)
        one: f32[5, 3] = parts[0]
        two: f32[5, 3] = parts[1]
        both: f32[10, 3] = aten.cat([one, two])
        s: f32[5, 3] = c10d.reduce_scatter_tensor(both, "sum", 2, "tp")
        d: f32[5, 3] = c10d.wait_tensor(s)
        return output("d", d)
        """
    )
    assert 'crossfade.matmul_scatter(x, w, None, [], "ab,bc->ac", 1, "sum", 2, "ring", 2, "tp")' in render(done)


def test_a_scattered_value_is_multiplied_and_scattered_again() -> None:
    """The operand of the second pipeline is the result of the first."""
    done = fused(
        """
        x: f32[8, 8] = input("x")
        w: f32[8, 6] = parameter("w")
        mm: f32[8, 6] = aten.mm(x, w)
        s: f32[4, 6] = c10d.reduce_scatter_tensor(mm, "sum", 2, "tp")
        d: f32[4, 6] = c10d.wait_tensor(s)
        mm2: f32[4, 4] = aten.linear(d, d)
        s2: f32[2, 4] = c10d.reduce_scatter_tensor(mm2, "sum", 2, "tp")
        d2: f32[2, 4] = c10d.wait_tensor(s2)
        return output("d2", d2)
        """
    )
    assert done.history[0].counts == {"collective matmuls": 2, "left": 0}


def test_the_result_keeps_its_layout_in_memory() -> None:
    done = fused(
        """
        x: f32[5, 6, 8] = input("x")
        w: f32[4, 8] = parameter("w")
        y: f32[5, 6, 4] = aten.linear(x, w)
        turned: f32[6, 5, 4] = aten.permute(y, [1, 0, 2])
        dense: f32[6, 5, 4] = aten.clone(turned, memory_format=contiguous_format)
        s: f32[3, 5, 4] = c10d.reduce_scatter_tensor(dense, "sum", 2, "tp")
        d: f32[3, 5, 4] = c10d.wait_tensor(s)
        back: f32[5, 3, 4] = aten.permute(d, [1, 0, 2])
        return output("back", back)
        """
    )
    assert done.history[0].counts["collective matmuls"] == 1
    assert done.results[0].meta["val"].stride() == (4, 20, 1)


END = """
s: f32[4, 6] = c10d.reduce_scatter_tensor(m, "sum", 2, "tp")
d: f32[4, 6] = c10d.wait_tensor(s)
"""
START = 'x: f32[8, 8] = input("x")\nw: f32[8, 6] = parameter("w")\n'


@pytest.mark.parametrize(
    ("text", "reason", "detail"),
    [
        (
            'm: f32[8, 6] = input("m")' + END + 'return output("d", d)',
            fuse_scatters_into_matmuls.NO_MATMUL,
            "placeholder",
        ),
        (
            START + "m: f32[8, 6] = aten.mm(x, w)" + END + 'return output("d", d), output("m", m)',
            fuse_scatters_into_matmuls.USED,
            "output reads m",
        ),
        (
            START
            + "m: f32[8, 6] = aten.mm(x, w)\nf: f32[8, 8] = aten.fill_.Scalar(x, 1.0)"
            + END
            + 'return output("d", d), update("x", f)',
            collective_matmul.WRITTEN,
            "x",
        ),
    ],
    ids=["no matmul", "read elsewhere", "written memory"],
)
def test_what_cannot_be_is_left_alone(text: str, reason: str, detail: str) -> None:
    assert detail in left_alone(text, reason)


def test_what_is_not_faster_is_left_alone_with_its_numbers() -> None:
    text = START + "m: f32[8, 6] = aten.mm(x, w)" + END + 'return output("d", d)'
    assert "plain" in left_alone(text, collective_matmul.SLOWER, FuseScattersIntoMatmuls(preset("ethernet-1gbit")))
    assert "4 pieces" in left_alone(
        text, collective_matmul.TOO_SMALL, FuseScattersIntoMatmuls(preset("ethernet-1gbit"), chunks=4)
    )
