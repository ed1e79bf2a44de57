"""Pointwise calls on gathered values: spellings of the gather, refusals, bits."""

from __future__ import annotations

import textwrap

import pytest
import torch

from crossfade.communicate.compute_before_gathering import ComputeBeforeGathering
from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify
from tests.communicate.all_ranks import drawn, run_all


def moved(text: str) -> Program:
    done = run_passes(parse(textwrap.dedent(text), groups={"dp": 2}), [ComputeBeforeGathering()])
    verify(done, recompute=True)
    return done


SPLIT_AND_CAT = """
    x: f32[3, 4] = input("x")
    s: f32[6, 4] = c10d.all_gather_into_tensor(x, 2, "dp")
    w: f32[6, 4] = c10d.wait_tensor(s)
    p: (f32[3, 4], f32[3, 4]) = aten.split.Tensor(w, 3)
    a: f32[3, 4] = p[0]
    b: f32[3, 4] = p[1]
    c: f32[3, 8] = aten.cat([a, b], 1)
    m: f32[3, 8] = aten.mul.Tensor(c, 0.5)
    r: bf16[3, 8] = aten._to_copy(m, dtype=bf16)
    return output("r", r)
"""


def test_parts_that_are_put_together_along_another_dim() -> None:
    done = moved(SPLIT_AND_CAT)
    assert (
        render(done)
        == textwrap.dedent("""
        x: f32[3, 4] = input("x")
        mul: f32[3, 4] = aten.mul.Tensor(x, 0.5)
        _to_copy: bf16[3, 4] = aten._to_copy(mul, dtype=bf16)
        s: bf16[6, 4] = c10d.all_gather_into_tensor(_to_copy, 2, "dp")
        w: bf16[6, 4] = c10d.wait_tensor(s)
        p: (bf16[3, 4], bf16[3, 4]) = aten.split.Tensor(w, 3)
        a: bf16[3, 4] = p[0]
        b: bf16[3, 4] = p[1]
        c: bf16[3, 8] = aten.cat([a, b], 1)
        return output("r", c)
        """).strip()
    )
    assert done.history[0].counts == {"moved": 2, "left": 0}
    assert [str(verdict) for verdict in done.history[0].verdicts] == [
        "m: moved: each rank makes it on its part: 96 bytes gathered become 96",
        "r: moved: each rank makes it on its part: 96 bytes gathered become 48",
    ]


VIEW_AND_PERMUTE = """
    x: f32[3, 4] = input("x")
    s: f32[6, 4] = c10d.all_gather_into_tensor(x, 2, "dp")
    w: f32[6, 4] = c10d.wait_tensor(s)
    v: f32[2, 3, 4] = aten.view(w, [2, 3, 4])
    p: f32[3, 2, 4] = aten.permute(v, [1, 0, 2])
    c: f32[3, 2, 4] = aten.clone(p, memory_format=contiguous_format)
    f: f32[3, 8] = aten.view(c, [3, 8])
    t: f32[3, 7] = aten.slice.Tensor(f, 1, 0, 7)
    k: f32[3, 7] = aten.clone(t, memory_format=contiguous_format)
    r: f32[3, 7] = aten.silu(k)
    return output("r", r)
"""
AT_ONCE = """
    x: f32[3, 4] = input("x")
    s: f32[6, 4] = c10d.all_gather_into_tensor(x, 2, "dp")
    w: f32[6, 4] = c10d.wait_tensor(s)
    r: f16[6, 4] = aten._to_copy(w, dtype=f16)
    q: f16[6, 4] = aten.mul.Tensor(r, r)
    return output("q", q)
"""


@pytest.mark.parametrize("text", [SPLIT_AND_CAT, VIEW_AND_PERMUTE, AT_ONCE])
def test_bit_for_bit(text: str) -> None:
    done = moved(text)
    assert done.history[0].changed
    before, after = (
        run_all(program, 2, drawn(lambda _: False))
        for program in (parse(textwrap.dedent(text), groups={"dp": 2}), done)
    )
    assert all(torch.equal(a, b) for a, b in zip(before[0] + before[1], after[0] + after[1], strict=True))


GATHERED = """
    x: f32[3, 4] = input("x")
    s: f32[6, 4] = c10d.all_gather_into_tensor(x, 2, "dp")
    w: f32[6, 4] = c10d.wait_tensor(s)
"""
LEFT = {
    "another use": (
        "y = aten.relu(w)\n    z = aten.exp(w)\n    q = aten.add.Tensor(y, z)",
        "the gathered value has another use",
        "2 uses",
    ),
    "larger": ("q = aten._to_copy(w, dtype=f64)", "more bytes would travel", "96 would become 192"),
    "layout": (
        "p = aten.slice.Tensor(w, 1, 0, 3)\n    q = aten.relu(p)",
        "its layout in memory would change",
        "strides [3, 1] would become [4, 1]",
    ),
    "written": (
        "q = aten.relu(w)\n    o = aten.add_.Tensor(q, 1.0)",
        "memory that it reads or makes is written in place",
        "",
    ),
    "two operands": ("e = aten.exp(x)\n    n = aten.cat([e, e])\n    q = aten.add.Tensor(w, n)", None, ""),
    "a part read": (
        "p = aten.split.Tensor(w, 3)\n    a = p[0]\n    b = p[1]\n    c = aten.cat([a, b], 1)\n"
        "    e = aten.exp(c)\n    f = aten.cat([a, a], 1)\n    q = aten.add.Tensor(e, f)",
        None,
        "",
    ),
    "random": ("q = aten.bernoulli.p(w, 0.5)", None, ""),
    "a pointwise call on a sum": ("m = aten.sum.dim_IntList(w, [0])\n    q = aten.relu(m)", None, ""),
}


@pytest.mark.parametrize("name", LEFT)
def test_left(name: str) -> None:
    made, reason, detail = LEFT[name]
    done = moved(f"{GATHERED}    {made}\n    return output('q', q)".replace("'", '"'))
    assert not done.history[0].changed
    expected = [(reason, detail)] if reason is not None else []
    assert [(verdict.reason, verdict.detail) for verdict in done.history[0].verdicts] == expected


def test_what_travels_as_bytes_is_left() -> None:
    done = moved("""
        x: f32[3, 4] = input("x")
        b: u8[3, 16] = aten.view.dtype(x, u8)
        s: u8[6, 16] = c10d.all_gather_into_tensor(b, 2, "dp")
        w: u8[6, 16] = c10d.wait_tensor(s)
        v: f32[6, 4] = aten.view.dtype(w, f32)
        q: f32[6, 4] = aten.relu(v)
        return output("q", q)
    """)
    assert [str(verdict) for verdict in done.history[0].verdicts] == [
        "q: left alone: what travels is of another dtype: torch.uint8, read as torch.float32"
    ]


def test_a_call_that_stays_stops_those_behind_it() -> None:
    done = moved(f"""{GATHERED}
    a: f32[6, 4] = aten.relu(w)
    b: f64[6, 4] = aten._to_copy(a, dtype=f64)
    c: bf16[6, 4] = aten._to_copy(b, dtype=bf16)
    return output("c", c)
    """)
    assert [(verdict.subject, verdict.outcome.value) for verdict in done.history[0].verdicts] == [
        ("a", "moved"),
        ("b", "left alone"),
    ]
