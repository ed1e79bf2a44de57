"""Ranks that are started and watched: the first that fails is named, none is left, the rest have time to speak."""

from __future__ import annotations

import time
from typing import Any

import pytest

from crossfade.errors import RankFailedError
from crossfade.ranks.launch import supervise


class Scripted:
    """A process that ends with a code after so many looks, or when it is killed."""

    def __init__(self, looks: int, code: int) -> None:
        self.looks, self.code, self.returncode, self.killed = looks, code, None, False

    def poll(self) -> Any:
        self.looks -= 1
        if self.looks < 0 and self.returncode is None:
            self.returncode = self.code
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            self.killed, self.returncode = True, -9

    def wait(self) -> Any:
        return self.returncode


def supervised(processes: list[Scripted], grace: float) -> str:
    try:
        supervise(processes.__getitem__, len(processes), grace)
    except RankFailedError as error:
        return str(error)
    return "all ended well"


def test_ranks_that_end_well_are_waited_for() -> None:
    processes = [Scripted(2, 0), Scripted(0, 0)]
    assert supervised(processes, 0.0) == "all ended well"
    assert not any(process.killed for process in processes)


def test_the_first_rank_that_fails_is_named_and_others_may_end_in_the_time_of_grace() -> None:
    processes = [Scripted(4, 2), Scripted(0, 3), Scripted(10**9, 0)]
    assert supervised(processes, 0.4).startswith("rank 1 ended with exit code 3. Remedy")
    assert [process.killed for process in processes] == [False, False, True]


def test_all_are_ended_where_one_cannot_be_started() -> None:
    started = Scripted(10**9, 0)

    def start(rank: int) -> Scripted:
        if rank:
            raise OSError("no more processes")
        return started

    begin = time.monotonic()
    with pytest.raises(OSError, match="no more processes"):
        supervise(start, 3, grace=60.0)
    assert started.killed and time.monotonic() - begin < 30.0
