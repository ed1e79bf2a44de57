"""How the work of a function grows, counted in calls: seconds depend on what else the machine does, calls do not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def calls_of(function: Callable[[], Any]) -> int:
    """Function calls, of Python and of C, that `function` makes in this thread."""
    count = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


def grows_linearly(work: Callable[[int], Callable[[], Any]], size: int) -> None:
    """Assert that twice the size makes at most 2.2 times the calls; `work(size)` prepares what is then counted."""
    once, twice = calls_of(work(size)), calls_of(work(2 * size))
    assert twice < 2.2 * once, f"{once} calls at {size}, {twice} at {2 * size}"
