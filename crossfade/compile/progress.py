"""One line on the terminal while a step is compiled: which phase, and for how long already."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import TracebackType
from typing import Self, TextIO

PATIENCE = 2.0
"""Seconds after which a compilation says that it is under way."""
EVERY = 0.5
"""Seconds between two looks at the clock."""
_CLEARED = "\r\x1b[K"


def is_wanted(rank: int, stream: TextIO) -> bool:
    """Whether this process shows progress: the first rank does, on a terminal. `CROSSFADE_PROGRESS` is 1 for a stream
    that is none, and 0 for no line at all.

    >>> import io
    >>> is_wanted(0, io.StringIO())
    False
    """
    asked = os.environ.get("CROSSFADE_PROGRESS", "")
    return rank == 0 and asked != "0" and (asked == "1" or stream.isatty())


class Progress:
    """Shows the phase that is running, once it all has lasted a while; the line is gone at the end.

    >>> import io
    >>> stream = io.StringIO()
    >>> with Progress(stream, patience=0.0, every=0.01) as progress:
    ...     progress.phase("capture")
    ...     time.sleep(0.2)
    >>> "preparing the first step: capture, 0 s" in stream.getvalue(), stream.getvalue().endswith("\\x1b[K")
    (True, True)
    """

    def __init__(
        self,
        stream: TextIO | None,
        *,
        what: str = "preparing the first step",
        patience: float | None = None,
        every: float = EVERY,
    ) -> None:
        self._stream, self._what, self._every = stream, what, every
        self._patience = PATIENCE if patience is None else patience
        self._phase, self._shown = "", False
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def on_terminal(cls, rank: int, what: str) -> Self:
        """Progress on stderr where it is wanted, otherwise none."""
        stream = sys.stderr
        return cls(stream if stream is not None and is_wanted(rank, stream) else None, what=what)

    def phase(self, name: str) -> None:
        """What is done from now on."""
        self._phase = name

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        if self._stream is not None:
            self._thread = threading.Thread(target=self._show, name="crossfade progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        if self._stream is not None and self._shown:
            self._write(_CLEARED)

    def _show(self) -> None:
        wait = self._patience
        while not self._done.wait(wait):
            wait, seconds = self._every, time.monotonic() - self._start
            phase = f": {self._phase}" if self._phase else ""
            self._write(f"{_CLEARED}crossfade: {self._what}{phase}, {seconds:.0f} s")
            self._shown = True

    def _write(self, text: str) -> None:
        assert self._stream is not None
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # a terminal that has gone must not end the training
            self._done.set()
