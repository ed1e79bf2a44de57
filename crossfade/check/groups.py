"""Who is in which group: the forms in which meshes are given, as one mapping a rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from crossfade.errors import MeshError

Groups = Mapping[str, tuple[int, ...]]
"""One rank's groups: the global ranks in each, in the group's order."""

Meshes = Any
"""See `groups_of_ranks`."""


def groups_of_ranks(meshes: Meshes, ranks: int | None = None) -> list[Groups]:
    """Each rank's groups, from a mesh in any of its forms; `ranks` is how many there are, where that is known.

    Sizes of axes, whose ranks follow in row-major order; also one axis made of others, by their names:

    >>> groups_of_ranks({"dp": 2, "tp": 2})[1]
    {'dp': (1, 3), 'tp': (0, 1)}
    >>> groups_of_ranks({"dp": ("copy", "split"), "copy": 2, "split": 2})[3]
    {'copy': (1, 3), 'split': (2, 3), 'dp': (0, 1, 2, 3)}

    The ranks of each group, or of all groups of that name; the same for all ranks, or a mapping for each:

    >>> groups_of_ranks({"pp": (0, 1), "dp": [(0,), (1,)]})[1]
    {'pp': (0, 1), 'dp': (1,)}
    >>> groups_of_ranks([{"dp": (0, 1)}, {"dp": (0, 1)}])[0]
    {'dp': (0, 1)}

    A torch `DeviceMesh` with named axes is read as its axes.
    """
    if hasattr(meshes, "mesh_dim_names"):
        return _of_device_mesh(meshes)
    if not isinstance(meshes, Mapping):
        views = [_own(_checked_values(mesh, "ranks"), rank) for rank, mesh in enumerate(_mappings(meshes))]
        return _checked(views, ranks)
    axes = {name: size for name, size in meshes.items() if isinstance(size, int)}
    if axes:
        return _checked(_of_axes(_checked_values(meshes, "size", "axes"), axes), ranks)
    _checked_values(meshes, "ranks", "groups")
    listed = [rank for groups in meshes.values() for group in _listed(groups) for rank in group]
    number = ranks if ranks is not None else max(listed, default=-1) + 1
    return [_own(meshes, rank) for rank in range(number)]


def _mappings(meshes: Any) -> list[Mapping[str, Any]]:
    found = list(meshes) if isinstance(meshes, Sequence) and not isinstance(meshes, str) else [meshes]
    if wrong := [mapping for mapping in found if not isinstance(mapping, Mapping)]:
        raise _unreadable(wrong[0])
    return found


def _checked_values(groups: Mapping[str, Any], *kinds: str) -> Mapping[str, Any]:
    """A mesh whose values are all of these kinds."""
    for value in groups.values():
        if _kind(value) not in kinds:
            raise _unreadable(value)
    return groups


def _kind(value: Any) -> str:
    """What a value of a mesh is: a size, ranks, groups of ranks, names of axes, or nothing that is known."""
    if isinstance(value, int) and not isinstance(value, bool):
        return "size" if value > 0 else ""
    items = list(value) if isinstance(value, list | tuple) else []
    if items and all(isinstance(item, str) for item in items):
        return "axes"
    if items and all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in items):
        return "ranks" if len(set(items)) == len(items) else ""
    return "groups" if items and all(_kind(item) == "ranks" for item in items) else ""


def _unreadable(value: Any) -> MeshError:
    return MeshError(
        f"{value!r} in a mesh",
        expected="sizes of at least 1 (and axes made of such), or ranks like (0, 1) and groups like [(0, 2), (1, 3)]",
        remedy='write it like {"dp": 2, "tp": 4}, or {"pp": (0, 1)}, or a list of such with the groups of each rank',
    )


def _of_axes(meshes: Mapping[str, Any], axes: Mapping[str, int]) -> list[Groups]:
    made_of = {name: (name,) for name in axes} | {n: tuple(axes_of) for n, axes_of in meshes.items() if n not in axes}
    for name, parts in made_of.items():
        if unknown := [part for part in parts if part not in axes]:
            raise MeshError(
                f"the axis {name} made of {', '.join(map(str, unknown))}",
                expected=f"sizes, or names of axes that have one: {', '.join(axes)}",
                remedy='write it like {"dp": ("dp_replicate", "dp_shard"), "dp_replicate": 2, "dp_shard": 4}',
            )
    places = list(product(*(range(size) for size in axes.values())))
    found: list[dict[str, tuple[int, ...]]] = [{} for _ in places]
    for name, parts in made_of.items():
        for ranks in _along(places, list(axes), parts):
            for rank in ranks:
                found[rank][name] = ranks
    return list(found)


def _along(places: Sequence[tuple[int, ...]], axes: list[str], along: Sequence[str]) -> Iterable[tuple[int, ...]]:
    """The ranks of each group along some axes of a mesh: those that stand alike on all others."""
    across = [index for index, axis in enumerate(axes) if axis not in along]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(places):
        groups.setdefault(tuple(place[index] for index in across), []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


def _of_device_mesh(mesh: Any) -> list[Groups]:
    names, grid = mesh.mesh_dim_names, mesh.mesh
    if not names:
        raise MeshError("a DeviceMesh without named axes", remedy="pass mesh_dim_names to init_device_mesh")
    found: dict[int, dict[str, tuple[int, ...]]] = {int(rank): {} for rank in grid.flatten().tolist()}
    for dim, name in enumerate(names):
        for row in grid.movedim(dim, -1).reshape(-1, grid.shape[dim]).tolist():
            for rank in row:
                found[rank][name] = tuple(row)
    return [found.get(rank, {}) for rank in range(max(found) + 1)]


def _listed(given: Any) -> list[tuple[int, ...]]:
    """The groups that a mesh gives under one name: one, or a list of them."""
    items = list(given)
    return [tuple(items)] if all(isinstance(item, int) for item in items) else [tuple(item) for item in items]


def _own(groups: Mapping[str, Any], rank: int) -> Groups:
    """A rank's groups; where it is in none of a name, the first, for the report that it is not in it."""
    listed = {name: _listed(given) for name, given in groups.items()}
    own = {name: [group for group in found if rank in group] or found for name, found in listed.items()}
    return {name: found[0] for name, found in own.items() if found}


def _checked(found: list[Groups], ranks: int | None) -> list[Groups]:
    if ranks is not None and len(found) != ranks:
        raise MeshError(
            f"{ranks} programs and a mesh of {len(found)} ranks",
            expected="a program for each rank, or one for all",
            remedy="pass as many programs as the mesh has ranks",
        )
    return found


def read_mesh(text: str) -> dict[str, Any]:
    """A mesh as the command line spells it.

    >>> read_mesh("dp=2,tp=4")
    {'dp': 2, 'tp': 4}
    >>> read_mesh("copy=2,split=2,dp=copy*split")
    {'copy': 2, 'split': 2, 'dp': ('copy', 'split')}
    """
    found: dict[str, Any] = {}
    for item in text.split(","):
        name, equals, value = item.strip().partition("=")
        if not name or not equals or not value:
            raise MeshError(
                f"{item!r} in the mesh {text!r}", expected="axes like dp=2,tp=4", remedy="write it like that"
            )
        found[name] = int(value) if value.isdecimal() else tuple(value.split("*"))
    return found
