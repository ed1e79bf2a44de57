"""Which values to compute again, or to move to the host: for less and less memory, the choices that take the least
time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crossfade.schedule.host_moves import Room, Stay, standing_still
from crossfade.schedule.kept_values import NONE, Choice, KeptValues

_RUNGS = ((2_000, 64), (math.inf, 32))
"""A ladder of limits goes down by this share of the natural peak at a time, in programs of up to so many nodes, and by
less near its end."""
_FINEST = 16
"""The last steps down are this much smaller."""
_FAR_BELOW = (0.9, 0.7, 0.4)
"""Shares of a peak to aim for where no lower one is found nearby."""
_SMALL = 10_000
"""Values that are a smaller share of the peak are not worth computing again by themselves."""
SMALL_MOVE = 2_000
"""Values that are a smaller share of the peak are not worth moving: each takes two launches and two waits."""
_ROUNDS = 60
"""At most so many times choices are added for one limit."""
_CHAIN = 64
"""What takes a longer chain of values that are not there is not considered by itself."""
_TRIES = 30_000
"""Nodes looked at to leave out, at one limit, what is not needed after all: a few times a small program."""
_PAIRS = 16
"""Values of which pairs are exchanged too, in programs that have no more."""


@dataclass(frozen=True)
class Frontier:
    """Choices from the fastest to the leanest; no choice is both slower and larger than another.

    It does not depend on any budget, so that a larger one never leads to a slower choice.
    """

    choices: tuple[Choice, ...]

    def within(self, limit: float) -> Choice | None:
        """The fastest choice whose peak is within a limit; None if there is none."""
        return next((choice for choice in self.choices if choice.peak <= limit), None)

    @property
    def least(self) -> Choice:
        """The choice of the least memory."""
        return self.choices[-1]


def frontier(values: KeptValues, always: Iterable[int] = ()) -> Frontier:
    """The choices worth taking, found by a ladder of limits: what costs the least for each byte and moment that is too
    much is added first, with all that it takes; then what turns out not to be needed is left out again.

    `always` are cells that are computed again in any case.

    >>> from crossfade.cost.timeline import Costs
    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4] = input("x")
    ... a: f32[4] = aten.exp(x)
    ... b: f32[4] = aten.exp(a)
    ... c: f32[4] = aten.exp(b)
    ... d: f32[4] = aten.exp(c)
    ... e: f32[4] = aten.mul.Tensor(d, c)
    ... f: f32[4] = aten.mul.Tensor(e, b)
    ... g: f32[4] = aten.mul.Tensor(f, a)
    ... return output("g", g)
    ... ''')
    >>> found = frontier(KeptValues(program, Costs(dict.fromkeys(program.graph.nodes, 1.0), {}, {})))
    >>> [(choice.peak, choice.seconds) for choice in found.choices]
    [(64, 0), (48, 1.0)]
    """
    begin = values.choose(always)
    found = _ladder(values, _Search(values, begin, moving=False), begin)
    if values.host is not None:  # what moves may stand in the way of what would be better computed again
        found += _ladder(values, _Search(values, begin, moving=True), begin)
    return Frontier(_undominated(found))


def _ladder(values: KeptValues, search: _Search, begin: Choice) -> list[Choice]:
    """Choices for lower and lower limits, until none is found."""
    found = [begin]
    rungs = next(rungs for most, rungs in _RUNGS if len(values.nodes) <= most)
    step = max(1, found[0].peak // rungs)
    finest = max(1, step // _FINEST)
    while True:
        limit = found[-1].peak - step
        reached = search.within(limit, found[-1])
        if reached is None and step > finest:
            step = max(finest, step // 4)
            continue
        reached = reached or search.far_below(found[-1])
        if reached is None:
            return found
        found.append(reached)


def _undominated(found: Sequence[Choice]) -> tuple[Choice, ...]:
    kept: list[Choice] = []
    for choice in sorted(found, key=lambda choice: (choice.seconds, choice.peak, len(choice.picked))):
        if not kept or choice.peak < kept[-1].peak:
            kept.append(choice)
    return tuple(kept)


@dataclass(frozen=True)
class _Candidate:
    """Cells to compute again together, or one that moves: what they take and free between two positions."""

    picked: frozenset[int]
    seconds: float
    size: int
    start: int
    end: int
    stay: Stay | None = None
    """What moves, under computation."""


class _Search:
    def __init__(self, values: KeptValues, begin: Choice, *, moving: bool) -> None:
        self.values, self.always = values, begin.picked
        smallest = begin.peak / _SMALL
        self.reads = [values.reads(cell) if ok else [] for cell, ok in enumerate(values.eligible)]
        self.seconds = [sum(values.seconds[index] for index in values.makers(cell)) for cell in range(len(values.size))]
        self.worth = [
            cell
            for cell, ok in enumerate(values.eligible)
            if ok and values.late_start[cell] != NONE and cell not in begin.cells and values.size[cell] >= smallest
        ]
        begun = values.moved(begin.picked)
        self.may_move = [
            cell
            for cell, why_not in enumerate(values.why_stays)
            if moving
            and not why_not
            and values.size[cell] >= begin.peak / SMALL_MOVE
            and cell not in begun
            and cell not in begin.cells
        ]
        self.every = [*self.worth, *(values.move(cell, at_once=how) for cell in self.may_move for how in self._hows())]

    def _hows(self) -> tuple[bool, ...]:
        """The ways to move, as whether at once."""
        return (False, True) if self.values.host is not None and self.values.host.apart else (True,)

    def within(self, limit: int, begin: Choice) -> Choice | None:
        """The fastest choice found within a limit, from a choice for a larger one; or, in small programs, from none."""
        found = [self._added(limit, begin)]
        if len(self.every) <= _PAIRS * 4 and begin.picked != self.always:
            found.append(self._added(limit, self.values.choose(self.always)))
        fitting = [self._left_out(choice, limit) for choice in found if choice.peak <= limit]
        return min(fitting, key=lambda choice: (choice.seconds, choice.peak), default=None)

    def far_below(self, begin: Choice) -> Choice | None:
        """A choice of a lower peak, where none a little lower was found: more is too much for a lower limit, so that
        several values are taken together of which none alone would help."""
        for share in _FAR_BELOW:
            choice = self._added(int(begin.peak * share), begin)
            if choice.peak < begin.peak:
                return self._left_out(choice, choice.peak)
        if len(self.every) > _PAIRS:
            return None
        for count in (1, 2):
            for picked in itertools.combinations(self.every, count):
                choice = self.values.choose((begin.picked ^ set(picked)) | self.always)
                if choice.peak < begin.peak:
                    return self._left_out(choice, choice.peak)
        return None

    def _added(self, limit: int, choice: Choice) -> Choice:
        """A choice with more cells, until it is within the limit or nothing more helps."""
        banned: set[frozenset[int]] = set()
        for _ in range(_ROUNDS):
            excess = (choice.curve - limit).clamp(min=0)
            if choice.peak <= limit:
                return choice
            taken = self._covering(choice, excess, banned)
            if not taken:
                return choice
            before = int(excess.sum())
            while True:
                tried = self.values.choose(choice.picked.union(*[candidate.picked for candidate in taken]))
                after = int((tried.curve - limit).clamp(min=0).sum())
                banned.update(c.picked for c in taken if c.stay is not None and not c.picked <= tried.picked)
                if after < before:
                    choice = tried
                    break
                if len(taken) == 1:
                    banned.add(taken[0].picked)
                    break
                taken = taken[: len(taken) // 2]
        return choice

    def _covering(self, choice: Choice, excess: Tensor, banned: set[frozenset[int]]) -> list[_Candidate]:
        """Candidates that together free what is too much, as far as that can be said of each by itself."""
        hot = torch.cumsum((excess > 0).long(), 0).tolist()
        much = torch.cumsum(excess, 0).tolist()
        scored = []
        for candidate in self._candidates(choice, hot):
            if candidate.picked in banned:
                continue
            places = hot[candidate.end - 1] - hot[candidate.start]
            freed = min(candidate.size * places, much[candidate.end - 1] - much[candidate.start])
            scored.append((candidate.seconds / freed, -freed, candidate.start, candidate))
        scored.sort(key=lambda entry: entry[:3])
        left, taken, known, moving = excess.clone(), list[_Candidate](), set[int](), set[int]()
        room = self._room(choice) if self.may_move else None
        for *_, candidate in scored:
            between = left[candidate.start + 1 : candidate.end]
            cells = self._cells_of(candidate)
            if cells <= known or not moving.isdisjoint(cells) or not len(between) or int(between.max()) <= 0:
                continue
            if candidate.stay is not None and room is not None:
                about = room.taken_by(candidate.stay)
                if about is None:
                    continue
                between = left[about[0] + 1 : about[1] + 1]
            between -= candidate.size
            taken.append(candidate)
            known |= cells
            moving |= cells if candidate.picked != cells else set()
            if int(left.max()) <= 0:
                break
        return taken

    def _candidates(self, choice: Choice, hot: Sequence[int]) -> list[_Candidate]:
        """Each value that could be computed again where too much is alive, which `hot` counts, with what it takes:
        inputs that are gone are computed again too, or kept for it instead."""
        values, found = self.values, []
        ran = {index for _, index in choice.copies}
        for cell in self.worth:
            if cell in choice.cells:
                continue
            start, end = values.early_end[cell], values.late_start[cell]
            if hot[end - 1] == hot[start]:
                continue
            gone = [read for read in self.reads[cell] if self._is_gone(read, end, choice, ran)]
            chain = self._chain(cell, end, choice, ran)
            if chain is not None:
                seconds = sum(self._takes(c, ran) for c in chain)
                found.append(_Candidate(frozenset(chain), seconds, values.size[cell], start, end))
            keeping = values.size[cell] - sum(values.size[read] for read in gone)
            if gone and keeping > 0 and not any(read in choice.cells for read in gone):
                found.append(_Candidate(frozenset([cell]), self._takes(cell, ran), keeping, start, end))
        return [*found, *self._movers(choice, hot)]

    def _movers(self, choice: Choice, hot: Sequence[int]) -> list[_Candidate]:
        """Each value that could move to the host from where too much is alive, with what that takes by itself."""
        values, link, found = self.values, self.values.host, list[_Candidate]()
        if link is None or not self.may_move:
            return found
        moved, ends = values.moved(choice.picked), values.ends(choice.copies).tolist()
        for cell in self.may_move:
            start, end = values.early_end[cell], values.late_start[cell]
            if cell in choice.cells or moved.get(cell) or hot[end - 1] == hot[start]:
                continue
            for at_once in self._hows():
                if not (at_once and link.apart and values.eligible[cell]) and (at_once or cell not in moved):
                    number, stay = values.move(cell, at_once=at_once), values.stay_of(cell, end, at_once)
                    seconds, hidden = standing_still(stay, ends, link), None if at_once else stay
                    found.append(_Candidate(frozenset([number]), seconds, values.size[cell], start, end, hidden))
        return found

    def _room(self, choice: Choice) -> Room | None:
        """What the link can still carry beside a choice's moves."""
        values, link = self.values, self.values.host
        if link is None or not link.apart:
            return None
        room = Room(values.ends(choice.copies), link)
        for cell, at_once in values.moved(choice.picked).items():
            room.taken_by(values.stay_of(cell, values.late_start[cell], at_once))
        return room

    def _cells_of(self, candidate: _Candidate) -> set[int]:
        return {number % len(self.values.size) for number in candidate.picked}

    def _takes(self, cell: int, ran: set[int]) -> float:
        return 0.0 if self.values.maker[cell] in ran else self.seconds[cell]

    def _is_gone(self, cell: int, place: int, choice: Choice, ran: set[int]) -> bool:
        """Whether a value is neither there at a place, nor computed again anyway."""
        values = self.values
        if not values.size[cell]:
            return False
        if cell in choice.cells:
            return values.maker[cell] not in ran and values.early_end[cell] < place
        return max(values.last[cell], choice.ends.get(cell, NONE)) < place

    def _chain(self, cell: int, place: int, choice: Choice, ran: set[int]) -> list[int] | None:
        """A cell and all that has to be computed again for it; None if something cannot be, or it is too much."""
        chain, waiting, known = list[int](), [cell], {cell}
        while waiting:
            now = waiting.pop()
            if not self.values.eligible[now] or len(chain) == _CHAIN:
                return None
            chain.append(now)
            for read in self.reads[now]:
                if read not in known and self._is_gone(read, place, choice, ran):
                    known.add(read)
                    waiting.append(read)
        return chain

    def _left_out(self, choice: Choice, limit: int) -> Choice:
        """A choice without what is not needed to stay within the limit; in small programs some are exchanged, too."""
        values, tries = self.values, _TRIES // len(self.values.nodes)
        for number in self._most_first(choice):
            if (tries := tries - 1) < 0:
                return choice
            choice = self._better(choice, values.choose(choice.picked - {number}), limit)
        if len(self.every) > _PAIRS:
            return choice
        for out in self._most_first(choice):
            for other in self.every:
                if (tries := tries - 1) < 0:
                    return choice
                if out in choice.picked and other not in choice.picked:
                    choice = self._better(choice, values.choose(choice.picked - {out} | {other}), limit)
        return choice

    def _most_first(self, choice: Choice) -> list[int]:
        """What is picked, the slowest first."""
        exposed = {move.cell: move.exposed for move in choice.moves}
        count = len(self.values.size)

        def seconds(number: int) -> float:
            return self.seconds[number] if number < count else exposed.get(number % count, 0.0)

        return sorted(choice.picked - self.always, key=lambda number: (-seconds(number), number))

    @staticmethod
    def _better(choice: Choice, other: Choice, limit: int) -> Choice:
        faster = (other.seconds, len(other.picked)) < (choice.seconds, len(choice.picked))
        return other if faster and other.peak <= limit else choice
