"""Wires and collectives under way, by times that are chosen: when each arrives, and what is said meanwhile."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch

from crossfade.emulated.clock import HostTravel, Together, Wire
from crossfade.errors import RankFailedError


def test_a_wire_carries_one_collective_after_another() -> None:
    wire = Wire()
    assert [wire.book(start, seconds) for start, seconds in ((1.0, 2.0), (1.5, 1.0), (9.0, 0.5))] == [3.0, 4.0, 9.5]


def ignore(late: float) -> None:
    """Nobody asks how late it was."""


def test_a_collective_arrives_when_it_is_due_and_written() -> None:
    tensor = torch.zeros(2)
    work = HostTravel(time.perf_counter() + 60.0, [tensor], lambda: tensor.fill_(7.0), ignore)
    assert not work.is_completed() and not work.is_success() and work.exception() is None
    due = HostTravel(0.0, [tensor], lambda: tensor.fill_(7.0), ignore)
    assert due.wait() and due.is_success() and due.result() == [tensor] and tensor.tolist() == [7.0, 7.0]
    both = Together([work, due])
    assert not both.is_completed() and len(both.result()) == 2


def test_waiting_longer_than_the_timeout_is_an_error_and_values_that_fail_are_raised() -> None:
    work = HostTravel(time.perf_counter() + 60.0, [], None, ignore)
    with pytest.raises(RankFailedError, match=r"a collective takes 60 s more on the emulated fabric: expected at most"):
        work.wait(timedelta(seconds=0.01))

    def fail() -> None:
        raise ValueError("no values")

    large = torch.zeros(2**15)  # written by a thread
    harmed = HostTravel(0.0, [large], fail, ignore)
    with pytest.raises(ValueError, match="no values"):
        harmed.wait()
    assert not harmed.is_success() and isinstance(harmed.exception(), ValueError)
