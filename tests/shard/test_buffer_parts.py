"""How updated buffers follow from parts of a batch, found in small programs; and what ranks then exchange."""

from __future__ import annotations

import textwrap

import pytest

from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify
from crossfade.shard.average_buffers import AverageBuffers
from crossfade.shard.buffer_parts import with_buffer_parts
from crossfade.shard.loss_parts import LossParts, find_loss_parts

HEAD = """
    b: f32[3] = buffer("b")
    x: f32[{n}, 3] = input("x")
    loss: f32[] = aten.mean(x)
"""


def after(body: str) -> tuple[Program, LossParts]:
    """A program that updates b to `new`, as one of two ranks runs it, and what was found."""
    text = textwrap.dedent(HEAD) + body + '\nreturn loss("loss", loss), update("b", new)'
    small, large = (parse(text.replace("{n}", str(size)), groups={"dp": 2}) for size in (4, 8))
    parts = find_loss_parts(small, large, 2, [])
    parts = with_buffer_parts(parts, small, large, 2, micro_batches=False)
    done = run_passes(small, [AverageBuffers(unproved=parts.buffers)])
    verify(done, recompute=True)
    return done, parts


SUM, MEAN = "s: f32[3] = aten.sum.dim_IntList(x, [0])\n", "s: f32[3] = aten.mean.dim(x, [0])\n"
PROVED = {
    "a sum": (SUM + "new: f32[3] = aten.add.Tensor(b, s)", 'all_reduce(s, "sum", "dp")'),
    "a decaying sum": (
        SUM + "o: f32[3] = aten.mul.Tensor(b, 0.9)\nnew: f32[3] = aten.add.Tensor(o, s, alpha=0.1)",
        'all_reduce(s, "sum", "dp")',
    ),
    "a sum divided by the batch": (
        SUM + "m: f32[3] = aten.div.Tensor(s, {n})\nnew: f32[3] = aten.add.Tensor(b, m)",
        'all_reduce(new, "avg", "dp")',
    ),
    "a mean": (MEAN + "new: f32[3] = aten.add.Tensor(b, s)", 'all_reduce(new, "avg", "dp")'),
    "a function of a mean": (
        MEAN + "r: f32[3] = aten.sqrt(s)\nnew: f32[3] = aten.add.Tensor(b, r)",
        'all_reduce(s, "avg", "dp")',
    ),
    "a sum alone": (SUM + "new: f32[3] = aten.mul.Tensor(s, 2)", 'all_reduce(new, "sum", "dp")'),
    "a largest": (
        "s: f32[3] = aten.amax(x, [0])\nnew: f32[3] = aten.maximum(b, s)",
        'all_reduce(s, "max", "dp")',
    ),
    "a smallest, with its place": (
        "p: (f32[3], i64[3]) = aten.min.dim(x, 0)\ns: f32[3] = p[0]\nnew: f32[3] = aten.minimum(b, s)",
        'all_reduce(s, "min", "dp")',
    ),
    "a product over samples": (
        "t: f32[3, {n}] = aten.permute(x, [1, 0])\ns: f32[3, 3] = aten.mm(t, x)\nd: f32[3] = aten.diagonal(s)\n"
        "new: f32[3] = aten.add.Tensor(b, d)",
        'all_reduce(s, "sum", "dp")',
    ),
    "the number of samples": ("new: f32[3] = aten.add.Tensor(b, {n})", "aten.add.Tensor(b, 8)"),
    "the number of steps": ("new: f32[3] = aten.add.Tensor(b, 1)", "aten.add.Tensor(b, 1)"),
}


@pytest.mark.parametrize("name", PROVED)
def test_what_is_taken_over_ranks(name: str) -> None:
    body, expected = PROVED[name]
    done, parts = after(body)
    assert parts.buffers == () and expected in render(done)
    assert render(done).count("all_reduce(") == ("all_reduce" in expected)


UNPROVED = {
    "a queue": (
        "s: f32[1, 3] = aten.slice.Tensor(x, 0, 0, 1)\nnew: f32[3] = aten.select.int(s, 0, 0)",
        "b: s (slice.Tensor) takes samples of one part by their places",
    ),
    "a variance": (
        "new: f32[3] = aten.var.correction(x, [0])",
        "b: new (var.correction) reduces the samples of one part",
    ),
    "a power": (
        "new: f32[3] = aten.pow.Tensor_Scalar(b, {n})",
        "b: new (pow.Tensor_Scalar) uses a number that grows with the batch",
    ),
    "a step by the batch": (
        SUM + "new: f32[3] = aten.add.Tensor(b, s, alpha={n})",
        "b: new (add.Tensor) uses a number that grows with the batch",
    ),
}


@pytest.mark.parametrize("name", UNPROVED)
def test_what_is_not_known_is_said(name: str) -> None:
    body, reason = UNPROVED[name]
    done, parts = after(body)
    assert parts.buffers == (reason,)
    assert reason in str(done.history[-1].verdicts[-1])
