"""A model's state that a plan has split over the ranks of an axis: as this rank's parts, as DTensors, and whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from crossfade.errors import StateError
from crossfade.graph.private import group_named
from crossfade.shard.tensor.placements import REPLICATE, Placement, Shard, block_sizes, local_size, whole_size
from crossfade.shard.tensor.sources import local_part, own_ranges, padded


@dataclass(frozen=True)
class Parts:
    """How the tensors of a state lie over an axis, by name, and the way between a part and the whole.

    What is made of parts asks all ranks of the axis to take part; `group` is the name of their process group.

        >>> split, tied = {"up.weight": Shard(0)}, {"tied.weight": "up.weight"}
        >>> parts = Parts(split, tied, axis="tp", group="", rank=1, ranks=2, device="cpu")
        >>> parts.part("tied.weight", torch.arange(4))
        tensor([2, 3])
        >>> parts.whole_shape("up.weight", (2, 8)), parts.is_split("up.bias")
        ((4, 8), False)
    """

    placements: Mapping[str, Placement]
    aliases: Mapping[str, str]
    """The other names of tied tensors, with the one that `placements` has."""
    axis: str
    group: str
    rank: int
    ranks: int
    device: str

    def placement(self, name: str) -> Placement:
        """Of a parameter or buffer, by any of its names."""
        return self.placements.get(self.aliases.get(name, name), REPLICATE)

    def is_split(self, name: str) -> bool:
        """Whether ranks hold parts of it."""
        return isinstance(self.placement(name), Shard)

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole parameter, or of something like it."""
        return local_part(whole, self.placement(name), self.rank, self.ranks)

    def whole_shape(self, name: str, part: Sequence[int]) -> tuple[int, ...]:
        """The shape of which a part has this one."""
        return whole_shape(part, self.placement(name), self.ranks)

    def whole(self, name: str, part: Tensor) -> Tensor:
        """All ranks' parts put together, blocks in their order."""
        place = self.placement(name)
        return gathered(part, place, group_named(self.group)) if isinstance(place, Shard) else part

    def seen(self, name: str, part: Tensor) -> Any:
        """A part as a DTensor, for checkpoints: over the same memory, unless it is of a tensor split in blocks.

        DTensor has no word for blocks: of such a tensor the DTensor holds a copy, cut in one piece a rank.
        """
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor import Shard as TorchShard

        place = self.placement(name)
        if not isinstance(place, Shard):
            return part
        shape = self.whole_shape(name, part.shape)
        local = part.detach()
        if not _in_one_piece(place, shape):
            start, end = own_ranges(Shard(place.dim, units=shape[place.dim]), shape[place.dim], self.rank, self.ranks)[
                0
            ]
            local = self.whole(name, part).narrow(place.dim, start, end - start).contiguous()
        elif place.units:  # without the padding, as DTensor has it
            ((start, end),) = own_ranges(place, shape[place.dim], self.rank, self.ranks)
            local = local.narrow(place.dim, 0, end - start)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local, self.mesh, [TorchShard(place.dim)], run_check=False, shape=torch.Size(shape), stride=stride
        )

    def own(self, name: str, value: Any, like: Tensor) -> Any:
        """This rank's part of what a checkpoint has for a tensor: a DTensor, as `seen` gives it or of other ranks, or
        whole. `like` is the part that is there now."""
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor import Shard as TorchShard

        place = self.placement(name)
        expected = self.whole_shape(name, like.shape)
        if not isinstance(value, Tensor) or tuple(value.shape) != expected:
            found = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"as a {type(value).__name__}"
            raise StateError(
                f"the state has {name} {found}",
                expected=f"a DTensor or a whole tensor of shape {expected}",
                remedy="give what step.state_dict() returned, or the state of the whole model",
            )
        if isinstance(value, DTensor):
            alike = isinstance(place, Shard) and value.placements == (TorchShard(place.dim),)
            if isinstance(place, Shard) and alike and value.device_mesh == self.mesh and _in_one_piece(place, expected):
                return (
                    padded([value.to_local()], place, expected[place.dim], self.ranks)
                    if place.units
                    else (value.to_local())
                )
            value = value.full_tensor()
        return self.part(name, value)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The axis as torch's."""
        return DeviceMesh.from_group(group_named(self.group), self.device, mesh_dim_names=(self.axis,))


def _in_one_piece(place: Shard, shape: Sequence[int]) -> bool:
    """Whether each rank holds one piece of a dim, where DTensor cuts it too."""
    return len(block_sizes(place, shape[place.dim])) == 1 and place.units in (0, shape[place.dim])


def whole_shape(part: Sequence[int], placement: Placement, ranks: int) -> tuple[int, ...]:
    """The shape of which each rank has a part of this one.

    >>> whole_shape((2, 8), Shard(0), 4)
    (8, 8)
    """
    sizes = list(part)
    if isinstance(placement, Shard):
        sizes[placement.dim] = whole_size(placement, sizes[placement.dim], ranks)
    return tuple(sizes)


def gathered(part: Tensor, shard: Shard, group: Any) -> Tensor:
    """The whole of a split tensor, on every rank of a process group."""
    device, part = part.device, part.detach().contiguous()
    if device.type == "cuda" and dist.get_backend(group) == "gloo":
        part = part.cpu()  # gloo's all-gather crashes on CUDA tensors
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part, group=group)
    return joined(parts, shard).to(device)


def joined(parts: Sequence[Tensor], shard: Shard) -> Tensor:
    """The whole of which these are the ranks' parts.

    >>> joined([torch.tensor([0, 1, 4]), torch.tensor([2, 3, 5])], Shard(0, sizes=(4, 2)))
    tensor([0, 1, 2, 3, 4, 5])
    >>> joined([torch.tensor([0, 1]), torch.tensor([2, 0])], Shard(0, units=3))
    tensor([0, 1, 2])
    """
    size = whole_size(shard, parts[0].shape[shard.dim], len(parts))
    blocks = block_sizes(shard, size)
    local = [local_size(shard, block, len(parts)) for block in blocks]
    pieces = [part.split(local, shard.dim) for part in parts]
    whole = [torch.cat(block, shard.dim) for block in zip(*pieces, strict=True)]
    return torch.cat([block.narrow(shard.dim, 0, end) for block, end in zip(whole, blocks, strict=True)], shard.dim)
