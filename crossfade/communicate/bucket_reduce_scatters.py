"""Many small reduce-scatters become few large ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from crossfade.communicate.buckets import BucketPass, CopyIn, shaped
from crossfade.graph import collectives
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.passes import Numerics


@dataclass(frozen=True)
class BucketReduceScatters(BucketPass):
    """Pack reduce-scatters of one group, dtype and reduction into buckets whose input is at most `cap_mb`.

    Each rank's parts are laid side by side, so that the bucket scatters exactly what its members would have; one copy
    goes in, and results are views of the bucket, but for those that the program returns. What used a result before the
    bucket starts comes after it, unless that would delay another collective.

    Also known as: XLA's reduce-scatter-combiner, Inductor's bucket_reduce_scatter, DeepSpeed's `reduce_bucket_size`.

    Before:
        a: f32[4] = input("a")
        b: f32[2, 3] = input("b")
        s: f32[2] = c10d.reduce_scatter_tensor(a, "sum", 2, "dp")
        w: f32[2] = c10d.wait_tensor(s)
        s2: f32[1, 3] = c10d.reduce_scatter_tensor(b, "sum", 2, "dp")
        w2: f32[1, 3] = c10d.wait_tensor(s2)
        neg: f32[2] = aten.neg(w)
        return output("a", neg), output("b", w2)

    After:
        a: f32[4] = input("a")
        b: f32[2, 3] = input("b")
        view: f32[2, 2] = aten.view(a, [2, -1])
        view_1: f32[2, 3] = aten.view(b, [2, -1])
        cat: f32[2, 5] = aten.cat([view, view_1], 1)
        view_2: f32[10] = aten.view(cat, [-1])
        reduce_scatter_tensor: f32[5] = c10d.reduce_scatter_tensor(view_2, "sum", 2, "dp")
        wait_tensor: f32[5] = c10d.wait_tensor(reduce_scatter_tensor)
        split_with_sizes: (f32[2], f32[3]) = aten.split_with_sizes(wait_tensor, [2, 3])
        getitem: f32[2] = split_with_sizes[0]
        getitem_1: f32[3] = split_with_sizes[1]
        view_3: f32[1, 3] = aten.view(getitem_1, [1, 3])
        neg: f32[2] = aten.neg(getitem)
        clone: f32[1, 3] = aten.clone(view_3)
        return output("a", neg), output("b", clone)
    """

    name = "bucket-reduce-scatters"
    numerics = Numerics.REASSOCIATES  # a ring splits a bucket at other places than it splits its members
    provides = frozenset({"bucketed"})
    kind = Kind.REDUCE_SCATTER
    delay = "no collective"

    first_mb: float | None = 1.0

    def exchange(self, members: Sequence[Collective], copy_in: CopyIn) -> Callable[..., list[Tensor]]:
        """One reduce-scatter of all."""
        group, ranks, reduce_op = members[0].group, members[0].group_size or 1, str(members[0].reduce_op)

        def exchange(*values: Tensor) -> list[Tensor]:
            if copy_in.mode == "coalesced":
                started = collectives.reduce_scatter_coalesced(values, reduce_op, ranks, group)
                return [collectives.wait(value) for value in started]
            done = collectives.wait(collectives.reduce_scatter(copy_in(values, ranks), reduce_op, ranks, group))
            parts = done.split([value.numel() // ranks for value in values])
            return [
                shaped(part, value.shape[0] // ranks, *value.shape[1:])
                for part, value in zip(parts, values, strict=True)
            ]

        return exchange
