"""Communication passes alone and all together, on sampled programs and real ranks: equal bits, equal launches.

Each program tries every pass alone, then all of them, with sampled options. Programs that write values, and return
some that share memory, try some passes of a whole pipeline: inputs and results share memory as they did.

120 programs on two ranks by default, and 30 that write; by `make fuzz` 3,000 of each, and 5,000 on four.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.properties.exchange_job import run_alone_and_together, run_optimized

TIMES = 10 if settings.default.max_examples > 1000 else 1
"""The profile `fuzz` has ten times as many."""


def check(pool: Any, numbers: list[int], ranks: int, job: Callable[..., Any] = run_alone_and_together) -> None:
    found = pool.run(job, numbers, ranks)
    for rank, one in enumerate(found):
        assert "difference" not in one, f"rank {rank}: {one['difference']}"
    assert all(one.keys() == found[0].keys() for one in found)
    for label in found[0]:
        for one in found[1:]:
            assert one[label] == found[0][label], f"ranks launch differently after {label}"


NUMBERS = st.lists(st.integers(0, 999), min_size=24, max_size=120)


@pytest.mark.ranks
@settings(max_examples=120 if TIMES == 1 else 3_000)
@given(numbers=NUMBERS)
def test_on_two_ranks(ranks: Any, numbers: list[int]) -> None:
    check(ranks(2), numbers, 2)


@pytest.mark.models
@pytest.mark.ranks
@settings(max_examples=500 * TIMES)
@given(numbers=NUMBERS)
def test_on_four_ranks(ranks: Any, numbers: list[int]) -> None:
    check(ranks(4), numbers, 4)


@pytest.mark.ranks
@settings(max_examples=30 if TIMES == 1 else 3_000)
@given(numbers=st.lists(st.integers(0, 999), min_size=24, max_size=80))
def test_written_and_shared_memory(ranks: Any, numbers: list[int]) -> None:
    check(ranks(2), numbers, 2, run_optimized)
