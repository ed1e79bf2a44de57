"""Many small all-reduces become few large ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crossfade.communicate.buckets import BucketPass, CopyIn, shaped
from crossfade.graph import collectives
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.passes import Numerics
from crossfade.graph.program import MADE_FOR

_aten = torch.ops.aten
_COPIES = (_aten.copy_.default, _aten.copy.default)
_HANDS_ON = frozenset({
    _aten._to_copy.default, _aten._unsafe_view.default, _aten.clone.default, _aten.detach.default,
    _aten.div.Tensor, _aten.mul.Tensor, _aten.reshape.default, _aten.t.default, _aten.transpose.int, _aten.view.default,
})  # fmt: skip
"""Ops that pass a gradient on without computing with it; of two operands, one must be a number."""


@dataclass(frozen=True)
class BucketAllReduces(BucketPass):
    """Pack all-reduces of one group, dtype and reduction into buckets of at most `cap_mb`, in the order they are ready.

    The first bucket is small (`first_mb`), so that the network starts early. A bucket starts when its last member is
    ready; what used a result before that comes after it. An all-reduce on whose result another collective depends is
    left alone: delaying it would delay that one. Results are views of the bucket, but for those that the program
    returns, which are copies: results must not share memory. With `only_gradients`, all-reduces are left alone whose
    results the program computes with, instead of returning them or copying them into an input.

    Also known as: XLA's all-reduce-combiner, DDP's buckets (`bucket_cap_mb`), Megatron's `--ddp-bucket-size`.

    Before:
        a: f32[2] = input("a")
        b: f32[3, 1] = input("b")
        s: f32[2] = c10d.all_reduce(a, "avg", "dp")
        w: f32[2] = c10d.wait_tensor(s)
        neg: f32[2] = aten.neg(w)
        s2: f32[3, 1] = c10d.all_reduce(b, "avg", "dp")
        w2: f32[3, 1] = c10d.wait_tensor(s2)
        return output("a", neg), output("b", w2)

    After:
        a: f32[2] = input("a")
        b: f32[3, 1] = input("b")
        view: f32[3] = aten.view(b, [-1])
        cat: f32[5] = aten.cat([a, view])
        all_reduce: f32[5] = c10d.all_reduce(cat, "avg", "dp")
        wait_tensor: f32[5] = c10d.wait_tensor(all_reduce)
        split_with_sizes: (f32[2], f32[3]) = aten.split_with_sizes(wait_tensor, [2, 3])
        getitem: f32[2] = split_with_sizes[0]
        getitem_1: f32[3] = split_with_sizes[1]
        view_1: f32[3, 1] = aten.view(getitem_1, [3, 1])
        neg: f32[2] = aten.neg(getitem)
        clone: f32[3, 1] = aten.clone(view_1)
        return output("a", neg), output("b", clone)
    """

    name = "bucket-all-reduces"
    numerics = Numerics.REASSOCIATES  # a ring splits a bucket at other places than it splits its members
    provides = frozenset({"bucketed"})
    kind = Kind.ALL_REDUCE
    delay = "uses of the last"

    first_mb: float | None = 1.0
    only_gradients: bool = False

    def reason_against(self, collective: Collective) -> str | None:
        """With `only_gradients`, what is computed with instead of being handed out."""
        if self.only_gradients and not _is_gradient(collective):
            return "it is no gradient's: its result is computed with"
        return None

    def exchange(self, members: Sequence[Collective], copy_in: CopyIn) -> Callable[..., list[Tensor]]:
        """One all-reduce of all."""
        group, reduce_op = members[0].group, str(members[0].reduce_op)

        def exchange(*values: Tensor) -> list[Tensor]:
            if copy_in.mode == "coalesced":
                return [collectives.wait(value) for value in collectives.all_reduce_coalesced(values, reduce_op, group)]
            done = collectives.wait(collectives.all_reduce(copy_in(values), reduce_op, group))
            parts = done.split([value.numel() for value in values])
            return [shaped(part, *value.shape) for part, value in zip(parts, values, strict=True)]

        return exchange


def _is_gradient(collective: Collective) -> bool:
    """Whether a result is only scaled, viewed or converted on its way to a graph output or a copy into an input."""
    if MADE_FOR in collective.node.meta:
        return True
    stack = [user for wait in collective.waits for user in wait.users]
    while stack:
        user = stack.pop()
        copied_out = user.target in _COPIES and user.args[0].op == "placeholder"  # type: ignore[union-attr]
        if user.op == "output" or copied_out:
            continue
        if user.target not in _HANDS_ON or len(user.all_input_nodes) != 1:
            return False
        stack += user.users
    return True
