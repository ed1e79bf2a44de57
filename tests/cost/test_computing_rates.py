"""Rounds of measured rates: two in a row that agree are believed, others are told of."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from crossfade import Ranks
from crossfade.cost.computing_rates import DTYPES, ComputingRates, RatesClock, steady
from crossfade.cost.ranks_clock import CalibratingRanks


def rates(products: float, overhead: float = 1e-6) -> ComputingRates:
    return ComputingRates({"float32": products}, {"float32": 0.5}, 1e9, overhead)


@pytest.mark.parametrize(
    ("measured", "believed", "apart"),
    [
        ([100, 105], 102.5, None),
        ([65, 113, 110], 111.5, None),  # the first round was disturbed
        ([100, 80, 100, 80], 90, 1.25),
    ],
)
def test_two_rounds_in_a_row_that_agree_are_believed(measured: list[float], believed: float, apart: float | None):
    others = iter([rates(products) for products in measured[1:]])
    found, differed = steady([rates(measured[0])], others.__next__)
    assert (found.flops, differed) == ({"float32": believed}, apart)
    assert next(others, None) is None


def test_everything_else_is_of_the_rounds_that_agree():
    others = iter([rates(100, overhead=2e-6), rates(100, overhead=4e-6)])
    assert steady([rates(50, overhead=9e-6)], others.__next__)[0].overhead == 3e-6


def two_rounds() -> list[ComputingRates]:
    clock = RatesClock("cpu", CalibratingRanks.of(dist.group.WORLD), seconds=0.2)
    return [clock.round(), clock.round()]


def test_ranks_measure_the_same_round(ranks: Callable[[int], Ranks]):
    first, second = ranks(2).run(two_rounds)
    assert first == second
    for found in first:
        assert list(found.flops) == [str(dtype).removeprefix("torch.") for dtype in DTYPES]
        assert all(0 < value < 1e15 for value in _numbers(found))


def _numbers(found: ComputingRates) -> Iterator[float]:
    yield from found.flops.values()
    yield from found.convolutions.values()
    yield from (found.memory_bandwidth, found.overhead)
