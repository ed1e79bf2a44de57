"""All-gathers and their matmuls become collective matmuls: exact programs, and every reason to leave one alone."""

from __future__ import annotations

import re
import textwrap

import pytest

from crossfade.communicate import collective_matmul, fuse_gathers_into_matmuls
from crossfade.communicate.fuse_gathers_into_matmuls import FuseGathersIntoMatmuls
from crossfade.cost.presets import preset
from crossfade.errors import PassError
from crossfade.graph.passes import Outcome, run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify

TOLD = FuseGathersIntoMatmuls(form="chunked", chunks=2)
START = """
x: f32[512, 512] = input("x")
w: f32[512, 512] = parameter("w")
s: f32[1024, 512] = c10d.all_gather_into_tensor(x, 2, "tp")
g: f32[1024, 512] = c10d.wait_tensor(s)
"""


def program_of(text: str) -> Program:
    return parse(textwrap.dedent(text), groups={"tp": 2})


def fused(text: str, pass_: FuseGathersIntoMatmuls = TOLD) -> Program:
    done = run_passes(program_of(text), [pass_])
    verify(done, recompute=True)
    return done


def becomes(before: str, after: str, pass_: FuseGathersIntoMatmuls = TOLD) -> Program:
    done = fused(before, pass_)
    assert render(done) == textwrap.dedent(after).strip()
    return done


def said(done: Program) -> dict[str, tuple[Outcome, str]]:
    """The last that was said of each subject."""
    return {verdict.subject: (verdict.outcome, verdict.reason) for verdict in done.history[0].verdicts}


def left_alone(text: str, subject: str, reason: str, pass_: FuseGathersIntoMatmuls = TOLD) -> str:
    """Assert that a pass says so and changes nothing; the detail that it gives."""
    done = fused(text, pass_)
    assert render(done) == render(program_of(text))
    found = [verdict for verdict in done.history[0].verdicts if verdict.subject == subject]
    assert [(verdict.outcome, verdict.reason) for verdict in found] == [(Outcome.LEFT, reason)]
    return found[0].detail


def test_three_matmuls_share_a_gather_and_the_rest_reads_what_is_kept() -> None:
    done = becomes(
        """
        x: f32[4, 6, 8] = input("x")
        q: f32[8, 8] = parameter("q")
        k: f32[3, 8] = parameter("k")
        b: f32[3] = parameter("b")
        s: f32[8, 6, 8] = c10d.all_gather_into_tensor(x, 2, "tp")
        d: f32[8, 6, 8] = c10d.wait_tensor(s)
        parts: (f32[4, 6, 8], f32[4, 6, 8]) = aten.split.Tensor(d, 4)
        one: f32[4, 6, 8] = parts[0]
        two: f32[4, 6, 8] = parts[1]
        g: f32[4, 12, 8] = aten.cat([one, two], 1)
        flat: f32[48, 8] = aten.view(g, [48, 8])
        mm: f32[48, 8] = aten.mm(flat, q)
        t: f32[8, 3] = aten.t(k)
        addmm: f32[48, 3] = aten.addmm(b, flat, t)
        linear: f32[4, 12, 3] = aten.linear(g, k)
        relu: f32[48, 8] = aten.relu(flat)
        return output("mm", mm), output("addmm", addmm), output("linear", linear), output("relu", relu)
        """,
        """
        x: f32[4, 6, 8] = input("x")
        q: f32[8, 8] = parameter("q")
        k: f32[3, 8] = parameter("k")
        b: f32[3] = parameter("b")
        t: f32[8, 3] = aten.t(k)
        gather_matmul: (f32[4, 12, 8], f32[4, 12, 3], f32[4, 12, 3], f32[4, 12, 8]) = crossfade.gather_matmul(x, [q, t, k], [None, b, None], [], ["abc,cd->abd", "abc,cd->abd", "abc,dc->abd"], 1, 2, "chunked", 2, True, "tp")
        getitem: f32[4, 12, 8] = gather_matmul[0]
        getitem_1: f32[4, 12, 3] = gather_matmul[1]
        getitem_2: f32[4, 12, 3] = gather_matmul[2]
        getitem_3: f32[4, 12, 8] = gather_matmul[3]
        view: f32[48, 8] = aten.view(getitem, [48, 8])
        view_1: f32[48, 3] = aten.view(getitem_1, [48, 3])
        flat: f32[48, 8] = aten.view(getitem_3, [48, 8])
        relu: f32[48, 8] = aten.relu(flat)
        return output("mm", view), output("addmm", view_1), output("linear", getitem_2), output("relu", relu)
        """,  # noqa: E501
    )
    assert done.history[0].counts == {"collective matmuls": 1, "matmuls": 3, "left": 0}
    assert said(done)["s"] == (Outcome.FUSED, collective_matmul.IN_PIECES)


