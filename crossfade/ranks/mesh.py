"""The data-parallel axes of a device mesh, as seen from this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from crossfade.errors import MeshError, NotYetError
from crossfade.ranks.groups import GroupKind, Lease
from crossfade.ranks.meeting import meet
from crossfade.ranks.members import Members

MeshLike = DeviceMesh | Mapping[str, int] | None


@dataclass(frozen=True)
class Axis:
    """One axis of a mesh: its name, the global ranks along it, this process's index among them, and the backend."""

    name: str
    ranks: tuple[int, ...]
    index: int
    backend: str

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return len(self.ranks)

    def open(self, timeout: float, lease: Lease) -> tuple[Members, str]:
        """The ranks along this axis, and the name of a process group of ours for them; the lease keeps both.

        Its collectives fail after `timeout` seconds.
        """
        members = lease.hold(meet(self.ranks, self.index, timeout, alone=self.backend == "emulated"))
        return members, lease.open(members, GroupKind(self.name, self.ranks, self.backend, timeout))


SPLIT_AXIS, COPY_AXIS = "dp_shard", "dp_replicate"
"""The axes of a mesh over which rows are split, and over which those parts are copied, where there are both."""

EXPERT_AXIS = "ep"
"""The axis of a mesh over which whole experts are spread; its ranks have different samples too."""

_OF_BATCHES = frozenset({"dp", SPLIT_AXIS, COPY_AXIS, EXPERT_AXIS})


@dataclass(frozen=True)
class DataParallel:
    """The ranks that a batch is split over, as one axis; and where rows are split over some of them only, that axis and
    the one across it, along which parts are alike. Of `experts` alone are there parts, where these are spread."""

    whole: Axis
    split: Axis
    copies: Axis | None = None
    mesh: DeviceMesh | None = None
    experts: bool = False

    def device_mesh(self, device: str, members: Members) -> DeviceMesh:
        """The mesh as torch's, rows split over its last axis; all members ask for it."""
        if self.mesh is not None:
            return self.mesh
        axes = [self.whole] if self.copies is None else [self.copies, self.split]
        return _MESHES.get(device, {axis.name: axis.size for axis in axes}, members.guard)


class _Meshes:
    """Meshes over the whole world that were asked for by their sizes; each is made once, since its groups stay."""

    def __init__(self) -> None:
        self._world: Any = None
        self._made: dict[Any, DeviceMesh] = {}

    def get(self, device: str, sizes: Mapping[str, int], guard: Callable[[str, Callable[[], Any]], Any]) -> DeviceMesh:
        if dist.group.WORLD is not self._world:
            self._world, self._made = dist.group.WORLD, {}
        key, shape = (device, tuple(sizes.items())), tuple(sizes.values())
        if key not in self._made:
            what = f"opening the mesh {dict(sizes)}"
            self._made[key] = guard(what, lambda: init_device_mesh(device, shape, mesh_dim_names=tuple(sizes)))
        return self._made[key]


_MESHES = _Meshes()


def mesh_of_world(sizes: Mapping[str, int]) -> DeviceMesh:
    """The mesh of all ranks with axes of these sizes, on the devices that the world's backend serves; all ranks ask."""
    device = "cuda" if backend_on("cuda", dist.get_backend()) == "nccl" and torch.cuda.is_available() else "cpu"
    return _MESHES.get(device, sizes, lambda what, function: function())


def ranks_of(mesh: MeshLike) -> tuple[int, ...]:
    """The ranks of a mesh, in its order; empty where there is no more than one.

    >>> ranks_of(None), ranks_of({"dp": 1})
    ((), ())
    """
    if mesh is None or not dist.is_initialized():
        return ()
    if isinstance(mesh, Mapping):
        size = math.prod(mesh.values())
        return tuple(range(size)) if 1 < size == dist.get_world_size() else ()
    ranks = mesh.mesh.flatten().tolist()
    return tuple(ranks) if len(ranks) > 1 and dist.get_rank() in ranks else ()


def has_axis(mesh: MeshLike, name: str) -> bool:
    """Whether a mesh has an axis of several ranks that is called so.

    >>> has_axis({"dp": 2, "ep": 4}, "ep"), has_axis({"dp": 2, "ep": 1}, "ep"), has_axis(None, "ep")
    (True, False, False)
    """
    if mesh is None:
        return False
    if isinstance(mesh, Mapping):
        return mesh.get(name, 1) > 1
    names = mesh.mesh_dim_names or ()
    return name in names and mesh.size(names.index(name)) > 1


