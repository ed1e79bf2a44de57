"""Tests of times on a machine that does other things too: the best of several tries counts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def best_of_several(test: Callable[..., None], tries: int = 5) -> Callable[..., None]:
    """Let a test fail only if each of several tries does: what is too fast fails every time, what was late does not.

    >>> tries = iter([3, 2, 1])
    >>> @best_of_several
    ... def quick():
    ...     assert next(tries) < 2
    >>> quick()
    """

    @functools.wraps(test)
    def tried(*args: Any, **kwargs: Any) -> None:
        for _ in range(tries - 1):
            try:
                return test(*args, **kwargs)
            except AssertionError:
                continue
        return test(*args, **kwargs)

    return tried
