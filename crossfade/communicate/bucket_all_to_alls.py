"""Many small all-to-alls become few large ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from crossfade.communicate.bucket_all_gathers import as_bytes, by_member
from crossfade.communicate.buckets import BucketPass, CopyIn
from crossfade.graph import collectives
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.passes import Numerics


@dataclass(frozen=True)
class BucketAllToAlls(BucketPass):
    """Pack all-to-alls of one group into buckets of at most `cap_mb`: the tokens that go to experts with their weights
    and positions.

    Each rank's parts are laid side by side, so that one exchange carries them; one copy goes in and one comes out for
    each member. With `mixed_dtypes`, all dtypes of a group travel together, as bytes. Only equal parts for every rank
    are packed. A bucket starts when its last member is ready. On most of them other collectives depend, such as the way
    back from the experts: these are packed only with what is ready at the same place.

    Also known as: XLA's all-to-all combiner; DeepEP and Tutel dispatch tokens and weights in one call.

    Before:
        a: f32[4] = input("a")
        b: f32[2, 3] = input("b")
        s: f32[4] = c10d.all_to_all_single(a, [2, 2], [2, 2], "dp")
        t: f32[2, 3] = c10d.all_to_all_single(b, [1, 1], [1, 1], "dp")
        w: f32[4] = c10d.wait_tensor(s)
        v: f32[2, 3] = c10d.wait_tensor(t)
        return output("a", w), output("b", v)

    After:
        a: f32[4] = input("a")
        b: f32[2, 3] = input("b")
        view: f32[2, 2] = aten.view(a, [2, -1])
        view_1: f32[2, 3] = aten.view(b, [2, -1])
        cat: f32[2, 5] = aten.cat([view, view_1], 1)
        view_2: f32[10] = aten.view(cat, [-1])
        all_to_all_single: f32[10] = c10d.all_to_all_single(view_2, [5, 5], [5, 5], "dp")
        wait_tensor: f32[10] = c10d.wait_tensor(all_to_all_single)
        view_3: f32[2, 5] = aten.view(wait_tensor, [2, -1])
        split_with_sizes: (f32[2, 2], f32[2, 3]) = aten.split_with_sizes(view_3, [2, 3], 1)
        getitem: f32[2, 2] = split_with_sizes[0]
        getitem_1: f32[2, 3] = split_with_sizes[1]
        clone: f32[2, 2] = aten.clone(getitem, memory_format=contiguous_format)
        clone_1: f32[2, 3] = aten.clone(getitem_1, memory_format=contiguous_format)
        view_4: f32[4] = aten.view(clone, [4])
        return output("a", view_4), output("b", clone_1)
    """

    name = "bucket-all-to-alls"
    numerics = Numerics.BITWISE
    provides = frozenset({"bucketed"})
    kind = Kind.ALL_TO_ALL
    delay = "uses of the last"
    results_are_views = False

    mixed_dtypes: bool = False

    def mixes_dtypes(self) -> bool:
        """Bytes are bytes."""
        return self.mixed_dtypes and self.mode != "coalesced"

    def reason_against(self, collective: Collective) -> str | None:
        """Parts of different sizes lie at other places in every row."""
        if self.mode == "coalesced":
            return "torch has no all-to-all of lists"
        if collectives.equal_parts(collective.node) is None:
            return "its parts differ in size, or are not known before it runs"
        return None

    def exchange(self, members: Sequence[Collective], copy_in: CopyIn) -> Callable[..., list[Tensor]]:
        """One exchange of all; each rank's parts arrive together, and are sorted by member."""
        group, ranks = members[0].group, collectives.equal_parts(members[0].node) or 1
        dtypes = [member.dtype for member in members]
        mixed = len(set(dtypes)) > 1

        def exchange(*values: Tensor) -> list[Tensor]:
            parts = as_bytes(values, dtypes) if mixed else values
            done = collectives.wait(collectives.all_to_all(copy_in(parts, ranks), ranks, group))
            arrived = by_member(done, ranks, [part.numel() // ranks for part in parts], copy_in)
            arrived = [each.view(dtype) for each, dtype in zip(arrived, dtypes, strict=True)] if mixed else arrived
            return [
                each if each.shape == value.shape else each.view(value.shape)
                for each, value in zip(arrived, values, strict=True)
            ]

        return exchange
