"""A model's state that a plan has split over the ranks of an axis: as this rank's parts, as DTensors, and whole.

Where data parallelism splits the rows of parts again (ZeRO), what the model holds are DTensors of parts: over the data-
parallel axes alone. Checkpoints take DTensors of the whole, over all axes of the mesh.
"""

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
from crossfade.graph.private import group_named, rows_of_parts
from crossfade.graph.program import rows_per_rank
from crossfade.shard.tensor.placements import REPLICATE, Placement, Shard, block_sizes, local_size, whole_size
from crossfade.shard.tensor.sources import local_part, own_ranges, padded


@dataclass(frozen=True)
class Parts:
    """How the tensors of a state lie over an axis, by name, and the way between a part and the whole.

    What is made of parts asks all ranks of the axis to take part; `group` is the name of their process group. `axes` is
    the mesh of all axes, where there are others.

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
    axes: DeviceMesh | None = None

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
        """All ranks' parts put together, blocks in their order; of parts whose rows are split, these first."""
        place = self.placement(name)
        part = part.full_tensor() if is_rows(part) else part  # type: ignore[attr-defined]
        return gathered(part, place, group_named(self.group)) if isinstance(place, Shard) else part

    def seen(self, name: str, part: Tensor) -> Any:
        """A part as a DTensor, for checkpoints: over the same memory, unless it is of a tensor split in blocks.

        DTensor has no word for blocks: of such a tensor the DTensor holds a copy, cut in one piece a rank. Nor has it
        one for rows of padded parts, which are put together whole.
        """
        from torch.distributed.tensor import DTensor

        place = self.placement(name)
        if not isinstance(place, Shard) and not is_rows(part):
            return part
        shape = self.whole_shape(name, part.shape)
        mesh, placements = self._seen_as(name, part)
        local = part.detach()
        if _is_padded_rows(place, part):
            local = self.whole(name, part)
        elif isinstance(place, Shard) and not _in_one_piece(place, shape):
            in_one_piece = Shard(place.dim, units=shape[place.dim])
            ((start, end),) = own_ranges(in_one_piece, shape[place.dim], self.rank, self.ranks)
            local = self.whole(name, part).narrow(place.dim, start, end - start).contiguous()
            local = _rows_like(part, local) if is_rows(part) else local
        elif is_rows(part):
            local = local.to_local()  # type: ignore[attr-defined]
        elif isinstance(place, Shard) and place.units:  # without the padding, as DTensor has it
            ((start, end),) = own_ranges(place, shape[place.dim], self.rank, self.ranks)
            local = local.narrow(place.dim, 0, end - start)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)

    def own(self, name: str, value: Any, like: Tensor) -> Any:
        """This rank's part of what a checkpoint has for a tensor: a DTensor, as `seen` gives it or of other ranks, or
        whole. `like` is the part that is there now."""
        from torch.distributed.tensor import DTensor

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
            mesh, placements = self._seen_as(name, like)
            alike = list(value.placements) == placements and value.device_mesh == mesh
            in_place = not isinstance(place, Shard) or _in_one_piece(place, expected)
            if alike and in_place and not _is_padded_rows(place, like):
                local = value.to_local()
                if isinstance(place, Shard) and place.units:
                    local = padded([local], place, expected[place.dim], self.ranks)
                return _as_rows(like, local) if is_rows(like) else local
            value = value.full_tensor()
        part = self.part(name, value)
        return _as_rows(like, _rows_like(like, part)) if is_rows(like) else part

    def _seen_as(self, name: str, part: Any) -> tuple[DeviceMesh, list[Any]]:
        """The mesh and the placements of the DTensor that shows a part of a tensor, or some rows of it."""
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor import Shard as TorchShard

        place = self.placement(name)
        by_plan = TorchShard(place.dim) if isinstance(place, Shard) else Replicate()
        if not is_rows(part):
            return self.mesh, [by_plan]
        assert self.axes is not None and self.axes.mesh_dim_names is not None, "rows are split over another axis"
        names = self.axes.mesh_dim_names
        if _is_padded_rows(place, part):
            return self.axes, [Replicate()] * len(names)
        of_rows = dict(zip(part.device_mesh.mesh_dim_names, part.placements, strict=True))
        placements: list[Any] = [of_rows.get(axis, Replicate()) for axis in names]
        own = names.index(self.axis)
        placements[own] = by_plan
        rows = next(index for index, axis in enumerate(names) if of_rows.get(axis) == TorchShard(0))
        if by_plan == TorchShard(0) and rows < own:  # DTensor splits by the first axis first, but for these
            placements[rows] = rows_of_parts(self.ranks)
        return self.axes, placements

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The axis as torch's."""
        return DeviceMesh.from_group(group_named(self.group), self.device, mesh_dim_names=(self.axis,))


def is_rows(part: Any) -> bool:
    """Whether data parallelism splits the rows of a part among ranks: it is a DTensor then."""
    from torch.distributed.tensor import DTensor

    return isinstance(part, DTensor)


def _is_padded_rows(place: Placement, part: Any) -> bool:
    return isinstance(place, Shard) and bool(place.units) and is_rows(part)


def _rows_like(like: Any, part: Tensor) -> Tensor:
    """The rows of a part that this rank keeps, where it keeps those of `like`."""
    mesh, last = like.device_mesh, like.device_mesh.ndim - 1
    count, rank = rows_per_rank(part.shape[0], mesh.size(last)), mesh.get_local_rank(last)
    return part[rank * count : (rank + 1) * count].contiguous()


def _as_rows(like: Any, rows: Tensor) -> Any:
    """A DTensor of these rows, over the axes over which `like` is split."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


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
