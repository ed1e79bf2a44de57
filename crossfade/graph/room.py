"""Room below a peak: how far nodes may move along an order before more is alive at some time than at any before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx

from crossfade.graph.memory import Storages

_LOOKED_AT = 64
"""How many uses of one storage are compared to find the last that stays: of more, none is taken to end earlier."""


class Room:
    """Live bytes along an order, kept true while nodes move down it, or up, and the peak that they stay below.

    Places are counted in the direction of the moves: a node's place is even, the gap behind it the next number. What
    moves goes to gaps, and in a gap before what went there earlier: so those that go farthest should come first.

        >>> from crossfade.graph.text import parse
        >>> program = parse('''
        ... x: f32[8] = input("x")
        ... a: f32[8] = aten.neg(x)
        ... s: f32[4] = c10d.reduce_scatter_tensor(a, "sum", 2, "dp")
        ... w: f32[4] = c10d.wait_tensor(s)
        ... b: f32[8] = aten.neg(x)
        ... c: f32[8] = aten.neg(b)
        ... small: f32[4] = aten.exp(w)
        ... return output("small", small), output("w", w), output("c", c)
        ... ''', groups={"dp": 2})
        >>> x, a, s, w, b, c, small, out = program.graph.nodes
        >>> room = Room(list(program.graph.nodes), up=False)
        >>> limit = room.move({w: room.gap_before(small)})  # what is reduced is kept until the wait
        >>> room.peak, limit == room.gap_before(c)
        (80, True)
    """

    def __init__(self, nodes: Sequence[fx.Node], *, up: bool, roots: dict[fx.Node, fx.Node] | None = None) -> None:
        self.up = up
        self._place = {node: 2 * place for place, node in enumerate(reversed(nodes) if up else nodes)}
        self._storages = storages = Storages(nodes, roots)
        self._users: list[list[fx.Node]] = [[] for _ in storages.size]
        self._kept = {cell for then in storages.then for cell in then}
        self._begin, self._end = self._spans(nodes)
        steps = [0] * (2 * len(nodes) + 1)
        for size, begin, end in zip(storages.size, self._begin, self._end, strict=True):
            if size:
                steps[begin] += size
                steps[end + 1] -= size
        self._near = torch.tensor(steps).cumsum(0)[:-1]
        """Live bytes at each place; in a gap, those before anything that went there."""
        self._most = self._near.clone()
        """The same, but the most that is alive in a gap while what went there runs."""
        self.peak = int(self._near.max()) if nodes else 0
        self.unlimited = 2 * len(nodes)

    def gap_before(self, node: fx.Node) -> int:
        """The gap that a move in this room's direction reaches just before a node."""
        return self._place[node] - 1

    def position_before(self, gap: int) -> int:
        """The position, in the order that was given, of the node before which a gap is reached."""
        return len(self._place) - 1 - (gap + 1) // 2 if self.up else (gap + 1) // 2

    def gap_behind(self, node: fx.Node) -> int:
        """The gap where a node is put that does not move at all."""
        return self._place[node] + 1

    def move(self, wanted: Mapping[fx.Node, int]) -> int:
        """Move nodes to gaps, or as far towards them as room is; returns the gap that none of them went beyond.

        They move as one: none goes farther than there is room for all. What is behind that gap already stays.
        """
        changes = self._changes(wanted)
        most_more = self._while_running(wanted, changes) if self.up else 0
        limit = self._limit(changes, most_more)
        clipped = [change.until(limit) for change in changes]
        self._apply([change for change in clipped if change.first <= change.last], most_more)
        for node, gap in wanted.items():
            self._place[node] = max(min(gap, limit), self.gap_behind(node))
        return limit

    def _spans(self, nodes: Sequence[fx.Node]) -> tuple[list[int], list[int]]:
        """The first and the last place of each cell; what another keeps lasts as long as that."""
        storages, users = self._storages, self._users
        begin, end = [0] * len(users), [0] * len(users)
        for position, node in enumerate(nodes):
            for cell in storages.touches[node]:
                if not users[cell]:
                    begin[cell] = 2 * position
                end[cell] = 2 * position
                users[cell].append(node)
        for keeper in reversed(range(len(users))):  # it comes after what it keeps
            for cell in storages.then[keeper]:
                end[cell] = max(end[cell], end[keeper])
        if not self.up:
            return begin, end
        last = 2 * (len(nodes) - 1)
        return [last - place for place in end], [last - place for place in begin]

    def _changes(self, wanted: Mapping[fx.Node, int]) -> list[_Change]:
        """By how much live bytes change, and between which places, if all moves are made."""
        touches, size = self._storages.touches, self._storages.size
        reached: dict[int, int] = {}
        """The farthest gap from which each cell is touched."""
        for node, gap in wanted.items():
            for cell in touches[node]:
                reached[cell] = max(reached.get(cell, gap), gap)
        begun = [(cell, *self._beginning(cell, wanted)) for cell in reached]
        ended = self._longer(reached).items()
        changes = [
            *(_Change(cell, True, self._begin[cell], last, -size[cell], into_gap) for cell, last, into_gap in begun),
            *(_Change(cell, False, self._end[cell] + 1, gap, size[cell], True) for cell, gap in ended),
        ]
        return [change for change in changes if change.first <= change.last]

    def _longer(self, reached: Mapping[int, int]) -> dict[int, int]:
        """The cells that end farther than they did, with all that these keep, and where."""
        longer = {cell: gap for cell, gap in reached.items() if gap > self._end[cell]}
        waiting = [] if self.up else list(longer)
        while waiting:
            cell = waiting.pop()
            for kept in self._storages.then[cell]:
                if longer[cell] > max(self._end[kept], longer.get(kept, 0)):
                    longer[kept] = longer[cell]
                    waiting.append(kept)
        return longer

    def _beginning(self, cell: int, wanted: Mapping[fx.Node, int]) -> tuple[int, bool]:
        """The last place where a cell is not alive yet after all moves, and whether it begins in a gap behind that."""
        users, unchanged = self._users[cell], (self._begin[cell] - 1, False)
        nearest = users[-1] if self.up else users[0]
        if not self.up:  # the others use what the first one makes: they are farther, wherever they go
            return (wanted[nearest], True) if nearest in wanted else unchanged
        if cell in self._kept:
            return unchanged
        found, into_gap = self.unlimited, False
        for looked_at, user in enumerate(reversed(users)):
            place = wanted[user] + 1 if user in wanted else self._place[user]
            if looked_at == _LOOKED_AT or place <= self._begin[cell]:
                return unchanged
            if place < found:
                found, into_gap = place, user in wanted
            if user not in wanted and place % 2 == 0:  # it never moved: the others are farther
                break
        return found - 1, into_gap

    def _while_running(self, wanted: Mapping[fx.Node, int], changes: Iterable[_Change]) -> int:
        """By how much nodes that rise together, or the last of them, lift live bytes where they run."""
        made, freed = Counter[fx.Node](), Counter[fx.Node]()
        for change in changes:
            users = self._users[change.cell]
            if not change.begins:
                made[users[0]] += change.bytes
            elif change.into_gap:
                freed[next(user for user in reversed(users) if user in wanted)] -= change.bytes
        most = more = 0
        for node in wanted:
            more += made[node]
            most = max(most, more)
            more = max(0, more - freed[node])
        return most

    def _arriving(self, changes: Iterable[_Change], low: int, high: int, most_more: int) -> Tensor:
        """At each place, the most that is alive if it is the gap where the moves end."""
        gained = [] if self.up else [change for change in changes if change.bytes > 0]
        return self._near[low : high + 1] + most_more + _sums(gained, low, high)

    def _limit(self, changes: Sequence[_Change], most_more: int) -> int:
        """The farthest gap that moves may reach with live bytes up to the peak everywhere."""
        if not any(change.bytes > 0 for change in changes):
            return self.unlimited
        changes = [change for change in changes if change.bytes]
        low, high = _reach(changes)
        passing = self._most[low : high + 1] + _sums(changes, low, high, passing=True)
        arriving = self._arriving(changes, low, high, most_more)
        over = (passing > self.peak).nonzero()
        farthest = low + int(over[0]) if len(over) else self.unlimited
        for gap in sorted({change.last for change in changes if change.into_gap}):
            if gap < farthest and int(arriving[gap - low]) > self.peak:
                farthest = gap - 1
        if farthest == self.unlimited:
            return farthest
        fits = (arriving[: farthest - low + 1] <= self.peak).tolist()
        gaps = range(farthest - 1 + farthest % 2, low - 1, -2)
        return next((gap for gap in gaps if fits[gap - low]), low - 1 - low % 2)

    def _apply(self, changes: Sequence[_Change], most_more: int) -> None:
        for change in changes:
            if change.begins:
                self._begin[change.cell] = change.last + 1
            else:
                self._end[change.cell] = change.last
        changes = [change for change in changes if change.bytes]
        if not changes:
            return
        low, high = _reach(changes)
        arriving = self._arriving(changes, low, high, most_more)
        self._near[low : high + 1] += _sums(changes, low, high)
        self._most[low : high + 1] += _sums(changes, low, high, passing=True)
        for change in changes:
            if change.into_gap:
                self._most[change.last] = torch.maximum(self._most[change.last], arriving[change.last - low])


class _Change(NamedTuple):
    """Bytes more, or fewer, from one place to another, since a cell ends later or begins later: up to a gap to which a
    node moves, or to before a place where another one stands."""

    cell: int
    begins: bool
    first: int
    last: int
    bytes: int
    into_gap: bool

    def until(self, limit: int) -> _Change:
        return self._replace(last=limit, into_gap=True) if limit < self.last else self


def _reach(changes: Iterable[_Change]) -> tuple[int, int]:
    """The first and the last place that changes concern."""
    return max(0, min(change.first for change in changes) - 1), max(change.last for change in changes)


def _sums(changes: Iterable[_Change], low: int, high: int, *, passing: bool = False) -> Tensor:
    """What changes add up to from one place to another; `passing` a gap, for those who went there before.

    These do not see what a node brings to their gap; but what ended in it, before they ran, and ends farther now.
    """
    steps = torch.zeros(high - low + 2, dtype=torch.int64)
    for change in changes:
        ended_in_gap = not change.begins and change.first % 2 == 0
        steps[change.first - (passing and ended_in_gap) - low] += change.bytes
        steps[change.last + 1 - (passing and change.into_gap) - low] -= change.bytes
    return steps.cumsum(0)[:-1]
