"""The data-parallel axis of a device mesh, as seen from this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from crossfade.errors import MeshError, NotYetError
from crossfade.graph.private import default_store
from crossfade.run.members import Members

MeshLike = DeviceMesh | Mapping[str, int] | None

_opened: Counter[tuple[int, ...]] = Counter()
"""How often each set of ranks has opened an axis: the same on all of them, since they open in the same order."""


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

    def open(self, timeout: float) -> tuple[Members, str]:
        """Make a process group of our own for this axis, whose collectives fail after `timeout` seconds.

        A group of our own keeps the user's collectives and ours from mixing. Returns its members and its name.
        """
        _opened[self.ranks] += 1
        prefix = f"crossfade/{'-'.join(map(str, self.ranks))}/{_opened[self.ranks]}"
        members = Members(dist.PrefixStore(prefix, default_store()), self.ranks, self.index, timeout)
        members.agree(self.name, f"axis {self.name} over {self.backend}")  # or making the group would wait unnamed
        limit = timedelta(seconds=timeout)
        group = dist.new_group(list(self.ranks), timeout=limit, backend=self.backend, use_local_synchronization=True)
        return members, group.group_name


def data_parallel_axis(mesh: MeshLike) -> Axis | None:
    """The axis that a batch is split over: `dp`, or the only one. None for a single device.

    `mesh` is torch's `DeviceMesh`, or a mapping like `{"dp": 4}` over all ranks of the world.
    """
    if mesh is None:
        return None
    if isinstance(mesh, Mapping):
        return _axis_of_world(mesh)
    names = mesh.mesh_dim_names or ("dp",) * mesh.ndim
    if "dp" not in names and mesh.ndim > 1:
        raise MeshError(
            f"mesh axes {', '.join(names)}", expected="one called dp", remedy="name the data-parallel axis dp"
        )
    which = names.index("dp") if "dp" in names else 0
    for axis, name in enumerate(names):
        if axis != which and mesh.size(axis) > 1:
            raise NotYetError(
                f"mesh axis {name!r} of size {mesh.size(axis)}",
                expected="data parallelism only, in this version",
                remedy="pass a mesh whose other axes have size 1",
            )
    if mesh.get_coordinate() is None:
        raise MeshError(f"rank {dist.get_rank()} outside the mesh {mesh}", remedy="call compile_step only on its ranks")
    group = mesh.get_group(which)
    ranks = tuple(dist.get_process_group_ranks(group))
    return Axis(names[which], ranks, ranks.index(dist.get_rank()), dist.get_backend(group))


def backend_on(device: str, configured: str) -> str:
    """The backend that serves a type of device, of what a process group says it runs on.

    >>> backend_on("cpu", "cpu:gloo,cuda:nccl"), backend_on("cuda", "undefined"), backend_on("cpu", "gloo")
    ('gloo', 'nccl', 'gloo')
    """
    if configured == "undefined":  # what torch says where none was asked for
        configured = "cpu:gloo,cuda:nccl"
    served = dict(item.split(":") for item in configured.split(",") if ":" in item)
    return served.get(device, configured)


def _axis_of_world(mesh: Mapping[str, int]) -> Axis | None:
    sizes = {name: size for name, size in mesh.items() if size != 1}
    if not sizes:
        return None
    if set(sizes) != {"dp"}:
        raise NotYetError(
            f"mesh axes {', '.join(sizes)}", expected="only dp", remedy='pass mesh={"dp": number of ranks}'
        )
    world = dist.get_world_size() if dist.is_initialized() else 1
    if sizes["dp"] != world:
        raise MeshError(
            f"a mesh of {sizes['dp']} ranks in a world of {world}",
            expected="as many ranks in the mesh as in the world",
            remedy=f"start {sizes['dp']} processes (crossfade launch --ranks {sizes['dp']} script.py), or pass "
            f'mesh={{"dp": {world}}}; call torch.distributed.init_process_group first',
        )
    return Axis("dp", tuple(range(world)), dist.get_rank(), dist.get_backend())
