"""Gradients in 16 bits, and named to be sent in 8: which are, which are not and why."""

from __future__ import annotations

import textwrap

import pytest

from crossfade.communicate.narrow_gradients import NarrowGradients
from crossfade.errors import PassError
from crossfade.graph import collectives
from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify

HYBRID = """
    x: f32[64, 128] = input("x")
    l: f32[] = aten.sum(x)
    s: f32[32, 128] = c10d.reduce_scatter_tensor(x, "avg", 2, "dp_shard")
    w: f32[32, 128] = c10d.wait_tensor(s)
    a: f32[32, 128] = c10d.all_reduce(w, "avg", "dp_replicate")
    v: f32[32, 128] = c10d.wait_tensor(a)
    b: f32[] = c10d.all_reduce(l, "avg", "dp_shard")
    u: f32[] = c10d.wait_tensor(b)
    m: f32[64, 128] = c10d.all_reduce(x, "max", "dp_shard")
    y: f32[64, 128] = c10d.wait_tensor(m)
    return gradient("p", v), gradient("one", u), gradient("odd", y), output("x", x)
"""


def narrowed(text: str, *passes: NarrowGradients) -> Program:
    done = run_passes(parse(textwrap.dedent(text), groups={"dp_shard": 2, "dp_replicate": 2, "dp": 2}), passes)
    verify(done, recompute=True)
    return done


def reductions(program: Program) -> list[str]:
    return [f"{c.group} {c.dtype} {c.reduce_op}" for c in collectives.find(program.graph)]


def test_only_the_gradients_of_the_axis_that_is_named() -> None:
    done = narrowed(HYBRID, NarrowGradients("dp_replicate", "float16"))
    assert reductions(done) == [
        "dp_shard torch.float32 avg",
        "dp_replicate torch.float16 avg",
        "dp_shard torch.float32 avg",
        "dp_shard torch.float32 max",
    ]
    assert [str(verdict) for verdict in done.history[0].verdicts] == [
        "a: replaced: sent in float16: 16384 B become 8192"
    ]


def test_each_axis_in_a_form_of_its_own() -> None:
    done = narrowed(HYBRID, NarrowGradients("dp_replicate", "int8"), NarrowGradients("dp_shard"))
    assert reductions(done)[:2] == ["dp_shard torch.bfloat16 avg", "dp_replicate torch.float32 avg:int8"]
    assert [str(verdict) for verdict in done.history[1].verdicts] == [
        "s: replaced: sent in bfloat16: 32768 B become 16384",
        "b: left alone: a single number is nothing to save on",
        "m: left alone: it is neither a sum nor an average",
    ]
    sizes = [collective.bytes for collective in collectives.find(done.graph)]
    assert sizes[:2] == [16384, 4096]  # what travels: two bytes a number, and one


def test_what_is_small_or_narrow_already_stays() -> None:
    text = """
        x: f32[1024] = input("x")
        h: bf16[65536] = input("h")
        s: f32[1024] = c10d.all_reduce(x, "sum", "dp")
        w: f32[1024] = c10d.wait_tensor(s)
        t: bf16[65536] = c10d.all_reduce(h, "sum", "dp")
        v: bf16[65536] = c10d.wait_tensor(t)
        return gradient("p", w), gradient("q", v)
    """
    assert reductions(narrowed(text, NarrowGradients())) == ["dp torch.bfloat16 sum", "dp torch.bfloat16 sum"]
    quantized = narrowed(text, NarrowGradients(dtype="int8"))
    assert reductions(quantized) == ["dp torch.float32 sum", "dp torch.bfloat16 sum:int8"]
    reasons = [verdict.reason for verdict in narrowed(text, NarrowGradients()).history[0].verdicts]
    assert reasons == ["sent in bfloat16", "it is no wider than that"]
    assert [verdict.reason for verdict in quantized.history[0].verdicts] == [
        "it is too small for scales to be worth it",
        "sent in 8 bits, with error feedback",
    ]


def test_a_gradient_is_widened_where_it_is_used() -> None:
    done = narrowed(
        """
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        e: f32[4] = aten.exp(x)
        n: f32[4] = aten.neg(w)
        return gradient("p", w), output("e", e), output("n", n)
        """,
        NarrowGradients(),
    )
    assert (
        render(done)
        == textwrap.dedent("""
        x: f32[4] = input("x")
        _to_copy: bf16[4] = aten._to_copy(x, dtype=bf16)
        s: bf16[4] = c10d.all_reduce(_to_copy, "sum", "dp")
        w: bf16[4] = c10d.wait_tensor(s)
        e: f32[4] = aten.exp(x)
        _to_copy_1: f32[4] = aten._to_copy(w, dtype=f32)
        n: f32[4] = aten.neg(_to_copy_1)
        return gradient("p", _to_copy_1), output("e", e), output("n", n)
        """).strip()
    )


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(PassError, match="expected 'bfloat16' or 'float16' or 'int8'"):
        NarrowGradients(dtype="float8")  # type: ignore[arg-type]
