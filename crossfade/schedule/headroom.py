"""Headroom: how much more memory there is between two places of a lane, as gathers are launched ahead of their use."""

from __future__ import annotations

from collections.abc import Sequence


class Headroom:
    """Live bytes at each place of a lane under a limit; ranges grow, and are asked for their largest, in log time.

    >>> room = Headroom([10, 30, 20, 10], limit=50)
    >>> room.take(0, 2, 25), room.take(2, 4, 25), room.take(3, 4, 16)
    (False, True, False)
    """

    def __init__(self, live: Sequence[int], limit: int) -> None:
        self.limit = limit
        self._leaves = 1
        while self._leaves < max(1, len(live)):
            self._leaves *= 2
        self._most = [0] * (2 * self._leaves)
        self._most[self._leaves : self._leaves + len(live)] = live
        self._added = [0] * (2 * self._leaves)
        for inner in range(self._leaves - 1, 0, -1):
            self._most[inner] = max(self._most[2 * inner], self._most[2 * inner + 1])

    def take(self, first: int, end: int, size: int) -> bool:
        """Use `size` more bytes from place `first` until before `end`, if the limit allows it everywhere."""
        if first >= end:
            return True
        if self._largest(first, end) + size > self.limit:
            return False
        self._add(first, end, size)
        return True

    def _largest(self, first: int, end: int) -> int:
        """The largest of a range: of the nodes that cover it, each with what was added above it."""
        return max(self._most[node] + self._added_above(node) for node in self._cover(first, end))

    def _added_above(self, node: int) -> int:
        total = 0
        while node := node // 2:
            total += self._added[node]
        return total

    def _add(self, first: int, end: int, size: int) -> None:
        for node in self._cover(first, end):
            self._most[node] += size
            self._added[node] += size
            while node := node // 2:
                below = max(self._most[2 * node], self._most[2 * node + 1])
                self._most[node] = below + self._added[node]

    def _cover(self, first: int, end: int) -> list[int]:
        """The fewest nodes that cover a range."""
        low, high, found = first + self._leaves, end + self._leaves, []
        while low < high:
            if low & 1:
                found.append(low)
                low += 1
            if high & 1:
                high -= 1
                found.append(high)
            low, high = low // 2, high // 2
        return found