def test_a_weight_gradient_sums_over_what_is_gathered() -> None:
    becomes(
        """
        x: f32[4, 3] = input("x")
        grad: f32[8, 5] = input("grad")
        s: f32[8, 3] = c10d.all_gather_into_tensor(x, 2, "tp")
        g: f32[8, 3] = c10d.wait_tensor(s)
        t: f32[3, 8] = aten.t(g)
        mm: f32[3, 5] = aten.mm(t, grad)
        return output("mm", mm)
        """,
        """
        x: f32[4, 3] = input("x")
        grad: f32[8, 5] = input("grad")
        gather_matmul: (f32[3, 5],) = crossfade.gather_matmul(x, [grad], [None], [], ["ab,ac->bc"], 0, 2, "chunked", 2, False, "tp")
        getitem: f32[3, 5] = gather_matmul[0]
        return output("mm", getitem)
        """,  # noqa: E501
    )


def test_rows_that_are_cut_off_are_cut_off_the_results() -> None:
    done = fused(
        """
        x: f32[4, 3] = input("x")
        w: f32[3, 5] = parameter("w")
        s: f32[8, 3] = c10d.all_gather_into_tensor(x, 2, "tp")
        g: f32[8, 3] = c10d.wait_tensor(s)
        cut: f32[7, 3] = aten.slice.Tensor(g, 0, 0, 7)
        mm: f32[7, 5] = aten.mm(cut, w)
        return output("mm", mm)
        """
    )
    assert "aten.slice.Tensor(getitem, 0, 0, 7)" in render(done)


def test_what_is_kept_keeps_its_layout_in_memory() -> None:
    """Readers have been told the strides of what they read, and so has whoever called the program."""
    done = fused(
        """
        x: f32[4, 6, 8] = input("x")
        w: f32[8, 5] = parameter("w")
        turned: f32[6, 4, 8] = aten.permute(x, [1, 0, 2])
        dense: f32[6, 4, 8] = aten.clone(turned, memory_format=contiguous_format)
        s: f32[12, 4, 8] = c10d.all_gather_into_tensor(dense, 2, "tp")
        d: f32[12, 4, 8] = c10d.wait_tensor(s)
        g: f32[4, 12, 8] = aten.permute(d, [1, 0, 2])
        y: f32[4, 12, 5] = aten.matmul(g, w)
        n: f32[4, 12, 8] = aten.neg(g)
        return output("y", y), output("g", g), output("n", n)
        """
    )
    assert [result.meta["val"].stride() for result in done.results] == [(60, 5, 1), (8, 32, 1), (8, 32, 1)]


def test_rows_are_cut_off_what_is_kept_as_they_were() -> None:
    """By a view, which steps over what is cut off."""
    done = fused(
        """
        x: f32[4, 3] = input("x")
        w: f32[4, 5] = parameter("w")
        s: f32[8, 3] = c10d.all_gather_into_tensor(x, 2, "tp")
        d: f32[8, 3] = c10d.wait_tensor(s)
        parts: (f32[4, 3], f32[4, 3]) = aten.split.Tensor(d, 4)
        one: f32[4, 3] = parts[0]
        two: f32[4, 3] = parts[1]
        g: f32[4, 6] = aten.cat([one, two], 1)
        cut: f32[4, 5] = aten.slice.Tensor(g, 1, 0, 5)
        t: f32[5, 4] = aten.t(cut)
        mm: f32[5, 5] = aten.mm(t, w)
        return output("mm", mm), output("cut", cut)
        """
    )
    assert done.history[0].counts["collective matmuls"] == 1
    assert done.results[1].meta["val"].stride() == (6, 1)


def test_parts_put_together_twice_stay_two_memories() -> None:
    done = fused(
        """
        x: f32[4, 3] = input("x")
        w: f32[6, 5] = parameter("w")
        s: f32[8, 3] = c10d.all_gather_into_tensor(x, 2, "tp")
        d: f32[8, 3] = c10d.wait_tensor(s)
        parts: (f32[4, 3], f32[4, 3]) = aten.split.Tensor(d, 4)
        one: f32[4, 3] = parts[0]
        two: f32[4, 3] = parts[1]
        g: f32[4, 6] = aten.cat([one, two], 1)
        again: f32[4, 6] = aten.cat([one, two], 1)
        mm: f32[4, 5] = aten.mm(g, w)
        return output("mm", mm), output("g", g), output("again", again)
        """
    )
    assert done.history[0].counts["collective matmuls"] == 1
    assert done.results[1] is not done.results[2]


