"""Buckets of CUDA tensors: packed by the kernel, divided and converted on the way, on two gloo ranks of one GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

import crossfade as cf
from crossfade.communicate.bucket_all_reduces import BucketAllReduces
from crossfade.graph import collectives

pytestmark = pytest.mark.gpu


def reduced_in_buckets(mode: str) -> tuple[list[bool], list[str]]:
    """Whether each result is bitwise what it was without buckets, and how the bucket was packed."""
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]

    def exchange(values: list[torch.Tensor]) -> list[torch.Tensor]:
        halves = [(value / 2).to(torch.bfloat16) for value in values]
        return [collectives.wait(collectives.all_reduce(half, "sum", group)) for half in halves]

    generator = torch.Generator().manual_seed(dist.get_rank())
    shapes = [(1,), (3, 5), (1000, 1000), (7, 1), (64, 64)]
    values = [torch.randint(-8, 8, shape, generator=generator).float().cuda() for shape in shapes]
    module = make_fx(exchange)(values)
    done = cf.optimize(module, passes=[BucketAllReduces(cap_mb=64.0, first_mb=64.0, mode=mode)], groups={group: 2})  # type: ignore[arg-type]
    same = [torch.equal(a, b) for a, b in zip(module(values), done.module(values), strict=True)]
    return same, sorted({verdict.detail.partition(", by ")[2] for verdict in done.report.records[0].verdicts})


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("mode", "how"),
    [
        ("auto", "copy-kernel, converted to bfloat16, divided by 2"),
        ("copy-kernel", "copy-kernel, converted to bfloat16, divided by 2"),
        ("concat", "concat"),
    ],
)
def test_reductions(ranks: Any, mode: str, how: str) -> None:
    assert ranks(2).run(reduced_in_buckets, mode) == [([True] * 5, [how])] * 2
