"""Many small all-gathers become few large ones."""

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
class BucketAllGathers(Pass):
    """Pack all-gathers of one group and dtype into buckets whose gathered size is at most `cap_mb`.

    A bucket starts where its first member would have started, so the first result is not delayed by more than the
    bucket's own time; later members arrive earlier than they would have, and are held until used. One copy goes in and
    one comes out for each member.

    Before:
        a: f32[2] = input("a")
        b: f32[1, 3] = input("b")
        s: f32[4] = c10d.all_gather_into_tensor(a, 2, "dp")
        w: f32[4] = c10d.wait_tensor(s)
        neg: f32[4] = aten.neg(w)
        s2: f32[2, 3] = c10d.all_gather_into_tensor(b, 2, "dp")
        w2: f32[2, 3] = c10d.wait_tensor(s2)
        return output("a", neg), output("b", w2)

    After:
        a: f32[2] = input("a")
        b: f32[1, 3] = input("b")
        view: f32[2] = aten.view(a, [-1])
        view_1: f32[3] = aten.view(b, [-1])
        cat: f32[5] = aten.cat([view, view_1])
        all_gather_into_tensor: f32[10] = c10d.all_gather_into_tensor(cat, 2, "dp")
        wait_tensor: f32[10] = c10d.wait_tensor(all_gather_into_tensor)
        view_2: f32[2, 5] = aten.view(wait_tensor, [2, -1])
        split_with_sizes: (f32[2, 2], f32[2, 3]) = aten.split_with_sizes(view_2, [2, 3], 1)
        getitem: f32[2, 2] = split_with_sizes[0]
        getitem_1: f32[2, 3] = split_with_sizes[1]
        clone: f32[2, 2] = aten.clone(getitem, memory_format=contiguous_format)
        view_3: f32[4] = aten.view(clone, [4])
        clone_1: f32[2, 3] = aten.clone(getitem_1, memory_format=contiguous_format)
        view_4: f32[2, 3] = aten.view(clone_1, [2, 3])
        neg: f32[4] = aten.neg(view_3)
        return output("a", neg), output("b", view_4)
    """

    name = "bucket-all-gathers"
    numerics = Numerics.BITWISE
    provides = frozenset({"bucketed"})

    cap_mb: float = 2.0

    def run(self, program: Program) -> PassResult:
        """Plan, then apply."""
        plan = self.plan(program)
        return bucket_result(plan, apply_buckets(program, plan, _exchange))

    def plan(self, program: Program) -> BucketPlan:
        """Choose the buckets; pure."""
        cap = int(self.cap_mb * MB)
        return plan_buckets(program, Kind.ALL_GATHER, cap=cap, first=cap, may_delay=False)


def _exchange(members: list[Collective]) -> Callable[..., list[Tensor]]:
    group, ranks = members[0].group, members[0].group_size or 1

    def exchange(*values: Tensor) -> list[Tensor]:
        packed = torch.cat([flat(value) for value in values])
        done = collectives.wait(collectives.all_gather(packed, ranks, group))
        parts = done.view(ranks, -1).split([value.numel() for value in values], dim=1)
        return [
            part.clone(memory_format=torch.contiguous_format).view(ranks * value.shape[0], *value.shape[1:])
            for part, value in zip(parts, values, strict=True)
        ]

    return exchange
