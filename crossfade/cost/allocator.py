"""What a caching allocator takes from a device: memory of each stream, rounded, split and put together again."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

MIB = 2**20
_ROUNDED_TO = 512
_SMALL = MIB
"""Up to this many bytes, tensors share segments of their own kind."""
_SMALL_SEGMENT, _SEGMENT = 2 * MIB, 20 * MIB
_LARGE = 10 * MIB
"""From this many bytes on, a tensor that finds no place gets a segment of its own."""


@dataclass
class CachingAllocator:
    """Places tensors as torch's allocator for CUDA does, by its documented rules, and counts what it takes.

    Each stream has blocks of its own: what one has freed, another does not get. A tensor gets the smallest free block
    that holds it; what is left of the block stays free, and neighbours that are free are put together. Only if there is
    none does the device give more: a segment, or with `expandable` segments the missing end of the one there is.
    Nothing goes back.

        >>> allocator = CachingAllocator()
        >>> first = allocator.take(30 * MIB)
        >>> allocator.free(first)
        >>> second = allocator.take(12 * MIB), allocator.take(12 * MIB), allocator.take(12 * MIB, stream="gather")
        >>> allocator.reserved // MIB
        42
    """

    expandable: bool = False
    reserved: int = 0
    """Bytes taken from the device."""
    allocated: int = 0
    """Bytes of tensors."""
    most: int = 0
    """Bytes of tensors when they were the most."""
    _pools: dict[tuple[str, bool], _Pool] = field(default_factory=dict)

    def take(self, size: int, stream: str = "compute") -> Block | None:
        """Memory for a tensor; None for one without elements."""
        if size <= 0:
            return None
        rounded = _up(size, _ROUNDED_TO)
        small = rounded <= _SMALL
        pool = self._pools.setdefault((stream, small), _Pool())
        start = pool.find(rounded)
        if start is None:
            self.reserved += self._grow(pool, rounded, small)
            start = pool.find(rounded)
            assert start is not None
        found = pool.cut(start, rounded, least=_ROUNDED_TO if small or self.expandable else _SMALL + 1)
        self.allocated += size
        self.most = max(self.most, self.allocated)
        return Block(pool, start, found, size)

    def free(self, block: Block | None) -> None:
        """Give a tensor's memory back to its stream."""
        if block is not None:
            self.allocated -= block.size
            block.pool.give(block.start, block.held)

    def _grow(self, pool: _Pool, rounded: int, small: bool) -> int:
        """Add a segment that holds so much; its bytes."""
        if self.expandable:
            return pool.extend(rounded, _SMALL_SEGMENT if small else _SEGMENT)
        size = _SMALL_SEGMENT if small else _SEGMENT if rounded < _LARGE else _up(rounded, 2 * MIB)
        pool.add_apart(size)
        return size


@dataclass(frozen=True)
class Block:
    """Where a tensor lies: `held` bytes from `start` on, `size` of them its own."""

    pool: _Pool
    start: int
    held: int
    size: int


@dataclass
class _Pool:
    """The free memory of one stream, by size and by place; segments that are apart do not touch."""

    end: int = 0
    by_size: list[tuple[int, int]] = field(default_factory=list)
    size_at: dict[int, int] = field(default_factory=dict)
    start_of: dict[int, int] = field(default_factory=dict)
    """The free block that ends at a place."""

    def find(self, size: int) -> int | None:
        """Where the smallest free block of at least this size begins."""
        index = bisect.bisect_left(self.by_size, (size, -1))
        return self.by_size[index][1] if index < len(self.by_size) else None

    def cut(self, start: int, size: int, least: int) -> int:
        """Take a block from its beginning on, all of it if less than `least` would be left; the bytes taken."""
        whole = self._remove(start)
        if whole - size < least:
            return whole
        self._insert(start + size, whole - size)
        return size

    def give(self, start: int, size: int) -> None:
        """Take a block back, and put it together with free neighbours."""
        if start in self.start_of:
            before = self.start_of[start]
            size += self._remove(before)
            start = before
        if start + size in self.size_at:
            size += self._remove(start + size)
        self._insert(start, size)

    def add_apart(self, size: int) -> None:
        """Add a segment that touches no other."""
        self._insert(self.end + 1, size)
        self.end += 1 + size

    def extend(self, size: int, step: int) -> int:
        """Add to the end so that a block of this size ends there, in whole steps; the bytes added."""
        last = self.size_at[self.start_of[self.end]] if self.end in self.start_of else 0
        added = _up(size - last, step)
        self.end += added
        self.give(self.end - added, added)
        return added

    def _insert(self, start: int, size: int) -> None:
        bisect.insort(self.by_size, (size, start))
        self.size_at[start], self.start_of[start + size] = size, start

    def _remove(self, start: int) -> int:
        size = self.size_at.pop(start)
        del self.start_of[start + size]
        del self.by_size[bisect.bisect_left(self.by_size, (size, start))]
        return size


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
