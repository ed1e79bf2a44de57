"""Meshes in all their forms as the groups of each rank, and what is no mesh."""

from __future__ import annotations

from typing import Any

import pytest

from crossfade.check.groups import groups_of_ranks
from crossfade.errors import MeshError


@pytest.mark.parametrize(
    ("mesh", "ranks", "groups"),
    [
        ({"dp": 2}, None, [{"dp": (0, 1)}] * 2),
        ({"dp": 2, "tp": 2}, 4, [{"dp": (r % 2, r % 2 + 2), "tp": (r - r % 2, r - r % 2 + 1)} for r in range(4)]),
        ({"pp": (1, 0)}, None, [{"pp": (1, 0)}] * 2),
        ({"tp": [(0, 1), (2, 3)]}, 4, [{"tp": (0, 1)}, {"tp": (0, 1)}, {"tp": (2, 3)}, {"tp": (2, 3)}]),
        ([{"dp": (0,)}, {"dp": (1,)}], None, [{"dp": (0,)}, {"dp": (1,)}]),
        ({"dp": ("copy", "split"), "copy": 1, "split": 2}, 2,
         [{"copy": (rank,), "split": (0, 1), "dp": (0, 1)} for rank in range(2)]),
    ],
)  # fmt: skip
def test_the_groups_of_each_rank(mesh: Any, ranks: int | None, groups: list[dict[str, tuple[int, ...]]]) -> None:
    assert groups_of_ranks(mesh, ranks) == groups


@pytest.mark.parametrize(
    ("mesh", "found"),
    [
        ({"dp": 0}, "0 in a mesh"),
        ({"dp": "two"}, "'two' in a mesh"),
        (7, "7 in a mesh"),
        ({"dp": 4}, "2 programs and a mesh of 4 ranks"),
        ({"dp": ("copy", "other"), "copy": 2}, "the axis dp made of other"),
    ],
)
def test_what_is_no_mesh_is_refused(mesh: Any, found: str) -> None:
    with pytest.raises(MeshError) as caught:
        groups_of_ranks(mesh, 2)
    assert caught.value.found == found
