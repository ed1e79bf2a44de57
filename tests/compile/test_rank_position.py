"""Where ranks of exported programs stand on meshes, with and without an axis for experts."""

from __future__ import annotations

import pytest

from crossfade.compile.rank_position import Position
from crossfade.errors import MeshError


def test_ranks_of_a_plan_are_side_by_side() -> None:
    for mesh in ({"ep": 2, "tp": 3}, {"tp": 3, "ep": 2}, {"dp": 4, "ep": 2, "tp": 3}):
        found = [Position.on(mesh, "tp", rank) for rank in range(6)]
        assert [(each.expert_rank, each.rank) for each in found] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
        assert [each.place for each in found] == list(range(6))


def test_an_axis_may_be_missing_or_have_one_rank() -> None:
    assert Position.on({"ep": 2}, "tp", 1) == Position(1, 0, 2, 1)
    assert Position.on({"ep": 1, "tp": 2}, "tp", 1) == Position(2, 1)
    assert Position.on({"ep": 2, "tp": 2}, "tp", 1, experts=False) == Position(2, 1)


@pytest.mark.parametrize(
    ("mesh", "axis", "rank", "words"),
    [
        ({"ep": 2}, "ep", 0, "axis='ep', over whose ranks experts are spread"),
        ({"ep": 2, "tp": 2}, "tp", 4, "rank=4 on ep and tp of 4 ranks: expected 0 to 3"),
        ({"ep": 2, "tp": 2}, "tp", None, "rank=None on ep and tp of 4 ranks"),
        ({"dp": 2}, "tp", 0, "a mesh with the axes dp: expected an axis 'tp'"),
    ],
)
def test_what_is_nowhere_says_so(mesh: dict[str, int], axis: str, rank: int | None, words: str) -> None:
    with pytest.raises(MeshError) as raised:
        Position.on(mesh, axis, rank)
    assert words in str(raised.value)
    assert "Remedy" in str(raised.value)
