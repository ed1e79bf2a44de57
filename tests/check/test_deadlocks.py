"""The fewest ranks that wait for each other, among ranks that are stuck."""

from __future__ import annotations

import pytest

from crossfade.check.deadlocks import shortest_circle
from crossfade.check.walk import Channel, Operation


def stuck(waits: dict[int, list[int]]) -> dict[int, Operation]:
    """For each stuck rank an operation that misses the given ranks."""
    return {
        rank: Operation(Channel("dp", tuple((other, "member") for other in missing)), 0)
        for rank, missing in waits.items()
    }


@pytest.mark.parametrize(
    ("waits", "circle"),
    [
        ({}, []),
        ({0: [0]}, [0]),
        ({0: [1], 1: [0]}, [0, 1]),
        ({0: [1], 1: [2]}, []),  # rank 2 has ended
        ({0: [1], 1: [2], 2: [0]}, [0, 1, 2]),
        ({0: [1], 1: [2], 2: [0, 3], 3: [2]}, [2, 3]),  # a shorter one, found later
        ({0: [1, 2], 1: [3], 2: [0], 3: [0]}, [0, 2]),
    ],
)
def test_the_shortest_circle(waits: dict[int, list[int]], circle: list[int]) -> None:
    assert shortest_circle(stuck(waits)) == circle
