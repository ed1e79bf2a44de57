"""Calls that are given a time: they return, raise their own error, or are given up."""

from __future__ import annotations

import threading

import pytest

from crossfade.ranks.call_within import within


def test_a_call_in_time_returns_even_nothing_and_raises_its_own_error() -> None:
    assert within(5.0, "adding", lambda: None) is None
    with pytest.raises(KeyError, match="lost"):
        within(5.0, "looking", lambda: {}["lost"])


def test_a_call_that_takes_too_long_is_given_up_by_name() -> None:
    ended = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer within 0.05 s while waiting for a store"):
        within(0.05, "waiting for a store", ended.wait)
    ended.set()
