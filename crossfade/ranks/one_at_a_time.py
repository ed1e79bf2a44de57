"""One capture at a time: tracing changes state of torch's, and of the model, that threads share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class OneAtATime:
    """A lock that its holder may take again, and may hand over while it waits for other ranks.

    Two ranks that capture two steps in two threads, each another one first, would otherwise wait for each other.

        >>> lock = OneAtATime()
        >>> with lock, lock, lock.handed_over():
        ...     lock.is_held()
        False
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None
        self._depth = 0

    def __enter__(self) -> OneAtATime:
        if not self._is_mine():
            self._lock.acquire()
            self._holder = threading.get_ident()
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._holder = None
            self._lock.release()

    @contextmanager
    def handed_over(self) -> Iterator[None]:
        """Let others have it meanwhile, if this thread holds it."""
        if not self._is_mine():
            yield
            return
        depth, self._depth, self._holder = self._depth, 0, None
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
            self._depth, self._holder = depth, threading.get_ident()

    def is_held(self) -> bool:
        """Whether anybody holds it."""
        return self._holder is not None

    def _is_mine(self) -> bool:
        return self._holder == threading.get_ident()


CAPTURING = OneAtATime()