def without_axis(
    mesh: MeshLike, name: str, members: Members | None, device: str = "cpu"
) -> tuple[Axis, DeviceMesh | None, DeviceMesh]:
    """One axis of a mesh, the mesh of the others (None where there are none), and all of it.

    `members` are the mesh's; `device` is the type of device that holds what is split over it, of a mesh that is made
    here.
    """
    if isinstance(mesh, Mapping):
        sizes = dict(mesh)
        world = dist.get_world_size() if dist.is_initialized() else 1
        if math.prod(sizes.values()) != world or members is None:
            raise MeshError(
                f"a mesh of {math.prod(sizes.values())} ranks in a world of {world}",
                expected="as many ranks in the mesh as in the world",
                remedy="start as many processes (crossfade launch --ranks N script.py)",
            )
        mesh = _MESHES.get(device, sizes, members.guard)
    names = (mesh.mesh_dim_names or ()) if mesh is not None else ()
    if mesh is None or name not in names:
        raise MeshError(
            f"a mesh with {'the axes ' + ', '.join(names) if names else 'no named axes'}",
            expected=f"an axis called {name} to split the model over",
            remedy=f'pass mesh={{"dp": ..., "{name}": ...}}, or no tensor_parallel plan',
        )
    others = tuple(other for other in names if other != name)
    _check_others(name, {axis: mesh.size(place) for place, axis in enumerate(names)})
    group = mesh.get_group(name)
    ranks = tuple(dist.get_process_group_ranks(group))
    axis = Axis(name, ranks, ranks.index(dist.get_rank()), dist.get_backend(group))
    return axis, mesh[others if len(others) > 1 else others[0]] if others else None, mesh


def _check_others(name: str, sizes: Mapping[str, int]) -> None:
    """Refuse axes that are neither the model's nor the batch's: over these, ranks would hold copies in silence."""
    strange = {axis: size for axis, size in sizes.items() if axis not in {name, *_OF_BATCHES} and size > 1}
    if strange:
        one = {axis: size for axis, size in sizes.items() if axis not in strange}
        one[name] = sizes[name] * math.prod(strange.values())
        raise MeshError(
            f"mesh {dict(sizes)}, in which nothing would be split over {' and '.join(strange)}",
            expected=f"beside {name} only dp and {EXPERT_AXIS}, or {COPY_AXIS} and {SPLIT_AXIS}",
            remedy=f"to split the model over all of them, make them one axis: mesh={one}; call an axis dp to split the "
            "batch over it",
        )


def data_parallel_axes(mesh: MeshLike) -> DataParallel | None:
    """The axes that a batch is split over: `dp`, or the only one; or `dp_replicate` and `dp_shard`; or `ep`, with or
    without `dp` before it. None: one device.

    `mesh` is torch's `DeviceMesh`, or a mapping like `{"dp": 4}` over all ranks of the world.
    """
    if mesh is None:
        return None
    if isinstance(mesh, Mapping):
        return _axes_of_world(mesh)
    names = mesh.mesh_dim_names or ("dp",) * mesh.ndim
    if mesh.get_coordinate() is None:
        raise MeshError(
            f"rank {dist.get_rank()} is outside the mesh {mesh}", remedy="call compile_step only on its ranks"
        )
    if has_axis(mesh, EXPERT_AXIS):
        _check_beside_experts({name: mesh.size(place) for place, name in enumerate(names)})
        own = mesh if mesh.ndim == 1 else mesh["dp", EXPERT_AXIS] if "dp" in names else mesh[EXPERT_AXIS]
        grid = own.mesh.tolist() if own.ndim == 2 else [own.mesh.tolist()]
        return _of_experts(grid, dist.get_backend(mesh.get_group(EXPERT_AXIS)), own)
    if set(names) == {SPLIT_AXIS, COPY_AXIS}:
        if names != (COPY_AXIS, SPLIT_AXIS):
            raise MeshError(
                f"mesh axes {', '.join(names)}",
                expected=f"{COPY_AXIS}, then {SPLIT_AXIS}",
                remedy="build it in that order",
            )
        return _hybrid(mesh.mesh.tolist(), dist.get_backend(mesh.get_group(0)), mesh)
    return _single(mesh, names)


def _check_beside_experts(sizes: Mapping[str, int]) -> None:
    """Refuse other axes than one for data parallelism beside one for experts."""
    names = [name for name, size in sizes.items() if size > 1]
    if strange := [name for name in names if name not in ("dp", EXPERT_AXIS)]:
        raise NotYetError(
            f"mesh axes {', '.join(names)}",
            expected=f"beside {EXPERT_AXIS} only dp",
            remedy=f'pass mesh={{"dp": ..., "{EXPERT_AXIS}": ...}}, without {" and ".join(strange)}',
        )
    if names == [EXPERT_AXIS, "dp"]:
        raise MeshError(
            f"mesh axes {', '.join(names)}", expected=f"dp, then {EXPERT_AXIS}", remedy="build it in that order"
        )


