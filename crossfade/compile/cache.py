"""Compiled steps kept for the next process that starts on the same code, shapes and versions.

What is kept is taken where everything that it depends on is the same (`cache_key`), by all ranks or by none. Of a file
that cannot be read the log tells, and the step is compiled.
"""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from crossfade.capture.divide_batch import BatchLayout
from crossfade.capture.optimizer_state import FirstState
from crossfade.compile.agreement import meeting
from crossfade.compile.built import Built
from crossfade.compile.cache_folder import folder, found, used, write
from crossfade.compile.cache_key import CacheKey, key_of
from crossfade.compile.cache_surroundings import content_of
from crossfade.compile.cache_watch import Watched
from crossfade.compile.captured import CaptureMark, owners_of
from crossfade.compile.job import Job
from crossfade.compile.kept import Head, Kept, NotKept, is_sum_of, read_head, read_rest, written
from crossfade.compile.kept_numbers import KeptNumbers
from crossfade.compile.kept_split import KeptSplit
from crossfade.compile.phases import Phase, PhaseRecord, PhaseRecords
from crossfade.compile.training_phases import compared_by
from crossfade.graph.private import tree_flatten
from crossfade.graph.program import InputKind, OutputKind
from crossfade.ranks.alike import RankComparison
from crossfade.ranks.compared import RANDOM_STREAM
from crossfade.shard.tensor.builder import RANK

log = logging.getLogger("crossfade")

_OFF = "CROSSFADE_CACHE is off"


@dataclass(frozen=True)
class _Found:
    """A step that may be taken."""

    path: Path
    head: Head
    kept: Kept
    compared: Sequence[RankComparison]


@dataclass(frozen=True)
class Lookup:
    """A step looked for in the cache: what was found, and how it is kept if it was not."""

    key: CacheKey
    identity: str = ""
    """Of the compilation that follows if nothing was found."""
    found: _Found | None = None
    seconds: float = 0.0

    def fact(self, why_not: str = "") -> dict[str, str]:
        """For the report: that it was taken, or what became of keeping it."""
        if self.found is not None:
            return {"cache": f"taken from {self.found.path.name[:12]}... in {self.seconds:.2f} s"}
        if self.key.why_not == _OFF:
            return {}
        why_not = self.key.why_not or why_not
        return {"cache": f"not kept for other processes: {why_not}" if why_not else "kept for other processes"}


def look_up(job: Job, batch: tuple[Any, ...], first: Mapping[str, FirstState]) -> Lookup:
    """What the cache holds of a step, on all ranks or on none: they compile together."""
    start = time.perf_counter()
    key, candidates = _found_here(job, batch, first)
    identities = [candidate.head.identity for candidate in candidates]
    identity, everyone = uuid.uuid4().hex, job.place.everyone
    if everyone is not None and not everyone.alone:
        with meeting(everyone):
            identity = str(everyone.share(lambda: uuid.uuid4().hex))
            common = everyone.agree("cache", "cache", identities, to="look for a step in the cache")
        if identities and not common:
            log.info("this rank has kept the step, others have not: all compile it")
        identities = common
    chosen = next((each for wanted in identities for each in candidates if each.head.identity == wanted), None)
    if chosen is not None:
        used(chosen.path)
    return Lookup(key, identity, chosen, time.perf_counter() - start)


def not_looked_for(why_not: str) -> Lookup:
    """Of a step that is never kept."""
    return Lookup(CacheKey((), _OFF if folder() is None else why_not))


def _found_here(job: Job, batch: tuple[Any, ...], first: Mapping[str, FirstState]) -> tuple[CacheKey, list[_Found]]:
    where = folder()
    if where is None:
        return CacheKey((), _OFF), []
    key = key_of(job, batch, first)
    if key.why_not:
        log.info("the step is not kept for other processes: %s", key.why_not)
        return key, []
    candidates = (_candidate(path, key.digest, job, batch, first) for path in found(where, key.digest))
    return key, [candidate for candidate in candidates if candidate is not None]


def _candidate(
    path: Path, key: str, job: Job, batch: tuple[Any, ...], first: Mapping[str, FirstState]
) -> _Found | None:
    """A kept step, if it can be read and is the right one for the present numbers."""
    try:
        with path.open(encoding="utf-8") as file:
            head, rest = read_head(file.readline(), job, key, first, str(path)), ""
            if not head.numbers.fit():
                return None
            rest = file.readline().removesuffix("\n")
        if not is_sum_of(head, rest):
            raise ValueError("the rest of it is not what was written")
        kept = read_rest(rest, str(path))
        layout = job.layout(batch)
        compared = compared_by(job, layout, kept.loss_parts, kept.program, draws=kept.draws)
        if why_not := kept.split.why_not(job.place) or _why_unfit(kept, head, compared, job, layout, batch):
            raise ValueError(why_not)
    except FileNotFoundError:  # it was removed just now
        return None
    except Exception as error:  # whatever a file may hold: the step is compiled instead
        log.warning("a kept step cannot be read, and is compiled again (%s: %s): %s", type(error).__name__, error, path)
        return None
    changed = next((name for name, content in head.files.items() if content_of(name) != content), "")
    if changed:
        log.info("%s has changed since the step was kept: it is compiled again", changed)
        return None
    return _Found(path, head, kept, compared)


