"""When values that move to the host leave the device and come back: a timetable of the two ways, as numbers.

Time is computing time: seconds from the start, as if computation never stood still. While it does stand still for a
copy, a link goes on carrying, which costs the others nothing. A value's copy to the host begins as soon as it is made,
in order; it begins to come back as late as its next use allows, given what has to be back by then and later. A value
that moves at once instead is waited for where its early uses end, and comes back right before its next use.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crossfade.cost.machine_parts import HostLink

_BINS = 256
"""Stretches of time for which a link's room is counted while choosing."""


@dataclass(frozen=True, slots=True)
class Stay:
    """A value that might lie on the host: the position that makes it, its last early and its next use, its bytes."""

    cell: int
    made: int
    early_end: int
    late: int
    size: int
    at_once: bool


@dataclass(frozen=True, slots=True)
class Move:
    """When a value is on the host only: after the node at `left`, until after the one at `back`; and for how many
    seconds computation stands still for that."""

    cell: int
    left: int
    back: int
    exposed: float


def timetable(stays: Iterable[Stay], ends: Tensor, link: HostLink) -> list[Move]:
    """The moves of some values, those left out that would be on their way for all of the time between their uses.

    `ends` has the time at which each position ends.

    >>> link, ends = HostLink(0.0, 1.0), torch.arange(1.0, 21.0, dtype=torch.float64)
    >>> timetable([Stay(0, 0, 1, 19, 4, False), Stay(1, 2, 3, 18, 5, False), Stay(2, 4, 5, 10, 9, False)], ends, link)
    [Move(cell=0, left=4, back=14, exposed=0.0)]
    >>> timetable([Stay(0, 0, 1, 19, 4, True)], ends, link)
    [Move(cell=0, left=1, back=18, exposed=7.0)]
    """
    stays = list(stays)
    if not link.apart:
        return [Move(s.cell, s.early_end, s.late - 1, 2 * link.seconds(s.size)) for s in stays]
    times, start = ends.tolist(), 2 * link.latency
    while True:
        gone, back = _leaving(stays, times, link), _returning(stays, times, link)
        found = []
        for stay in stays:
            (left, stood), (begins, stands) = gone[stay.cell], back[stay.cell]
            if left < begins:
                found.append(Move(stay.cell, left, begins, start + stood + stands))
        if len(found) == len(stays):
            return found
        there = {move.cell for move in found}  # what is left out leaves the link to the others
        stays = [stay for stay in stays if stay.cell in there]


def standing_still(stay: Stay, ends: Sequence[float], link: HostLink) -> float:
    """For how long computation stands still for the move of one value alone.

    >>> standing_still(Stay(0, 0, 1, 19, 4, True), range(1, 21), HostLink(0.0, 1.0))
    7.0
    """
    seconds = link.seconds(stay.size)
    if not link.apart:
        return 2 * seconds
    if not stay.at_once:
        return 2 * link.latency
    return 2 * link.latency + max(0.0, ends[stay.made] + seconds - ends[stay.early_end]) + seconds


def _leaving(stays: Sequence[Stay], times: Sequence[float], link: HostLink) -> dict[int, tuple[int, float]]:
    """After which position each has left, and for how long that is waited for."""
    free, found = 0.0, {}
    for stay in sorted(stays, key=lambda stay: (stay.made, stay.cell)):
        arrival = max(times[stay.made], free) + link.seconds(stay.size)
        stood = max(0.0, arrival - times[stay.early_end]) if stay.at_once else 0.0
        free = arrival - stood
        place = stay.early_end if stay.at_once else bisect_left(times, free, lo=stay.early_end)
        found[stay.cell] = place, stood
    return found


def _returning(stays: Sequence[Stay], times: Sequence[float], link: HostLink) -> dict[int, tuple[int, float]]:
    """After which position each begins to come back, and for how long that is waited for."""
    found = {stay.cell: (stay.late - 1, link.seconds(stay.size)) for stay in stays if stay.at_once}
    begin = float("inf")
    for stay in sorted((stay for stay in stays if not stay.at_once), key=lambda stay: (-stay.late, stay.cell)):
        begin = min(begin, times[stay.late - 1]) - link.seconds(stay.size)
        found[stay.cell] = bisect_right(times, begin, hi=stay.late) - 1, 0.0
    return found


class Room:
    """How much a link can still carry each way, by stretches of time: what is quickly asked while choosing.

    >>> room = Room(torch.arange(1.0, 257.0, dtype=torch.float64), HostLink(0.0, 1.0))
    >>> room.taken_by(Stay(0, 0, 1, 200, 50, False)), room.taken_by(Stay(1, 10, 11, 200, 50, False))
    ((50, 149), None)
    """

    def __init__(self, ends: Tensor, link: HostLink) -> None:
        self.ends, self.link = ends.tolist(), link
        total = self.ends[-1] if self.ends else 0.0
        self.length = total / _BINS if total > 0 else 1.0
        self._out, self._in = [self.length] * _BINS, [self.length] * _BINS
        edges = torch.arange(1, _BINS + 1, dtype=ends.dtype) * self.length
        self._last = torch.searchsorted(ends, edges * (1 - 1e-9)).tolist()
        """The position at which each stretch ends."""

    def taken_by(self, stay: Stay) -> tuple[int, int] | None:
        """Let a value take its room; between which positions about it is then on the host only. None, and nothing is
        taken, if it would be on its way for all of the time."""
        if stay.at_once or not self.link.apart:
            return stay.early_end, stay.late - 1
        seconds = self.link.seconds(stay.size)
        out = self._found(self._out, range(self._bin(self.ends[stay.made]), _BINS), seconds)
        into = self._found(self._in, range(self._bin(self.ends[stay.late - 1]) - 1, -1, -1), seconds)
        if not out or not into or min(into) < 1:
            return None
        left, back = max(stay.early_end, self._last[max(out)]), self._last[min(into) - 1]
        if left >= back:
            return None
        for room, taken in ((self._out, out), (self._in, into)):
            for index, part in taken.items():
                room[index] -= part
        return left, back

    def _bin(self, time: float) -> int:
        return min(_BINS - 1, int(time / self.length))

    @staticmethod
    def _found(room: Sequence[float], bins: range, seconds: float) -> dict[int, float]:
        """Room in these stretches, in order, for so long; nothing if there is too little."""
        found: dict[int, float] = {}
        for index in bins:
            if room[index] > 0:
                found[index] = min(room[index], seconds)
                seconds -= found[index]
            if seconds <= 0:
                return found
        return {}
