"""How a split goes through a reshape, against numbering every element and looking which rank has it."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from crossfade.graph.private import symbolic_shapes
from crossfade.shard.tensor.parts import joined
from crossfade.shard.tensor.placements import Shard, block_sizes, divides, in_blocks, is_multiple, reshaped
from crossfade.shard.tensor.sources import local_part


def shapes_of(number: int) -> list[tuple[int, ...]]:
    """Every shape of up to four dims with so many elements; ones only in front, as dims of 1 change nothing."""
    if number == 1:
        return [(), (1,)]
    found = [(number,)]
    for first in range(2, number):
        if number % first == 0:
            found += [(first, *rest) for rest in shapes_of(number // first) if len(rest) < 4 and 1 not in rest]
    return found


def every_split(shape: tuple[int, ...], ranks: int) -> list[Shard]:
    """Every split of a shape in blocks that divide, up to three of them."""
    found = []
    for dim, size in enumerate(shape):
        cuts = range(ranks, size, ranks) if size % ranks == 0 else ()
        for count in range(3 if size % ranks == 0 else 0):
            for chosen in combinations(cuts, count):
                ends = (0, *chosen, size)
                found.append(in_blocks(dim, [end - start for start, end in pairwise(ends)]))
    return found


def owners(shape: tuple[int, ...], shard: Shard, ranks: int) -> Tensor:
    """Which rank has each element, in their order."""
    numbered = torch.arange(math.prod(shape)).view(shape)
    held = torch.empty(math.prod(shape), dtype=torch.int64)
    for rank in range(ranks):
        held[local_part(numbered, shard, rank, ranks).flatten()] = rank
    return held


@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), min_size=1, max_size=4).filter(lambda s: math.prod(s) <= 48),
    st.sampled_from([2, 4]),
    st.data(),
)
@settings(max_examples=80, deadline=None)
def test_reshaped_answers_exactly_when_the_parts_are_a_split(sizes: list[int], ranks: int, data: st.DataObject):
    shape = tuple(sizes)
    number = math.prod(shape)
    splits = every_split(shape, ranks)
    if not splits:
        return
    shard = data.draw(st.sampled_from(splits))
    after = data.draw(st.sampled_from(shapes_of(number)))
    place = data.draw(st.integers(0, len(after)))
    after = (*after[:place], 1, *after[place:]) if data.draw(st.booleans()) else after
    held = owners(shape, shard, ranks)
    right = {split for split in every_split(after, ranks) if torch.equal(owners(after, split, ranks), held)}
    found = reshaped(shard, shape, after, ranks)
    many = found is not None and len(block_sizes(found, after[found.dim])) > 3
    assert many or right == ({found} if found else set())
    if found:
        assert torch.equal(owners(after, found, ranks), held)


@given(st.integers(1, 3), st.lists(st.integers(1, 3), min_size=1, max_size=3), st.sampled_from([2, 4]))
@settings(max_examples=50, deadline=None)
def test_parts_that_are_reshaped_are_the_parts_of_the_reshaped(rows: int, blocks: list[int], ranks: int):
    """A fused projection, its heads taken apart: every rank reshapes what it has, and all together have the whole."""
    shard = in_blocks(1, [block * ranks * 4 for block in blocks])
    shape = (rows, sum(blocks) * ranks * 4)
    after = (rows, sum(blocks) * ranks, 4)
    found = reshaped(shard, shape, after, ranks)
    assert found == in_blocks(1, [block * ranks for block in blocks])
    whole = torch.arange(math.prod(shape)).view(shape)
    parts = [local_part(whole, shard, rank, ranks).reshape(rows, -1, 4) for rank in range(ranks)]
    assert torch.equal(joined(parts, found), whole.view(after))


def test_symbolic_sizes_are_split_whatever_they_stand_for():
    env = symbolic_shapes()
    batch = env.create_unbacked_symint()
    assert reshaped(Shard(2), (batch, 12, 64), (batch, 12, 4, 16), 2) == Shard(2)
    merged = reshaped(Shard(1), (batch, 4, 16), (batch * 4, 16), 2)
    assert merged is not None and merged.dim == 0 and str(merged.outer) == str(batch.node.expr)
    assert reshaped(Shard(0, sizes=(4, 2)), (6, batch), (6, batch, 1), 2) == Shard(0, sizes=(4, 2))
    assert reshaped(Shard(1, sizes=(4, 2)), (batch, 6), (batch * 6,), 2) is None, "blocks of no known number"
    assert reshaped(Shard(0), (batch,), (batch, 1), 2) is None, "it may be odd"


@pytest.mark.parametrize(
    ("before", "shard", "after"),
    [((0, 8), Shard(1), (0, 2, 4)), ((8, 0), Shard(0), (2, 4, 0)), ((8, 0), Shard(0), (0,))],
)
def test_empty_values(before: tuple[int, ...], shard: Shard, after: tuple[int, ...]):
    """Either the parts fit the split that is answered, or there is none."""
    found = reshaped(shard, before, after, 2)
    assert found is None or divides(found, after[found.dim], 2)


def test_blocks_that_recur_may_come_apart():
    assert reshaped(Shard(0, sizes=(4, 2, 4, 2)), (12,), (2, 6), 2) == Shard(1, sizes=(4, 2))
    assert reshaped(Shard(1, sizes=(4, 2)), (2, 6), (12,), 2) == Shard(0, sizes=(4, 2, 4, 2))


def test_blocks():
    assert in_blocks(0, (4, 4)) == Shard(0, outer=2)
    assert block_sizes(Shard(1, outer=2), 8) == (4, 4)
    assert block_sizes(Shard(1, sizes=(4, 2)), 6) == (4, 2)
    assert divides(Shard(0, sizes=(4, 2)), 6, 2)
    assert not divides(Shard(0, sizes=(4, 2)), 12, 2), "the blocks of another size"
    assert not divides(Shard(0, sizes=(4, 1)), 5, 2)
    assert not divides(Shard(0), 0, 2)
    assert is_multiple(12, 4) and not is_multiple(4, 12)
    assert str(Shard(0).on(2)) == "split on dim 2"
