"""Calls that end in time, also where what they call does not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, what: str, function: Callable[[], T]) -> T:
    """Call a function of torch's that may wait for its store for good; give up after a time.

    It goes on waiting in a thread of its own, that nobody waits for: there is no way to call it back.

        >>> within(5.0, "adding", lambda: 1 + 1)
        2
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name=f"crossfade: {what}", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:g} s while {what}")
    return results[0]
