"""Ranges that grow, against a plain list."""

from __future__ import annotations

from random import Random

from crossfade.schedule.headroom import Headroom


def test_takes_what_a_plain_list_would() -> None:
    for seed in range(200):
        random = Random(seed)
        live = [random.randint(0, 50) for _ in range(random.randint(1, 20))]
        room = Headroom(live, limit=100)
        for _ in range(30):
            first, end = sorted(random.randint(0, len(live)) for _ in range(2))
            size = random.randint(1, 30)
            fits = all(held + size <= 100 for held in live[first:end])
            assert room.take(first, end, size) == fits
            if fits:
                live[first:end] = [held + size for held in live[first:end]]