def _why_unfit(
    kept: Kept, head: Head, compared: Sequence[RankComparison], job: Job, layout: BatchLayout, batch: tuple[Any, ...]
) -> str:
    """Why a program cannot be given what there is; the key knows better, unless somebody has written the file."""
    program, model = kept.program, job.model
    leaves = tree_flatten(batch)[0]
    given = [name for name, leaf in zip(layout.names, leaves, strict=True) if isinstance(leaf, Tensor)]
    alike = {comparison.name: (comparison.numbers,) for comparison in compared}
    known: dict[InputKind, set[str]] = {
        InputKind.PARAMETER: {name for name, _ in model.named_parameters()},
        InputKind.BUFFER: {name for name, _ in model.named_buffers()},
        InputKind.OPTIMIZER_STATE: {f"{name}:{key}" for name, keys in kept.state_keys.items() for key in keys},
        InputKind.INPUT: set(given),
    }
    ranked = job.place.shards is not None
    for item in program.inputs:
        if item.kind is InputKind.SCALAR and not (ranked or item.name in {*head.numbers.step.inputs, "rank"}):
            return f"a program that takes the number {item.name!r}, which there is not"
        if item.kind in known and item.name not in known[item.kind] and not _comes_later(item.name, kept):
            return f"a program that takes {item.kind} {item.name!r}, which there is not"
    if [item.name for item in program.inputs if item.kind is InputKind.INPUT] != given:
        return "a program for other batches"
    numbers = [(item, node) for item, node in program.named_inputs() if item.kind is InputKind.ALIKE]
    taken = {item.name: tuple(node.meta["val"].shape) for item, node in numbers}
    if taken != alike:
        return "numbers that ranks do not compare"
    if not program.outputs or program.outputs[0].kind is not OutputKind.LOSS:
        return "a program without a loss"
    return "" if kept.state_keys.keys() <= known[InputKind.PARAMETER] else "a state of parameters that there are not"


def _comes_later(name: str, kept: Kept) -> bool:
    """Whether an input is made when the model is split."""
    return kept.split.placements is not None and name.rpartition(".")[2] == RANK


def built_from(lookup: Lookup, job: Job, batch: tuple[Any, ...]) -> Built:
    """A step that was found, as one that was just compiled: parameters are split, the optimizer's numbers known."""
    chosen = lookup.found
    assert chosen is not None
    kept, numbers = chosen.kept, chosen.head.numbers
    kept.split.apply(job.place)
    numbers.teach(job.learned)
    for warning in kept.warnings:
        log.warning("%s", warning)
    log.info("took the step from %s, in %.2f s", chosen.path, lookup.seconds)
    facts = {**kept.report.facts, **job.baked_in.facts(), **lookup.fact()}
    taken = PhaseRecord(Phase("cache", _take, ("batch",)), (), lookup.seconds)
    earlier = [replace(record, earlier=True) for record in kept.phases]
    mark = CaptureMark(kept.captured[0], kept.captured[1], kept.loss_parts, (), owners_of(job.model))
    return Built(
        kept.program,
        job.layout(batch),
        replace(kept.report, facts=facts),
        kept.state_keys,
        chosen.compared,
        kept.exchanges,
        kept.shortfalls,
        PhaseRecords([taken, *earlier]),
        mark,
        numbers.step,
        origin=kept.origin,
    )


def _take(step: Any) -> None:
    """Take what an earlier process has compiled."""


def keep(lookup: Lookup, built: Built, job: Job, watched: Watched) -> str:
    """Keep a compiled step for other processes, within the size limit; or say why not."""
    where = folder()
    if lookup.key.why_not or where is None:
        return lookup.key.why_not
    why_not = watched.why_not() or _kept_in(where, lookup, built, job, watched)
    if why_not:
        log.info("the step is not kept for other processes: %s", why_not)
    return why_not


def _kept_in(where: Path, lookup: Lookup, built: Built, job: Job, watched: Watched) -> str:
    draws = any(invariant.name == RANDOM_STREAM for each in built.comparisons for invariant in each.invariants)
    split, numbers = KeptSplit.of(job.place), KeptNumbers.of(built.numbers, job.learned)
    kept = Kept.of(built, draws=draws, warnings=tuple(watched.warnings), split=split)
    ways = sorted(branch.text for branch in numbers.branches), sorted(numbers.changing)
    path = where / f"{lookup.key.digest}-{hashlib.sha256(repr(ways).encode()).hexdigest()[:16]}.json"
    try:
        if not _is_written(path, lookup.identity):
            write(path, written(kept, numbers, job, lookup.key.digest, lookup.identity))
    except (NotKept, OSError) as error:
        return str(error)
    return ""


def _is_written(path: Path, identity: str) -> bool:
    """Whether another rank has written the same already."""
    try:
        with path.open(encoding="utf-8") as file:
            return f'"identity": "{identity}"' in file.read(500)
    except (OSError, UnicodeDecodeError):
        return False
