"""Many small all-gathers become few large ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crossfade.communicate.buckets import BucketPass, CopyIn, flat
from crossfade.graph import collectives, packing
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.passes import Numerics


@dataclass(frozen=True)
class BucketAllGathers(BucketPass):
    """Pack all-gathers of one group and dtype into buckets whose gathered size is at most `cap_mb`.

    A bucket starts where its first member would have started, so the first result is not delayed by more than the
    bucket's own time; later members arrive earlier than they would have, and are held until used. One copy goes in and
    one comes out for each member. With `mixed_dtypes`, all dtypes of a group travel together, as bytes.

    Also known as: XLA's all-gather-combiner, Inductor's bucket_all_gather, DeepSpeed's `allgather_bucket_size`.

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
        view: f32[3] = aten.view(b, [-1])
        cat: f32[5] = aten.cat([a, view])
        all_gather_into_tensor: f32[10] = c10d.all_gather_into_tensor(cat, 2, "dp")
        wait_tensor: f32[10] = c10d.wait_tensor(all_gather_into_tensor)
        view_1: f32[2, 5] = aten.view(wait_tensor, [2, -1])
        split_with_sizes: (f32[2, 2], f32[2, 3]) = aten.split_with_sizes(view_1, [2, 3], 1)
        getitem: f32[2, 2] = split_with_sizes[0]
        getitem_1: f32[2, 3] = split_with_sizes[1]
        clone: f32[2, 2] = aten.clone(getitem, memory_format=contiguous_format)
        clone_1: f32[2, 3] = aten.clone(getitem_1, memory_format=contiguous_format)
        view_2: f32[4] = aten.view(clone, [4])
        view_3: f32[2, 3] = aten.view(clone_1, [2, 3])
        neg: f32[4] = aten.neg(view_2)
        return output("a", neg), output("b", view_3)
    """

    name = "bucket-all-gathers"
    numerics = Numerics.BITWISE
    provides = frozenset({"bucketed"})
    kind = Kind.ALL_GATHER
    delay = "no use"
    results_are_views = False

    mixed_dtypes: bool = False

    def mixes_dtypes(self) -> bool:
        """Bytes are bytes; but backends want the tensors of a list to be of one dtype."""
        return self.mixed_dtypes and self.mode != "coalesced"

    def reason_against(self, collective: Collective) -> str | None:
        """A single number has no dim to gather along."""
        return "it has no dim to gather along" if collective.inputs[0].meta["val"].dim() == 0 else None

    def exchange(self, members: Sequence[Collective], copy_in: CopyIn) -> Callable[..., list[Tensor]]:
        """One all-gather of all; each rank's parts arrive together, and are sorted by member."""
        group, ranks = members[0].group, members[0].group_size or 1
        dtypes = [member.dtype for member in members]
        mixed = len(set(dtypes)) > 1

        def exchange(*values: Tensor) -> list[Tensor]:
            if copy_in.mode == "coalesced":
                started = collectives.all_gather_coalesced(values, ranks, group)
                return [collectives.wait(value) for value in started]
            parts = as_bytes(values, dtypes) if mixed else values
            done = collectives.wait(collectives.all_gather(copy_in(parts), ranks, group))
            gathered = by_member(done, ranks, [part.numel() for part in parts], copy_in)
            gathered = [g.view(dtype) for g, dtype in zip(gathered, dtypes, strict=True)] if mixed else gathered
            return [
                table.view(ranks * value.shape[0], *value.shape[1:])
                for table, value in zip(gathered, values, strict=True)
            ]

        return exchange


def as_bytes(values: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Each member's bytes; what is converted on the way is converted by one copy for all of a dtype."""
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(dtypes):
        mine = [place for place, given in enumerate(dtypes) if given == dtype]
        converted = [place for place in mine if values[place].dtype != dtype]
        if converted:
            packed = packing.pack([values[place] for place in converted], dtype=dtype)
            parts = packed.split([values[place].numel() for place in converted])
            found |= dict(zip(converted, parts, strict=True))
    return [found.get(place, flat(value)).view(torch.uint8) for place, value in enumerate(values)]


def by_member(done: Tensor, ranks: int, sizes: list[int], copy_in: CopyIn) -> list[Tensor]:
    """What all ranks sent of each member, as a contiguous copy of one row a rank."""
    if copy_in.mode == "copy-kernel":
        return packing.unpack(done, ranks, sizes)
    parts = done.view(ranks, -1).split(sizes, dim=1)
    return [part.clone(memory_format=torch.contiguous_format) for part in parts]
