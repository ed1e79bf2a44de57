"""Many small all-reduces become few large ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from crossfade.communicate.buckets import MB, BucketPlan, apply_buckets, bucket_result, flat, plan_buckets
from crossfade.graph import collectives
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.passes import Numerics, Pass, PassResult
from crossfade.graph.program import Program


@dataclass(frozen=True)
class BucketAllReduces(Pass):
    """Pack all-reduces of one group, dtype and reduction into buckets of at most `cap_mb`, in the order they are ready.

    The first bucket is small (`first_mb`), so that the network starts early. An all-reduce on whose result another
    collective depends is left alone: delaying it would delay that one. Results are views of the bucket, but for those
    that the program returns, which are copies: results must not share memory.

    Before:
        a: f32[2] = input("a")
        b: f32[3] = input("b")
        s: f32[2] = c10d.all_reduce(a, "avg", "dp")
        w: f32[2] = c10d.wait_tensor(s)
        s2: f32[3] = c10d.all_reduce(b, "avg", "dp")
        w2: f32[3] = c10d.wait_tensor(s2)
        neg: f32[2] = aten.neg(w)
        return output("a", neg), output("b", w2)

    After:
        a: f32[2] = input("a")
        b: f32[3] = input("b")
        view: f32[2] = aten.view(a, [-1])
        view_1: f32[3] = aten.view(b, [-1])
        cat: f32[5] = aten.cat([view, view_1])
        all_reduce: f32[5] = c10d.all_reduce(cat, "avg", "dp")
        wait_tensor: f32[5] = c10d.wait_tensor(all_reduce)
        split_with_sizes: (f32[2], f32[3]) = aten.split_with_sizes(wait_tensor, [2, 3])
        getitem: f32[2] = split_with_sizes[0]
        getitem_1: f32[3] = split_with_sizes[1]
        view_2: f32[2] = aten.view(getitem, [2])
        view_3: f32[3] = aten.view(getitem_1, [3])
        neg: f32[2] = aten.neg(view_2)
        clone: f32[3] = aten.clone(view_3)
        return output("a", neg), output("b", clone)
    """

    name = "bucket-all-reduces"
    numerics = Numerics.REASSOCIATES  # a ring splits a bucket at other places than it splits its members
    provides = frozenset({"bucketed"})

    cap_mb: float = 2.0
    first_mb: float = 1.0

    def run(self, program: Program) -> PassResult:
        """Plan, then apply."""
        plan = self.plan(program)
        return bucket_result(plan, apply_buckets(program, plan, _exchange))

    def plan(self, program: Program) -> BucketPlan:
        """Choose the buckets; pure."""
        cap, first = int(self.cap_mb * MB), int(self.first_mb * MB)
        return plan_buckets(program, Kind.ALL_REDUCE, cap=cap, first=first, may_delay=True)


def _exchange(members: list[Collective]) -> Callable[..., list[Tensor]]:
    group, reduce_op = members[0].group, str(members[0].reduce_op)

    def exchange(*values: Tensor) -> list[Tensor]:
        packed = torch.cat([flat(value) for value in values])
        done = collectives.wait(collectives.all_reduce(packed, reduce_op, group))
        parts = done.split([value.numel() for value in values])
        return [part.view(value.shape) for part, value in zip(parts, values, strict=True)]

    return exchange
