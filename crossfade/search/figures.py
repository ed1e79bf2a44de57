"""Figures: what is simulated of a step in seconds and bytes, and how a sketch of a few of many is carried on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Figures:
    """What is simulated of one step of one rank. `waits` are the exposed seconds by axis and kind of collective."""

    seconds: float
    computes: float
    waits: Mapping[str, float]
    held: int
    """Bytes of parameters, optimizer state and the batch."""
    alive: int
    """The most bytes of what the step makes at one time, and of buckets that are kept, beside these."""

    @property
    def memory(self) -> int:
        """The most bytes at any time."""
        return self.held + self.alive

    @property
    def exposed(self) -> float:
        """Seconds in which computation stands still for communication."""
        return sum(self.waits.values())

    def further(self, other: Figures, steps: float) -> Figures:
        """What follows if so many further steps change as much as that from another one to this one.

        >>> one, two = Figures(1.0, 1.0, {}, 10, 5), Figures(1.5, 1.5, {"dp all_reduce": 0.1}, 12, 5)
        >>> found = two.further(one, 2)
        >>> found.seconds, found.held, round(found.exposed, 3)
        (2.5, 16, 0.3)
        """

        def moved(here: float, there: float) -> float:
            return max(0.0, here + steps * (here - there))

        causes = {**self.waits, **other.waits}
        waits = {cause: moved(self.waits.get(cause, 0.0), other.waits.get(cause, 0.0)) for cause in causes}
        computes = moved(self.computes, other.computes)
        seconds = max(computes, moved(self.seconds, other.seconds))
        held, alive = (int(moved(*pair)) for pair in ((self.held, other.held), (self.alive, other.alive)))
        return Figures(seconds, computes, waits, held, alive)

    def plus(self, before: Figures, after: Figures) -> Figures:
        """These figures, changed by as much as one sketch differs from another."""
        causes = {**self.waits, **after.waits}
        waits = {
            cause: max(0.0, self.waits.get(cause, 0.0) + after.waits.get(cause, 0.0) - before.waits.get(cause, 0.0))
            for cause in causes
        }
        seconds = self.seconds + after.seconds - before.seconds
        computes = self.computes + after.computes - before.computes
        held, alive = self.held + after.held - before.held, self.alive + after.alive - before.alive
        return Figures(max(seconds, computes), computes, waits, held, alive)
