"""What torch's allocator would take, against its documented rules written out."""

from __future__ import annotations

import itertools
import random

import pytest

from crossfade.cost.allocator import MIB, CachingAllocator


def test_segments_by_size() -> None:
    allocator = CachingAllocator()
    allocator.take(1)
    assert allocator.reserved == 2 * MIB  # small tensors share
    allocator.take(MIB - 512)
    allocator.take(MIB)
    assert allocator.reserved == 2 * MIB  # full, for the first has 512 bytes
    allocator.take(1)
    assert allocator.reserved == 4 * MIB
    allocator.take(MIB + 1)
    assert allocator.reserved == 24 * MIB
    allocator.take(10 * MIB)
    assert allocator.reserved == 24 * MIB  # into the rest of the 20
    allocator.take(11 * MIB + 1)
    assert allocator.reserved == 36 * MIB  # its own, in twos
    assert allocator.take(0) is None


def test_a_tensor_larger_than_any_hole_needs_more_although_enough_is_free() -> None:
    taken = {}
    for expandable in (False, True):
        allocator = CachingAllocator(expandable)
        blocks = [allocator.take(40 * MIB) for _ in range(3)]
        allocator.free(blocks[0])
        allocator.free(blocks[2])
        allocator.take(60 * MIB)
        taken[expandable] = allocator.reserved // MIB
    assert taken == {False: 180, True: 140}  # a segment of 60; or the last 40 made longer by 20


def test_what_a_stream_has_freed_no_other_gets() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.take(64 * MIB))
    allocator.take(64 * MIB, stream="gather")
    assert allocator.reserved == 128 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_nothing_overlaps_and_everything_comes_back(expandable: bool) -> None:
    draw = random.Random(1)
    allocator, held = CachingAllocator(expandable), []
    for _ in range(2000):
        if held and draw.random() < 0.5:
            allocator.free(held.pop(draw.randrange(len(held))))
        else:
            held.append(allocator.take(int(10 ** draw.uniform(1, 8)), draw.choice("ab")))
    for pool in allocator._pools.values():
        ends = sorted((block.start, block.start + block.held) for block in held if block.pool is pool)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(ends))
    assert allocator.allocated == sum(block.size for block in held)
    most = allocator.reserved
    for block in held:
        allocator.free(block)
    free = sum(size for pool in allocator._pools.values() for size, _ in pool.by_size)
    assert allocator.allocated == 0 and free == allocator.reserved == most
