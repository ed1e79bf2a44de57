"""Where a rank of an exported program stands: on the axis of its plan, and on that of its experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from crossfade.errors import MeshError
from crossfade.graph.private import name_group
from crossfade.ranks.mesh import EXPERT_AXIS, has_axis, mesh_of_world

MeshLike = DeviceMesh | Mapping[str, int]


@dataclass(frozen=True)
class Position:
    """How many ranks the axis of a plan and that of experts have, and which of them this is.

    >>> position = Position.on({"ep": 2, "tp": 4}, "tp", rank=5)
    >>> position.expert_rank, position.rank, str(position)
    (1, 1, '4 ranks and ep=2')
    """

    ranks: int
    rank: int
    expert_ranks: int = 1
    expert_rank: int = 0

    @property
    def place(self) -> int:
        """Which this is of all ranks; those of the plan's axis are side by side."""
        return self.expert_rank * self.ranks + self.rank

    def __str__(self) -> str:
        beside = f" and {EXPERT_AXIS}={self.expert_ranks}" if self.expert_ranks > 1 else ""
        return f"{self.ranks} ranks{beside}"

    @classmethod
    def on(
        cls, mesh: MeshLike, axis: str, rank: int | None = None, called: str = "", *, experts: bool = True
    ) -> Position:
        """This process's on a mesh, or that of `rank`; groups are given the names that programs call: `ep`, and `axis`
        or what it is `called`. Without `experts` an axis `ep` has nothing to do with the program."""
        if axis == EXPERT_AXIS and experts:
            raise MeshError(
                f"axis={axis!r}, over whose ranks experts are spread",
                expected="the axis of a plan, or none",
                remedy=f'pass mesh={{"{EXPERT_AXIS}": ...}} without axis=, or call the axis of the plan tp',
            )
        if not experts or not has_axis(mesh, EXPERT_AXIS):
            return cls(*_on_axis(mesh, axis, rank, called))
        if isinstance(mesh, Mapping):
            sizes = {name: size for name, size in mesh.items() if name in (EXPERT_AXIS, axis)}
            return _of_world(sizes, axis, called) if rank is None else _of_rank(rank, sizes, axis)
        own = _on_mesh(mesh, axis, called)
        sizes = {EXPERT_AXIS: own.expert_ranks, axis: own.ranks}
        return own if rank is None else _of_rank(rank, sizes, axis)


def axes_of(mesh: MeshLike) -> tuple[str, ...]:
    """The names of a mesh's axes.

    >>> axes_of({"ep": 2, "tp": 4})
    ('ep', 'tp')
    """
    return tuple(mesh.mesh_dim_names or ()) if isinstance(mesh, DeviceMesh) else tuple(mesh)


def _of_rank(rank: int, sizes: Mapping[str, int], axis: str) -> Position:
    """The position of one of all ranks."""
    ranks, expert_ranks = sizes.get(axis, 1), sizes[EXPERT_AXIS]
    if not 0 <= rank < ranks * expert_ranks:
        raise _nowhere(rank, ranks * expert_ranks, " and ".join(sizes))
    return Position(ranks, rank % ranks, expert_ranks, rank // ranks)


def _of_world(sizes: Mapping[str, int], axis: str, called: str) -> Position:
    """The position of this process where its world is the mesh."""
    if not dist.is_initialized() or dist.get_world_size() != math.prod(sizes.values()):
        raise _nowhere(None, math.prod(sizes.values()), " and ".join(sizes))
    return _on_mesh(mesh_of_world(sizes), axis, called)


def _on_mesh(mesh: DeviceMesh, axis: str, called: str) -> Position:
    """The position of this process on a mesh that spreads experts."""
    names = axes_of(mesh)
    name_group(EXPERT_AXIS, mesh.get_group(EXPERT_AXIS))
    expert_ranks, expert_rank = mesh.size(names.index(EXPERT_AXIS)), mesh.get_local_rank(EXPERT_AXIS)
    beside = _on_axis(mesh, axis, None, called) if axis in names else (1, 0)
    return Position(*beside, expert_ranks, expert_rank)


def _on_axis(mesh: MeshLike, axis: str, rank: int | None, called: str) -> tuple[int, int]:
    """How many ranks the axis has and which of them this is; its group is given the name that the program calls."""
    names = axes_of(mesh)
    alone = isinstance(mesh, DeviceMesh) and mesh.ndim == 1
    if axis not in names and not alone:
        raise MeshError(f"a mesh with the axes {', '.join(names) or 'without names'}", expected=f"an axis {axis!r}",
                        remedy="name the axes of the mesh, or pass axis=...")  # fmt: skip
    if isinstance(mesh, DeviceMesh):
        index = 0 if alone else names.index(axis)
        name_group(called or axis, mesh.get_group(index))
        size, own = mesh.size(index), mesh.get_local_rank(index)
    else:
        size, own = mesh[axis], None
        if rank is None and dist.is_initialized() and dist.get_world_size() == size:
            name_group(called or axis, dist.group.WORLD)
            own = dist.get_rank()
    chosen = own if rank is None else rank
    if chosen is None or not 0 <= chosen < size:
        raise _nowhere(chosen, size, "an axis")
    return size, chosen


def _nowhere(rank: int | None, size: int, where: str) -> MeshError:
    return MeshError(
        f"rank={rank} on {where} of {size} ranks",
        expected=f"0 to {size - 1}",
        remedy=f"say whose parts to take by rank=..., start {size} ranks, or pass a DeviceMesh",
    )
