"""What happens while a step is captured that no key can know: files that are read, random numbers drawn in Python; and
what is warned of, so that it can be said again where a kept step is taken.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from crossfade.compile.cache_surroundings import installed

_OF_THE_SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/")
_OF_PACKAGES = (".egg-info", ".dist-info")
"""Folders in which packages say what they offer: torch asks all of them for backends when it first loads Dynamo."""
_SOURCES = (".py", ".pyc", ".so", ".pyi")


@dataclass
class Watched:
    """What was seen while a step was compiled."""

    files: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    drew: bool = False

    def why_not(self) -> str:
        """Why what was captured may not be what another process would capture; empty if nothing speaks against it."""
        if self.files:
            return f"{self.files[0]} was read while it was captured, and may be another one next time"
        return "numbers of Python's or numpy's random generators were drawn while it was captured" if self.drew else ""


@contextlib.contextmanager
def watching() -> Iterator[Watched]:
    """Watch this thread while it compiles.

    >>> with watching() as watched:
    ...     logging.getLogger("crossfade").warning("mind the gap")
    ...     _ = random.random()
    >>> watched.warnings, watched.drew
    (['mind the gap'], True)
    """
    watched, warnings = Watched(), _Warnings()
    _install()
    before = _generators()
    logger = logging.getLogger("crossfade")
    logger.addFilter(warnings)  # a handler would keep Python from showing what has none
    _OPENED[threading.get_ident()] = watched.files
    try:
        yield watched
    finally:
        del _OPENED[threading.get_ident()]
        logger.removeFilter(warnings)
        watched.warnings, watched.drew = warnings.said, _generators() != before


class _Warnings(logging.Filter):
    """Keeps what one thread warns of, and lets all of it through."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep a warning."""
        if record.thread == self._thread and record.levelno >= logging.WARNING:
            self.said.append(record.getMessage())
        return True


def _generators() -> Any:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), (kind, keys.tobytes(), *rest)  # type: ignore[union-attr]


_OPENED: dict[int, list[str]] = {}
"""The files that threads have read which are watched now."""


@functools.cache
def _install() -> None:
    """Hear of every file that is opened, from the first time that a thread is watched: a hook cannot be taken back."""
    sys.addaudithook(_heard)


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or not _OPENED:
        return
    opened = _OPENED.get(threading.get_ident())
    if opened is None or not isinstance(arguments[0], str | bytes | os.PathLike):
        return
    path, (mode, flags) = os.path.realpath(os.fsdecode(arguments[0])), arguments[1:3]
    writes = not ({"r", "+"} & set(mode)) if isinstance(mode, str) else flags & os.O_ACCMODE == os.O_WRONLY
    known = path.startswith((*_OF_THE_SYSTEM, *installed(), sys.prefix, sys.base_prefix)) or path.endswith(_SOURCES)
    known = known or os.path.dirname(path).endswith(_OF_PACKAGES)
    if not writes and not known and os.path.isfile(path):
        opened.append(path)
