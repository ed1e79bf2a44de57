"""The folder in which compiled steps are kept for other processes: safe to share, safe to delete, limited in size.

`CROSSFADE_CACHE` names the folder (by default, or as `1`, it is `crossfade` in the user's cache folder), or is `off`;
`CROSSFADE_CACHE_MB` limits its size (by default 1024): what was used longest ago goes first. A file is written beside
and renamed, so that whoever reads sees all of it or nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger("crossfade")

_LIMIT_MB = 1024.0
_MOST_FOUND = 16
"""Files of one key that are looked at: one for each way that numbers of an optimizer lead through its code."""
_UNFINISHED = 3600.0
"""Seconds after which nobody is still writing a file."""


def folder() -> Path | None:
    """Where compiled steps are kept; None where they are not.

    >>> os.environ["CROSSFADE_CACHE"] = "off"
    >>> folder() is None
    True
    """
    given = os.environ.get("CROSSFADE_CACHE", "")
    if given.lower() in ("off", "0"):
        return None
    if given and given.lower() not in ("1", "on"):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "crossfade"


def limit() -> int:
    """The bytes that the folder may hold."""
    given = os.environ.get("CROSSFADE_CACHE_MB", "")
    try:
        return int(float(given or _LIMIT_MB) * 2**20)
    except (ValueError, OverflowError):
        log.warning("CROSSFADE_CACHE_MB=%s is no number of megabytes: the cache is limited to %d", given, _LIMIT_MB)
        return int(_LIMIT_MB * 2**20)


def found(where: Path, key: str) -> Iterator[Path]:
    """What is kept under a key, the latest first."""
    dated = [(state.st_mtime_ns, path) for path in where.glob(f"{key}-*.json") if (state := _state(path)) is not None]
    yield from [path for _, path in sorted(dated, reverse=True)][:_MOST_FOUND]


def used(path: Path) -> None:
    """Let a file be one that was used last."""
    with contextlib.suppress(OSError):  # it may belong to somebody else, or be gone
        os.utime(path)


def write(path: Path, text: str) -> None:
    """Write a file as a whole or not at all, then let the oldest go."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
    evict(path.parent, limit())


def evict(where: Path, most: int) -> None:
    """Remove what was used longest ago until the rest fits; what others remove meanwhile is gone just as well."""
    files: list[tuple[float, int, Path]] = []
    for path in where.glob("*.json"):
        if (state := _state(path)) is not None:
            files.append((state.st_mtime, state.st_size, path))
    for path in where.glob(".*.tmp"):
        if (state := _state(path)) is not None and time.time() - state.st_mtime > _UNFINISHED:
            _remove(path)
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= most:
            break
        _remove(path)
        total -= size


def _state(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:  # another process has removed it
        return None


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
