"""Ranks that die, raise, sleep, or stay away: the others end in time and name them."""

from __future__ import annotations

import os
import time

import pytest
import torch.distributed as dist
from torch import nn

import crossfade as cf
from crossfade.errors import CrossfadeError, RankFailedError
from tests.ranks.test_errors import BATCH, compiled, linear


def train_until(last: str) -> str:
    """Train; rank 1 stops taking part after two steps, in the way named. Returns what rank 0 sees, and how soon."""
    step = compiled(linear(), mesh={"dp": 2}, timeout=4)
    for number in range(5):
        if dist.get_rank() == 1 and number == 2:
            if last == "dies":
                os._exit(7)
            if last == "raises":
                raise ValueError("out of data")
            time.sleep(8)
            return "slept"
        start = time.monotonic()
        try:
            step(*BATCH)
        except RankFailedError as error:
            return f"after {time.monotonic() - start:.0f} s: {error}"
    return "no error"


@pytest.mark.ranks
def test_a_rank_that_dies_is_named_with_the_collective() -> None:
    with (
        cf.Ranks(2, timeout=60, start="forkserver") as world,
        pytest.raises(RankFailedError, match=r"rank 1 died \(exit code 7\)") as caught,
    ):
        world.run(_die_and_report)
    assert "rank 0 also raised" in str(caught.value)
    assert "a collective failed in step 2: all_reduce" in str(caught.value)
    assert "rank 1 has ended" in str(caught.value)


def _die_and_report() -> None:
    result = train_until("dies")
    raise RuntimeError(result)


@pytest.mark.ranks
def test_a_rank_that_raises_is_named() -> None:
    with (
        cf.Ranks(2, timeout=60, start="forkserver") as world,
        pytest.raises(RankFailedError, match="ValueError: out of data on rank 1"),
    ):
        world.run(train_until, "raises")


@pytest.mark.ranks
def test_a_rank_that_sleeps_ends_the_others_within_the_timeout() -> None:
    with cf.Ranks(2, timeout=60, start="forkserver") as world:
        first, second = world.run(train_until, "sleeps")
    assert second == "slept"
    seconds = int(first.removeprefix("after ").split()[0])
    assert 3 <= seconds <= 12, "the timeout is 4 s"
    assert "rank 1 has not reached step 2 (last seen in step 1)" in first


@pytest.mark.ranks
def test_a_call_that_takes_too_long_ends_all_ranks() -> None:
    with cf.Ranks(2, timeout=60, start="forkserver") as world:
        with pytest.raises(RankFailedError, match="rank 0 is still running after 3 s"):
            world.run(time.sleep, 30, timeout=3)
        assert world.run(os.path.basename, "a/b") == ["b", "b"]


def _one_changes(changing: int) -> str:
    """Only one rank changes what the program was captured with."""
    model = nn.Sequential(linear(), nn.Dropout(0.0))
    step = compiled(model, mesh={"dp": 2}, timeout=6)
    step(*BATCH)
    if dist.get_rank() == changing:
        model[1].p = 0.5
    try:
        step(*BATCH)
    except RankFailedError as error:
        return str(error)
    return "no error"


@pytest.mark.ranks
@pytest.mark.parametrize("changing", [0, 1])
def test_a_rank_that_alone_captures_again_says_why(changing: int) -> None:
    with cf.Ranks(2, timeout=60, start="forkserver") as world:
        said = world.run(_one_changes, changing)
    why = "captures again, since model.1.p changed from 0.0 to 0.5"
    assert f"; this rank {why}: expected every rank to capture again at the same step" in said[changing]
    assert "a collective failed in step 1" in said[1 - changing] and f"it {why}" in said[1 - changing]


def _stays_away(opens: bool) -> str:
    """What a rank hears when the other does not come: to its first step, or to open the step at all."""
    model = linear()
    try:
        step = compiled(model, mesh={"dp": 2}, timeout=3) if opens or dist.get_rank() == 0 else None
        if dist.get_rank() == 1:
            time.sleep(6)
        elif step is not None:
            step(*BATCH)
    except CrossfadeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.ranks
@pytest.mark.parametrize("opens", [True, False])
def test_a_rank_that_stays_away_is_named(opens: bool) -> None:
    with cf.Ranks(2, timeout=60, start="forkserver") as world:  # not the pool: these have lost count of each other
        first, second = world.run(_stays_away, opens)
    assert first.startswith("RankFailedError: rank 1 did not come to compare programs within 3 s")
    assert second == "no error"