def test_views_that_nothing_reads_go_with_what_is_not_kept() -> None:
    rest = """
    flat: f32[1024, 512] = aten.view(g, [-1, 512])
    unread: f32[512, 1024] = aten.t(flat)
    mm: f32[1024, 512] = aten.mm(flat, w)
    return output("mm", mm)
    """
    assert "unread" not in render(fused(START + textwrap.dedent(rest)))


def test_views_before_a_gather_stay_for_their_other_readers() -> None:
    done = fused(
        """
        x: f32[4, 3] = input("x")
        w: f32[3, 5] = parameter("w")
        row: f32[1, 4, 3] = aten.unsqueeze(x, 0)
        y: f32[1, 4, 3] = aten.relu(row)
        s: f32[2, 4, 3] = c10d.all_gather_into_tensor(row, 2, "tp")
        d: f32[2, 4, 3] = c10d.wait_tensor(s)
        g: f32[8, 3] = aten.view(d, [8, 3])
        mm: f32[8, 5] = aten.mm(g, w)
        return output("mm", mm), output("y", y)
        """
    )
    assert done.history[0].counts["collective matmuls"] == 1 and "aten.relu(row)" in render(done)


def test_what_is_gathered_is_gathered_again() -> None:
    """The part of the second pipeline is what the first one keeps."""
    done = fused(
        """
        x: f32[4, 3] = input("x")
        w: f32[3, 5] = parameter("w")
        s: f32[8, 3] = c10d.all_gather_into_tensor(x, 2, "tp")
        g: f32[8, 3] = c10d.wait_tensor(s)
        mm: f32[8, 5] = aten.mm(g, w)
        seen: u8[8, 12] = aten.view.dtype(g, u8)
        s2: u8[16, 12] = c10d.all_gather_into_tensor(seen, 2, "tp")
        d2: u8[16, 12] = c10d.wait_tensor(s2)
        g2: f32[16, 3] = aten.view.dtype(d2, f32)
        mm2: f32[16, 5] = aten.mm(g2, w)
        return output("mm", mm), output("mm2", mm2)
        """
    )
    assert done.history[0].counts == {"collective matmuls": 2, "matmuls": 2, "left": 0}


@pytest.mark.parametrize(
    ("rest", "subject", "reason"),
    [
        (
            """
            mm: f32[1024, 512] = aten.mm(g, w)
            f: f32[1024, 512] = aten.relu_(g)
            mm2: f32[1024, 512] = aten.mm(g, w)
            return output("mm", mm), output("mm2", mm2)
            """,
            "s",
            collective_matmul.WRITTEN,
        ),
        (
            'y: f32[1024, 512] = aten.relu(g)\nreturn output("y", y)',
            "s",
            fuse_gathers_into_matmuls.NO_MATMUL,
        ),
        (
            """
            r: f32[1024, 512] = aten.relu(g)
            t: f32[512, 1024] = aten.t(r)
            mm: f32[1024, 1024] = aten.mm(g, t)
            return output("mm", mm)
            """,
            "mm",
            collective_matmul.CYCLE,
        ),
        (
            """
            f: f32[512, 512] = aten.fill_.Scalar(w, 1.0)
            mm: f32[1024, 512] = aten.mm(g, w)
            return update("w", f), output("mm", mm)
            """,
            "mm",
            collective_matmul.WRITTEN,
        ),
        (
            """
            r: f32[1024, 512] = aten.relu(g)
            drawn: f32[512, 512] = aten.rand_like(w)
            mm: f32[1024, 512] = aten.mm(g, drawn)
            return output("mm", mm), output("r", r)
            """,
            "mm",
            collective_matmul.LATER,
        ),
    ],
    ids=["written result", "no matmul", "a cycle", "written memory", "drawn later"],
)
def test_what_cannot_be_is_left_alone(rest: str, subject: str, reason: str) -> None:
    left_alone(START + textwrap.dedent(rest), subject, reason)


def test_a_sum_over_cut_off_rows_is_left_alone() -> None:
    text = """
    x: f32[4, 3] = input("x")
    grad: f32[7, 5] = input("grad")
    s: f32[8, 3] = c10d.all_gather_into_tensor(x, 2, "tp")
    g: f32[8, 3] = c10d.wait_tensor(s)
    cut: f32[7, 3] = aten.slice.Tensor(g, 0, 0, 7)
    t: f32[3, 7] = aten.t(cut)
    mm: f32[3, 5] = aten.mm(t, grad)
    return output("mm", mm)
    """
    assert left_alone(text, "mm", fuse_gathers_into_matmuls.TRIMMED) == "7 of 8"


