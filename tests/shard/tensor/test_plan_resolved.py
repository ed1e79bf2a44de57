"""A resolved plan: which pieces each rank keeps, and the table it prints as."""

from __future__ import annotations

import pytest
import torch

from crossfade.shard.tensor.plan_resolved import ParameterSharding, ResolvedPlan


@pytest.mark.parametrize(
    ("blocks", "size", "ranks", "pieces"),
    [
        ((), 8, 2, [[(0, 4)], [(4, 8)]]),
        ((), 5, 2, [[(0, 3)], [(3, 5)]]),
        ((), 2, 3, [[(0, 1)], [(1, 2)], [(2, 2)]]),
        ((4, 2), 6, 2, [[(0, 2), (4, 5)], [(2, 4), (5, 6)]]),
        ((3, 1), 4, 2, [[(0, 2), (3, 4)], [(2, 3), (4, 4)]]),
    ],
)
def test_pieces_of_all_ranks_cover_the_dim_once(blocks: tuple[int, ...], size: int, ranks: int, pieces: list):
    sharding = ParameterSharding("w", 1, blocks, shape=(3, size), ranks=ranks)
    found = [[(piece.start, piece.stop) for piece in sharding.local_blocks(rank)] for rank in range(ranks)]
    assert found == pieces
    assert sorted(index for own in found for start, stop in own for index in range(start, stop)) == list(range(size))
    kept = [sum(stop - start for start, stop in own) for own in found]
    assert sharding.local_shape == (3, max(kept)) == (3, kept[0])


def test_bytes_of_the_whole_and_of_a_part():
    half = ParameterSharding("w", 0, shape=(8, 4), dtype=torch.bfloat16, ranks=4)
    assert (half.bytes, half.local_bytes) == (64, 16)


def test_what_is_not_split_has_no_pieces():
    whole = ParameterSharding("w", None, shape=(8, 4), ranks=4)
    assert whole.local_shape == (8, 4)
    with pytest.raises(ValueError, match="w is not split"):
        whole.local_blocks(0)


def test_layers_that_are_split_in_the_same_way_are_one_row():
    shardings = [
        ParameterSharding("layers.0.up", 0, style="colwise", shape=(8, 4), ranks=2),
        ParameterSharding("layers.1.up", 0, style="colwise", shape=(8, 4), ranks=2),
        ParameterSharding("layers.2.up", None, shape=(8, 4), ranks=2),
        ParameterSharding("qkv", 0, (3, 1), "colwise", 1, (4, 4), ranks=2),
    ]
    plan = ResolvedPlan({sharding.name: sharding for sharding in shardings}, {}, ranks=2)
    rows = [line.split() for line in str(plan).splitlines()]
    assert rows[2][:3] == ["layers.*.up", "(2)", "8x4"]
    assert "0, 2 blocks (padded)" in str(plan)
    assert rows[3][0] == "layers.2.up" and "-" in rows[3]
