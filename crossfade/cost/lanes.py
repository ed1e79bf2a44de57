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

    def compute(self, seconds: float) -> None:
        """Compute for so long, slowed down by all links that are busy."""
        if self._slows is None:
            self.now += seconds
            return
        links = zip(self.free, self._slows, strict=True)
        busy = sorted((until, share) for until, share in links if until > self.now and share)
        slower = 1 + sum(share for _, share in busy)
        for until, share in busy:
            work = (until - self.now) / slower
            if work >= seconds:
                break
            self.now, seconds, slower = until, seconds - work, slower - share
        else:
            slower = 1.0
        self.now += seconds * slower

    def begins(self, link: int = 0) -> float:
        """When a link would carry what is launched now."""
        return max(self.now, self.free[link])

    def carry(self, travel: float, link: int = 0, ready: float | None = None) -> float:
        """Put on a link what is ready now, or at another time; when it arrives."""
        self.free[link] = max(self.now if ready is None else ready, self.free[link]) + travel
        return self.free[link]

    def wait(self, arrival: float) -> float:
        """Stand still until something has arrived; for how long."""
        still = max(0.0, arrival - self.now)
        self.now = max(self.now, arrival)
        return still