def _of_experts(grid: list[list[int]], backend: str, mesh: DeviceMesh | None = None) -> DataParallel:
    """Axes over a grid of ranks: those in a row have different experts, those in a column the same."""
    everyone = [rank for line in grid for rank in line]
    row = next(line for line in grid if dist.get_rank() in line)
    here = row.index(dist.get_rank())
    split = Axis(EXPERT_AXIS, tuple(row), here, backend)
    if len(grid) == 1:
        return DataParallel(split, split, mesh=mesh, experts=True)
    column = tuple(line[here] for line in grid)
    copies = Axis("dp", column, column.index(dist.get_rank()), backend)
    whole = Axis(f"dp_{EXPERT_AXIS}", tuple(everyone), everyone.index(dist.get_rank()), backend)
    return DataParallel(whole, split, copies, mesh, experts=True)


def _single(mesh: DeviceMesh, names: tuple[str, ...]) -> DataParallel:
    if "dp" not in names and mesh.ndim > 1:
        raise MeshError(
            f"mesh axes {', '.join(names)}",
            expected=f"one called dp, or {COPY_AXIS} and {SPLIT_AXIS}",
            remedy="name the data-parallel axis dp",
        )
    which = names.index("dp") if "dp" in names else 0
    for axis, name in enumerate(names):
        if axis != which and mesh.size(axis) > 1:
            raise NotYetError(
                f"mesh axis {name!r} of size {mesh.size(axis)}",
                expected="data parallelism only, in this version",
                remedy="pass a mesh whose other axes have size 1",
            )
    group = mesh.get_group(which)
    ranks = tuple(dist.get_process_group_ranks(group))
    axis_here = Axis(names[which], ranks, ranks.index(dist.get_rank()), dist.get_backend(group))
    return DataParallel(axis_here, axis_here, mesh=mesh if mesh.ndim == 1 else mesh[names[which]])


def _hybrid(grid: list[list[int]], backend: str, mesh: DeviceMesh | None = None) -> DataParallel:
    """Axes over a grid of ranks: rows of it share a model's parts, columns hold the same part."""
    here = dist.get_rank()
    row = next(line for line in grid if here in line)
    column = [line[row.index(here)] for line in grid]
    everyone = [rank for line in grid for rank in line]

    def axis(name: str, ranks: list[int]) -> Axis:
        return Axis(name, tuple(ranks), ranks.index(here), backend)

    return DataParallel(axis("dp", everyone), axis(SPLIT_AXIS, row), axis(COPY_AXIS, column), mesh)


def backend_on(device: str, configured: str) -> str:
    """The backend that serves a type of device, of what a process group says it runs on.

    >>> backend_on("cpu", "cpu:gloo,cuda:nccl"), backend_on("cuda", "undefined"), backend_on("cpu", "gloo")
    ('gloo', 'nccl', 'gloo')
    """
    if configured == "undefined":  # what torch says where none was asked for
        configured = "cpu:gloo,cuda:nccl"
    served = dict(item.split(":") for item in configured.split(",") if ":" in item)
    return served.get(device, configured)


def _axes_of_world(mesh: Mapping[str, int]) -> DataParallel | None:
    sizes = {name: size for name, size in mesh.items() if size != 1}
    if not sizes:
        return None
    if EXPERT_AXIS in sizes:
        _check_beside_experts(sizes)
    elif set(sizes) not in ({"dp"}, {SPLIT_AXIS}, {COPY_AXIS}, {SPLIT_AXIS, COPY_AXIS}):
        raise NotYetError(
            f"mesh axes {', '.join(sizes)}",
            expected=f"only dp, or {COPY_AXIS} and {SPLIT_AXIS}, or dp and {EXPERT_AXIS}",
            remedy='pass mesh={"dp": number of ranks}',
        )
    world, asked = dist.get_world_size() if dist.is_initialized() else 1, math.prod(sizes.values())
    if asked != world:
        raise MeshError(
            f"a mesh of {asked} ranks in a world of {world}",
            expected="as many ranks in the mesh as in the world",
            remedy=f"start {asked} processes (crossfade launch --ranks {asked} script.py), or pass "
            f'mesh={{"dp": {world}}}; call torch.distributed.init_process_group first',
        )
    if EXPERT_AXIS in sizes:
        each = sizes[EXPERT_AXIS]
        rows = [list(range(start, start + each)) for start in range(0, world, each)]
        return _of_experts(rows, dist.get_backend())
    if len(sizes) == 1:
        axis = Axis(next(iter(sizes)), tuple(range(world)), dist.get_rank(), dist.get_backend())
        return DataParallel(axis, axis)
    width = sizes[SPLIT_AXIS]
    grid = [list(range(start, start + width)) for start in range(0, world, width)]
    return _hybrid(grid, dist.get_backend())
