"""A computing lane and links beside it, as time goes on: what every simulation and forecast here counts with."""

from __future__ import annotations

from collections.abc import Sequence


class Lanes:
    """When the computing lane and each link are free. Computation follows computation, and links carry in turn.

    `slows` has for each link by which share computation slows down while it carries something.

        >>> lanes = Lanes([0.5])
        >>> arrives = lanes.carry(3.0)
        >>> lanes.compute(1.0)  # half as long again, while the link is busy
        >>> lanes.now, lanes.wait(arrives), lanes.now
        (1.5, 1.5, 3.0)
    """

    def __init__(self, slows: Sequence[float]) -> None:
        self.now = 0.0
        self.free = [0.0] * len(slows)
        self._slows = slows if any(slows) else None
        self._calm: list[tuple[int, float, float]] = []

    def compute(self, seconds: float) -> None:
        """Compute for so long, slowed down by all links that are busy."""
        if self._slows is None:
            self.now += seconds
            return
        links = zip(self.free, self._slows, strict=True)
        changes = [(until, share) for until, share in links if until > self.now and share]
        slower = 1 + sum(share for _, share in changes)
        if self._calm:
            slower -= self._spared(changes)
        for until, share in sorted(changes):
            work = (until - self.now) / slower
            if work >= seconds:
                break
            self.now, seconds, slower = until, seconds - work, slower - share
        else:
            slower = 1.0
        self.now += seconds * slower

    def _spared(self, changes: list[tuple[float, float]]) -> float:
        """By which share computation is slowed down less now, since links carry what does not slow it down; `changes`
        get when that begins and ends for each."""
        assert self._slows is not None
        self._calm = [calm for calm in self._calm if calm[2] > self.now]
        spared = 0.0
        for link, start, until in self._calm:
            share = self._slows[link]
            changes.append((until, -share))
            if start > self.now:
                changes.append((start, share))
            else:
                spared += share
        return spared

    def begins(self, link: int = 0) -> float:
        """When a link would carry what is launched now."""
        return max(self.now, self.free[link])

    def carry(self, travel: float, link: int = 0, ready: float | None = None, *, slows: bool = True) -> float:
        """Put on a link what is ready now, or at another time; when it arrives.

        >>> lanes = Lanes([0.5])
        >>> lanes.carry(3.0, slows=False), lanes.carry(3.0)
        (3.0, 6.0)
        >>> lanes.compute(4.0)  # three seconds as if the link were free, the fourth half as long again
        >>> lanes.now
        4.5
        """
        start = max(self.now if ready is None else ready, self.free[link])
        self.free[link] = start + travel
        if not slows and self._slows is not None:
            self._calm.append((link, start, self.free[link]))
        return self.free[link]

    def wait(self, arrival: float) -> float:
        """Stand still until something has arrived; for how long."""
        still = max(0.0, arrival - self.now)
        self.now = max(self.now, arrival)
        return still
