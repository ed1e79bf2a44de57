"""A computing lane and its links: in turn, side by side, slowed down by what travels."""

from __future__ import annotations

import pytest

from crossfade.cost.lanes import Lanes


def test_a_link_carries_in_turn_and_others_beside_it() -> None:
    lanes = Lanes([0.0, 0.0])
    assert [lanes.carry(2.0), lanes.carry(3.0), lanes.carry(1.0, link=1)] == [2.0, 5.0, 1.0]
    lanes.compute(4.0)
    assert lanes.begins() == 5.0 and lanes.begins(1) == 4.0
    assert lanes.carry(1.0, link=1, ready=7.0) == 8.0
    assert lanes.now == 4.0


def test_waiting_stands_still_for_what_has_not_arrived() -> None:
    lanes = Lanes([0.0])
    lanes.compute(2.0)
    assert (lanes.wait(5.0), lanes.now) == (3.0, 5.0)
    assert (lanes.wait(4.0), lanes.now) == (0.0, 5.0)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.5, 1.25),  # both links are busy: two and a half times as long
        (0.8, 2.0),  # exactly until the first is free
        (1.8, 3.5),  # then a second at half as long again
        (0.8 + 4 / 3 + 1, 5.0),  # nothing travels any more
    ],
)
def test_all_that_travels_slows_computation_down(seconds: float, expected: float) -> None:
    """By 1.5 until 2 and by 0.5 until 4, in which work of 0.8 and 4/3 seconds is done."""
    lanes = Lanes([0.5, 1.0])
    lanes.carry(4.0, link=0)
    lanes.carry(2.0, link=1)
    lanes.compute(seconds)
    assert lanes.now == pytest.approx(expected)


@pytest.mark.parametrize("until", range(1, 7))
def test_what_slows_nothing_down_keeps_its_link_busy(until: int) -> None:
    """The first link carries what slows computation by half until 3, then what does not until 4, then the former until
    6; the second what does not until 2, then what doubles the time until 2.5."""
    lanes = Lanes([0.5, 1.0])
    assert [lanes.carry(3.0), lanes.carry(1.0, slows=False), lanes.carry(2.0)] == [3.0, 4.0, 6.0]
    assert [lanes.carry(2.0, 1, slows=False), lanes.carry(0.5, 1)] == [2.0, 2.5]
    work = [2 / 1.5, 0.5 / 2.5, 0.5 / 1.5, 1.0, 2 / 1.5, 1.0]
    lanes.compute(sum(work[:until]))
    assert lanes.now == pytest.approx([2.0, 2.5, 3.0, 4.0, 6.0, 7.0][until - 1])
