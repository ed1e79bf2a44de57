"""All-reduces of 16 bits in two halves: where the second starts, what stays whole, and sums in float32 on ranks."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crossfade import Ranks
from crossfade.communicate.lower_all_gathers import LowerAllGathers
from crossfade.communicate.lower_reduce_scatters import LowerReduceScatters
from crossfade.communicate.split_all_reduces import SplitAllReduces
from crossfade.execute.executable import Executable
from crossfade.graph import collectives
from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify


def split(text: str, **options: Any) -> Program:
    done = run_passes(parse(textwrap.dedent(text), groups={"dp": 2, "tp": 0}), [SplitAllReduces(**options)])
    verify(done, recompute=True)
    return done


def test_parts_are_gathered_after_the_next_start_and_padded() -> None:
    done = split("""
        x: bf16[3] = input("x")
        y: bf16[2, 2] = input("y")
        s: bf16[3] = c10d.all_reduce(x, "sum", "dp")
        e: bf16[3] = aten.exp(x)
        t: bf16[2, 2] = c10d.all_reduce(y, "avg", "dp")
        n: bf16[3] = aten.neg(e)
        w: bf16[3] = c10d.wait_tensor(s)
        v: bf16[2, 2] = c10d.wait_tensor(t)
        return output("w", w), output("v", v), output("n", n)
    """)
    assert (
        render(done)
        == textwrap.dedent("""
        x: bf16[3] = input("x")
        y: bf16[2, 2] = input("y")
        constant_pad_nd: bf16[4] = aten.constant_pad_nd(x, [0, 1], 0.0)
        reduce_scatter_tensor: bf16[2] = c10d.reduce_scatter_tensor(constant_pad_nd, "sum", 2, "dp")
        e: bf16[3] = aten.exp(x)
        view: bf16[4] = aten.view(y, [4])
        reduce_scatter_tensor_1: bf16[2] = c10d.reduce_scatter_tensor(view, "avg", 2, "dp")
        wait_tensor: bf16[2] = c10d.wait_tensor(reduce_scatter_tensor)
        all_gather_into_tensor: bf16[4] = c10d.all_gather_into_tensor(wait_tensor, 2, "dp")
        n: bf16[3] = aten.neg(e)
        wait_tensor_1: bf16[4] = c10d.wait_tensor(all_gather_into_tensor)
        slice_1: bf16[3] = aten.slice.Tensor(wait_tensor_1, 0, 0, 3)
        wait_tensor_2: bf16[2] = c10d.wait_tensor(reduce_scatter_tensor_1)
        all_gather_into_tensor_1: bf16[4] = c10d.all_gather_into_tensor(wait_tensor_2, 2, "dp")
        wait_tensor_3: bf16[4] = c10d.wait_tensor(all_gather_into_tensor_1)
        view_1: bf16[2, 2] = aten.view(wait_tensor_3, [2, 2])
        return output("w", slice_1), output("v", view_1), output("n", n)
        """).strip()
    )


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('s: f32[4] = c10d.all_reduce(x, "sum", "dp")', "it is not of 16 bits"),
        ('s: bf16[4] = c10d.all_reduce(h, "sum", "tp")', "its group is not among those to split"),
        ('s: bf16[4] = c10d.all_reduce_(h, "sum", "dp")', "only the plain all-reduce is split"),
    ],
    ids=["wide", "other-group", "in-place"],
)
def test_refusals(line: str, reason: str) -> None:
    kind = line.split(" ")[1]
    text = ['x: f32[4] = input("x")', 'z: bf16[4] = input("z")', "h: bf16[4] = aten.exp(z)", line]
    text += [f"w: {kind} = c10d.wait_tensor(s)", 'return output("w", w)']
    done = split("\n".join(text))
    assert not done.history[0].changed
    assert [verdict.reason for verdict in done.history[0].verdicts] == [reason]


def sums(numel: int, reduce_op: str) -> list[float]:
    """The sum that a rank gets of values that the sum in bfloat16 loses, and that of float32 rounded once."""
    ranks = dist.get_world_size()
    program = parse(
        textwrap.dedent(f"""
        x: bf16[{numel}] = input("x")
        s: bf16[{numel}] = c10d.all_reduce(x, "{reduce_op}", "dp")
        w: bf16[{numel}] = c10d.wait_tensor(s)
        return output("w", w)
        """),
        groups={"dp": ranks},
    )
    done = run_passes(program, [SplitAllReduces(), LowerReduceScatters(), LowerAllGathers()])
    assert not any(c.kind is collectives.Kind.ALL_REDUCE for c in collectives.find(done.graph))
    each = [
        torch.randn(numel, generator=torch.Generator().manual_seed(rank)).bfloat16() + (256 if not rank else 0)
        for rank in range(ranks)
    ]
    (got,) = Executable(done, {"dp": dist.group.WORLD.group_name})([each[dist.get_rank()]])  # type: ignore[union-attr]
    total = torch.stack([value.float() for value in each])
    expected = (total.sum(0) if reduce_op == "sum" else total.mean(0)).bfloat16()
    stepwise = each[0]
    for value in each[1:]:
        stepwise = stepwise + value
    stepwise = stepwise if reduce_op == "sum" else stepwise / ranks
    return [float((got != expected).sum()), float((stepwise != expected).sum())]


@pytest.mark.parametrize(("count", "numel"), [(2, 1001), (4, 1001)])
@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
def test_sums_are_those_of_float32_rounded_once(
    ranks: Callable[[int], Ranks], count: int, numel: int, reduce_op: str
) -> None:
    found = ranks(count).run(sums, numel, reduce_op)
    assert all(wrong == 0 for wrong, _ in found)
    assert count == 2 or all(stepwise > 0 for _, stepwise in found)  # which adding in bfloat16 would not give