@pytest.mark.parametrize(
    ("lines", "shape"),
    [
        ('other: f32[7, 3, 5] = input("other")\nmm: f32[7, 2, 5] = aten.bmm(cut, other)', "2, 3"),
        (
            'w: f32[7, 3, 5] = input("w")\nb: f32[7, 1, 5] = input("b")\nmm: f32[7, 2, 5] = aten.baddbmm(b, cut, w)',
            "2, 3",
        ),
        ('w: f32[3, 5] = input("w")\nb: f32[7, 5] = input("b")\nmm: f32[7, 5] = aten.addmm(b, cut, w)', "3"),
    ],
    ids=["batches", "batches and bias", "bias"],
)
def test_what_has_only_the_rows_that_are_left_is_left_alone(lines: str, shape: str) -> None:
    *inputs, matmul = lines.splitlines()
    text = [
        f'x: f32[4, {shape}] = input("x")',
        *inputs,
        f's: f32[8, {shape}] = c10d.all_gather_into_tensor(x, 2, "tp")',
        f"g: f32[8, {shape}] = c10d.wait_tensor(s)",
        f"cut: f32[7, {shape}] = aten.slice.Tensor(g, 0, 0, 7)",
        matmul,
        'return output("mm", mm)',
    ]
    assert left_alone("\n".join(text), "mm", fuse_gathers_into_matmuls.CUT) == "7 of 8"


TWO = """
x: f32[4, 8] = input("x")
y: f32[4, 8] = input("y")
s: f32[8, 8] = c10d.all_gather_into_tensor(x, 2, "tp")
g: f32[8, 8] = c10d.wait_tensor(s)
s2: f32[8, 8] = c10d.all_gather_into_tensor(y, 2, "tp")
g2: f32[8, 8] = c10d.wait_tensor(s2)
"""


def test_a_matmul_of_two_gathered_values_is_part_of_one_pipeline() -> None:
    done = fused(TWO + 'mm: f32[8, 8] = aten.mm(g, g2)\nreturn output("mm", mm)')
    assert render(done).count("all_gather_into_tensor") == 1
    assert said(done)["s2"] == (Outcome.LEFT, fuse_gathers_into_matmuls.BETWEEN)


def test_no_two_pipelines_need_each_other() -> None:
    """Each gathered value is multiplied with the other: were both fusions, neither could come first."""
    done = fused(
        TWO
        + """
mm: f32[8, 8] = aten.mm(g, g2)
mm2: f32[8, 8] = aten.mm(g2, g)
return output("mm", mm), output("mm2", mm2)
"""
    )
    assert done.history[0].counts["collective matmuls"] == 1


def test_what_is_not_faster_is_left_alone_with_its_numbers() -> None:
    text = START.replace("512", "16").replace("1024", "32")
    text += 'mm: f32[32, 16] = aten.mm(g, w)\nreturn output("mm", mm)'
    detail = left_alone(text, "s", collective_matmul.SLOWER, FuseGathersIntoMatmuls(preset("ethernet-1gbit")))
    assert "plain" in detail and "ms" in detail


def test_P6_too_few_rows_are_left_alone() -> None:
    text = """
    x: f32[3, 512] = input("x")
    w: f32[512, 512] = parameter("w")
    s: f32[6, 512] = c10d.all_gather_into_tensor(x, 2, "tp")
    g: f32[6, 512] = c10d.wait_tensor(s)
    mm: f32[6, 512] = aten.mm(g, w)
    return output("mm", mm)
    """
    left_alone(text, "s", collective_matmul.TOO_SMALL, FuseGathersIntoMatmuls(chunks=4))


def test_P6_what_computation_beside_it_hides_is_left_alone_with_its_numbers() -> None:
    """Matmuls that need nothing gathered take longer than the gather travels."""
    aside = "".join(f"a{i}: f32[512, 512] = aten.mm({'w' if not i else f'a{i - 1}'}, w)\n" for i in range(8))
    text = START + aside + 'mm: f32[1024, 512] = aten.mm(g, w)\nreturn output("mm", mm), output("a", a7)'
    detail = left_alone(text, "s", collective_matmul.HIDDEN, FuseGathersIntoMatmuls(preset("ethernet-1gbit")))
    assert re.fullmatch(r"[\d.]+ ms of [\d.]+ ms hidden, a collective matmul would save [\d.]+ ms", detail), detail


def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(PassError, match=r"form='round'.*expected 'auto' or 'chunked'"):
        FuseGathersIntoMatmuls(form="round")
    with pytest.raises(PassError, match="expected at least 1"):
        FuseGathersIntoMatmuls(chunks=0)
