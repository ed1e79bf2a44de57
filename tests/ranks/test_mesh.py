"""Which ranks a mesh's axes have, from each rank's place, and which meshes are refused; worlds are emulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from crossfade import emulated
from crossfade.cost.presets import preset
from crossfade.errors import MeshError, NotYetError
from crossfade.ranks import mesh as meshes
from crossfade.ranks.members import Members
from crossfade.ranks.mesh import data_parallel_axes, ranks_of, without_axis

MACHINE = preset("ethernet-1gbit")
HYBRID = {"dp_replicate": 2, "dp_shard": 3}


def places(found: meshes.DataParallel | None) -> dict[str, tuple[tuple[int, ...], int]]:
    """The ranks of each axis, and this rank's index among them."""
    assert found is not None
    axes = [found.whole, found.split, found.copies]
    return {axis.name: (axis.ranks, axis.index) for axis in axes if axis is not None}


def test_axes_of_a_world_that_is_split_and_copied() -> None:
    with emulated.world(MACHINE, ranks=6, rank=4):
        expected = {"dp": (tuple(range(6)), 4), "dp_shard": ((3, 4, 5), 1), "dp_replicate": ((1, 4), 1)}
        assert places(data_parallel_axes(HYBRID)) == expected
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=tuple(HYBRID))
        assert places(data_parallel_axes(mesh)) == expected


def test_axes_of_one_size_are_no_axes() -> None:
    assert data_parallel_axes(None) is data_parallel_axes({"dp": 1}) is None
    with emulated.world(MACHINE, ranks=3, rank=2):
        for mesh in ({"dp": 3}, {"dp_replicate": 1, "dp_shard": 3}):
            found = data_parallel_axes(mesh)
            assert found is not None and found.copies is None and found.whole is found.split
            assert (found.whole.ranks, found.whole.index) == ((0, 1, 2), 2)


def test_the_data_parallel_axis_is_the_only_one_or_the_one_called_dp() -> None:
    with emulated.world(MACHINE, ranks=3, rank=1):
        alone = init_device_mesh("cpu", (3,), mesh_dim_names=("batch",))
        assert places(data_parallel_axes(alone)) == {"batch": ((0, 1, 2), 1)}
        second = init_device_mesh("cpu", (1, 3), mesh_dim_names=("tp", "dp"))
        assert places(data_parallel_axes(second)) == {"dp": ((0, 1, 2), 1)}


REFUSED: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "too small": (MeshError, "a mesh of 4 ranks in a world of 6: .*start 4 processes", lambda: {"dp": 4}),
    "another axis": (NotYetError, "mesh axes dp, tp: expected only dp", lambda: {"dp": 3, "tp": 2}),
    "swapped": (
        MeshError,
        "mesh axes dp_shard, dp_replicate: expected dp_replicate, then dp_shard",
        lambda: init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp_shard", "dp_replicate")),
    ),
    "nothing called dp": (
        MeshError,
        "mesh axes a, b: expected one called dp",
        lambda: init_device_mesh("cpu", (3, 2), mesh_dim_names=("a", "b")),
    ),
    "wide beside dp": (
        NotYetError,
        "mesh axis 'tp' of size 2: expected data parallelism only",
        lambda: init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp")),
    ),
    "elsewhere": (MeshError, "rank 0 is outside the mesh", lambda: DeviceMesh("cpu", [1, 2])),
}


@pytest.mark.parametrize("what", REFUSED)
def test_meshes_that_do_not_fit_are_refused(what: str) -> None:
    kind, message, make = REFUSED[what]
    with emulated.world(MACHINE, ranks=6), pytest.raises(kind, match=message):
        data_parallel_axes(make())


def test_the_ranks_of_a_mesh_are_those_of_the_world_or_its_own() -> None:
    assert ranks_of({"dp": 2}) == ()  # no process group
    with emulated.world(MACHINE, ranks=4, rank=2):
        assert ranks_of({"dp": 2, "tp": 2}) == (0, 1, 2, 3)
        assert ranks_of({"dp": 2}) == ranks_of({"dp": 1}) == ranks_of(None) == ()
        assert ranks_of(DeviceMesh("cpu", [3, 2])) == (3, 2)
        assert ranks_of(DeviceMesh("cpu", [0, 1])) == ranks_of(DeviceMesh("cpu", [2])) == ()


def test_a_mesh_without_one_of_its_axes() -> None:
    members = Members(range(8), 5, 1.0, alone=True)
    with emulated.world(MACHINE, ranks=8, rank=5):
        axis, others, whole = without_axis({"dp": 2, "tp": 4}, "tp", members)
        assert whole.mesh_dim_names == ("dp", "tp")
        assert (axis.ranks, axis.index) == ((4, 5, 6, 7), 1)
        assert others is not None and others.mesh_dim_names == ("dp",) and others.mesh.tolist() == [1, 5]
        assert without_axis({"tp": 8}, "tp", members)[1] is None
        with pytest.raises(MeshError, match="a mesh with the axes dp: expected an axis called tp"):
            without_axis({"dp": 8}, "tp", members)
        with pytest.raises(MeshError, match=r"nothing would be split over tp2.*mesh=\{'dp': 2, 'tp': 4\}"):
            without_axis({"dp": 2, "tp": 2, "tp2": 2}, "tp", members)
        with pytest.raises(MeshError, match="a mesh of 4 ranks in a world of 8"):
            without_axis({"tp": 4}, "tp", members)
    with pytest.raises(MeshError, match="a mesh with no named axes: expected an axis called tp"):
        without_axis(None, "tp", None)


class Opening(Members):
    """Counts what is opened with the others."""

    opened: tuple[str, ...] = ()

    def guard(self, what: str, function: Callable[[], Any]) -> Any:
        self.opened += (what,)
        return function()


def test_a_mesh_of_the_same_sizes_is_opened_once_in_one_world() -> None:
    members = Opening(range(6), 0, 1.0, alone=True)

    def of(sizes: dict[str, int]) -> DeviceMesh:
        axes = data_parallel_axes(sizes)
        assert axes is not None
        return axes.device_mesh("cpu", members)

    with emulated.world(MACHINE, ranks=6):
        first = of(HYBRID)
        assert of(dict(HYBRID)) is first and first.shape == (2, 3)
        assert of({"dp": 6}).mesh_dim_names == ("dp",)
    what = "opening the mesh {'dp_replicate': 2, 'dp_shard': 3}"
    assert members.opened == (what, "opening the mesh {'dp': 6}")
    with emulated.world(MACHINE, ranks=6):
        assert of(HYBRID) is not first  # whose groups are gone
    assert members.opened[2:] == (what,)


def test_a_mesh_that_was_given_is_the_mesh() -> None:
    with emulated.world(MACHINE, ranks=3):
        given = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
        axes = data_parallel_axes(given)
        assert axes is not None and axes.device_mesh("cpu", Opening((0,), 0, 1.0)) is given
