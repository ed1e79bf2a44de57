"""Compiled steps kept in a folder, for the next process that starts on the same code, shapes and versions.

`CROSSFADE_CACHE` names the folder (by default `crossfade` in the user's cache folder), or is `off`;
`CROSSFADE_CACHE_MB` limits its size (by default 1024): what was used longest ago goes first. A file is written beside
and renamed, so that whoever reads sees all of it or nothing; the folder may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from crossfade.compile.agreement import meeting
from crossfade.compile.built import Built
from crossfade.compile.cache_key import CacheKey, key_of
from crossfade.compile.job import Job
from crossfade.compile.kept import Kept, NotKept, changed_file, read, written
from crossfade.compile.phases import Phase, PhaseRecord, PhaseRecords
from crossfade.compile.training_phases import compared_by
from crossfade.errors import CrossfadeError, StateError
from crossfade.graph.program import InputKind
from crossfade.ranks.alike import RankComparison
from crossfade.shard.loss_parts import LossParts

log = logging.getLogger("crossfade")

_HIT = "a step kept from before"


def folder() -> Path | None:
    """Where compiled steps are kept; None where they are not.

    >>> os.environ["CROSSFADE_CACHE"] = "off"
    >>> folder() is None
    True
    """
    given = os.environ.get("CROSSFADE_CACHE", "")
    if given.lower() in ("off", "0"):
        return None
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "crossfade"


def limit() -> int:
    """The bytes that the folder may hold."""
    return int(float(os.environ.get("CROSSFADE_CACHE_MB", "1024")) * 2**20)


@dataclass
class Lookup:
    """A step looked for in the cache: what was found, and under which key it is kept if it was not."""

    key: CacheKey
    path: Path | None = None
    kept: Kept | None = None
    compared: Sequence[RankComparison] = ()
    """What ranks compare at every step of what was found."""


def look_up(job: Job, batch: tuple[Any, ...]) -> Lookup:
    """What the cache holds of a step, on all ranks or on none: they compile together."""
    found = _found_here(job, batch)
    everyone = job.place.everyone
    if everyone is None:
        return found
    with meeting(everyone):
        offers = [_HIT] if found.kept is not None else []
        common = everyone.agree("cache", "cache", offers)
    if found.kept is not None and not common:
        log.info("this rank has kept the step, others have not: all compile it")
        return replace(found, kept=None)
    return found


def _found_here(job: Job, batch: tuple[Any, ...]) -> Lookup:
    where = folder()
    if where is None:
        return Lookup(CacheKey((), "CROSSFADE_CACHE is off"))
    key = key_of(job, batch)
    if key.why_not:
        log.info("the step is not kept for other processes: %s", key.why_not)
        return Lookup(key)
    path = where / f"{key.digest}.json"
    kept = _read(path, key.digest)
    if kept is None:
        return Lookup(key, path)
    compared = compared_by(job, kept.program, kept.reduce_op, kept.numbers)
    if not _fits(kept, compared):
        _warn_of(path, StateError("numbers that ranks do not compare", remedy="delete the file"))
        return Lookup(key, path)
    return Lookup(key, path, kept, compared)


def _read(path: Path, key: str) -> Kept | None:
    try:
        text = path.read_text(encoding="utf-8")
        kept = read(text, key, str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError, CrossfadeError) as error:
        _warn_of(path, error)
        return None
    if changed := changed_file(text):
        log.info("%s has changed since the step was kept: it is compiled again", changed)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # used now
    return kept


def _warn_of(path: Path, error: Exception) -> None:
    warnings.warn(f"a kept step cannot be read and is compiled again: {error} ({path})", stacklevel=2)


def keep(lookup: Lookup, built: Built, parts: LossParts | None, loss_is: str, warning: str) -> None:
    """Keep a compiled step for other processes, within the size limit."""
    if lookup.path is None or parts is None:
        return
    reduce_op = "avg" if parts.put_together(loss_is) == "mean" else "sum"
    keys = {name: list(entries) for name, entries in built.state_keys.items()}
    exchanges, numbers = tuple(built.exchanges), tuple(parts.shared_numbers)
    kept = Kept(built.program, built.report, keys, exchanges, reduce_op, numbers, warning)
    try:
        write(lookup.path, written(kept, lookup.key.digest))
    except NotKept as error:
        log.info("the step is not kept for other processes: %s", error)
    except OSError as error:
        log.warning("the step is not kept for other processes: %s", error)


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
    found: list[tuple[float, int, Path]] = []
    for path in [*where.glob("*.json"), *where.glob(".*.tmp")]:
        with contextlib.suppress(OSError):
            state = path.stat()
            if path.suffix == ".json" or time.time() - state.st_mtime > 3600:  # a write that nobody finishes
                found.append((state.st_mtime, state.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= most:
            break
        with contextlib.suppress(OSError):
            path.unlink()
        total -= size


def built_from(found: Lookup, job: Job, batch: tuple[Any, ...], seconds: float) -> Built:
    """A kept step as one that was just compiled, in so many seconds."""
    kept = found.kept
    assert kept is not None
    facts = {**kept.report.facts, **job.baked_in.facts(), "capture": f"{seconds:.1f} s, kept from before"}
    phase = Phase("cache", _take, ("batch",))
    records = PhaseRecords([PhaseRecord(phase, kept.program.history, seconds)])
    report, layout = replace(kept.report, facts=facts), job.layout(batch)
    return Built(kept.program, layout, report, kept.state_keys, found.compared, kept.exchanges, (), records)


def _take(step: Any) -> None:
    """Take what an earlier process has compiled."""


def _fits(kept: Kept, compared: Sequence[RankComparison]) -> bool:
    """Whether a program takes the numbers that ranks will compare."""
    inputs = [(item, node) for item, node in kept.program.named_inputs() if item.kind is InputKind.ALIKE]
    taken = {item.name: tuple(node.meta["val"].shape) for item, node in inputs}
    return taken == {comparison.name: (comparison.numbers,) for comparison in compared}
