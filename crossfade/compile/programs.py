"""The programs of one step: one for each kind of batch and setting, found again or compiled."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from crossfade.capture.symbolic_sizes import micro_batch_shapes
from crossfade.compile.built import Built
from crossfade.compile.captured import Captured
from crossfade.compile.compiler import StepCompiler, StepKey
from crossfade.compile.dynamic import Dynamic, Kind
from crossfade.compile.place import Place
from crossfade.compile.step_inputs import StepInputs
from crossfade.execute.bound import Bound
from crossfade.execute.cuda_graph import said_of_replays
from crossfade.execute.executable import Executable
from crossfade.graph import offload
from crossfade.graph.private import tree_map_only
from crossfade.graph.program import InputKind
from crossfade.ranks.one_at_a_time import CAPTURING

log = logging.getLogger("crossfade")

CAPTURES_KEPT = 32
"""Programs kept for batches of other shapes or settings; the oldest goes first."""
SIZES_KEPT = 1024
"""Sizes of batches of which is known which program of symbolic sizes fits."""

_WHY_SO_MANY = (
    "each shape of batch, number in the batch, and optimizer option that is no number has its own; "
    "pad batches to few shapes, pass changing numbers as tensors"
)


@dataclass(frozen=True)
class Ready:
    """A program that can be run."""

    built: Built
    executable: Executable
    bound: Bound
    batch_names: list[str]
    state_keys: list[tuple[str, nn.Parameter, Collection[str]]]
    batch: tuple[Any, ...]
    """A batch that it is for, as fakes without numbers."""
    kind: Kind | None = None
    """Of which batches; those of other sizes may fit."""


@dataclass
class Programs:
    """What was compiled so far, of which the oldest goes first."""

    place: Place
    inputs: StepInputs
    dynamic: Dynamic
    captures: int = 0
    ready: dict[StepKey, Ready] = field(default_factory=dict)
    _of_other_sizes: dict[StepKey, Ready] = field(default_factory=dict)

    def program_for(self, compiler: StepCompiler, batch: tuple[Any, ...]) -> Ready:
        """The program for a batch."""
        found = self._found(compiler.key(batch))
        if found is not None:
            return found
        with CAPTURING:  # and asked again: what tracing in another thread patches looks like a change
            found = self._found(compiler.key(batch))
            return self._known_or_compiled(compiler, batch) if found is None else found

    def _known_or_compiled(self, compiler: StepCompiler, batch: tuple[Any, ...]) -> Ready:
        """A program for a batch of other sizes or settings, or after a change: one there is, if that is right.

        Ranks who see no change look for the very sizes first, then for symbolic ones; so does who sees one. That a
        program does not depend on what changed is found out without the others: the first rank alone saves, logs,
        evaluates.
        """
        known, captured = self._unchanged(compiler, batch, self._of_these_sizes(compiler, batch))
        known = known or self._fitting(compiler, batch)
        if known is None:
            known, other = self._unchanged(compiler, batch, self._of_fitting_sizes(compiler, batch))
            captured = captured or other
        return known or self._compiled(compiler, batch, captured)

    def clear(self) -> None:
        """Forget all, and free the memory that they keep."""
        self.ready.clear()
        self._of_other_sizes.clear()
        self.inputs.keep_for(())

    def _found(self, key: StepKey) -> Ready | None:
        return self.ready.get(key) or self._of_other_sizes.get(key)

    def _fitting(self, compiler: StepCompiler, batch: tuple[Any, ...]) -> Ready | None:
        """A program of symbolic sizes that is right for a batch of a size that did not come before."""
        programs = [ready for ready in reversed(self.ready.values()) if ready.built.fitting is not None]
        kind = compiler.kind(batch) if programs else None
        why_not = ""
        for ready in programs:
            if kind is None or ready.kind != kind or ready.built.fitting is None:
                continue
            layout = compiler.job.layout(batch)
            if reason := ready.built.fitting.why_not(micro_batch_shapes(batch, layout)):
                why_not = why_not or reason
                continue
            if len(self._of_other_sizes) == SIZES_KEPT:
                self._of_other_sizes.pop(next(iter(self._of_other_sizes)))
            found = replace(ready, built=replace(ready.built, layout=layout))
            self._of_other_sizes[compiler.key(batch)] = found
            return found
        if why_not:
            log.info("capturing again, for a batch of other sizes: %s", why_not)
        return None

    def _unchanged(
        self, compiler: StepCompiler, batch: tuple[Any, ...], before: Ready | None
    ) -> tuple[Ready | None, Captured | None]:
        """A program from before a change, if tracing again gives the same; and what that gave of this very batch."""
        if before is None:
            return None, None
        fitting = before.built.fitting
        captured = compiler.recapture(batch, fitting.sizes if fitting is not None else None)
        if captured is None or not before.built.mark.is_of(captured):
            return None, captured if fitting is None else None
        log.info("nothing to compile: the program is the same although %s", compiler.changed())
        built = replace(before.built, layout=compiler.job.layout(batch))
        return self._add(compiler, batch, replace(before, built=built, kind=compiler.kind(batch))), captured

    def _of_these_sizes(self, compiler: StepCompiler, batch: tuple[Any, ...]) -> Ready | None:
        """The last program that ran such a batch before something changed that the model or the loss may read."""
        key = compiler.key(batch)._replace(baked_in=0)
        for known in (self.ready, self._of_other_sizes):
            for other, ready in reversed(known.items()):
                if other._replace(baked_in=0) == key:
                    return ready
        return None

    def _of_fitting_sizes(self, compiler: StepCompiler, batch: tuple[Any, ...]) -> Ready | None:
        """The last program of symbolic sizes that was right for such a batch before something changed."""
        kind = compiler.kind(batch)
        for ready in reversed(self.ready.values()):
            fitting = ready.built.fitting
            same = fitting is not None and kind and ready.kind and ready.kind._replace(baked_in=kind.baked_in) == kind
            if same and fitting and not fitting.why_not(micro_batch_shapes(batch, compiler.job.layout(batch))):
                return ready
        return None

    def _add(self, compiler: StepCompiler, batch: tuple[Any, ...], ready: Ready) -> Ready:
        if len(self.ready) == CAPTURES_KEPT:
            self.ready.pop(next(iter(self.ready)))
            self._of_other_sizes.clear()  # they may share what was dropped; those of others are found again
            self.inputs.keep_for(ready.built.program for ready in self.ready.values())
        self.ready[compiler.key(batch)] = ready  # as the model is now: a plan may have split its buffers
        return ready

    def _compiled(self, compiler: StepCompiler, batch: tuple[Any, ...], captured: Captured | None) -> Ready:
        start = time.perf_counter()
        built = compiler.build(batch, self.dynamic, captured)
        log.info(
            "captured %s in %.1f s: %s", type(self.inputs.model).__name__, time.perf_counter() - start, built.report
        )
        moves = offload.has(built.program.graph)  # what a recording holds is not freed while it is on the host
        replay = self.place.device == "cuda" and compiler.job.options.execute != "eager" and not moves
        recorded = [axis for axis in self.place.carriers.recorded if axis in self.place.groups] if replay else []
        executable = Executable(built.program, self.place.groups, built.regions, replay=replay, recorded=recorded)
        if replay:
            facts = {**built.report.facts, "CUDA graphs": said_of_replays(executable.program, executable.recorded)}
            built = replace(built, report=replace(built.report, facts=facts))
        elif moves:
            facts = {
                **built.report.facts,
                "CUDA graphs": "none: what a recording holds would not be freed by offloading",
            }
            built = replace(built, report=replace(built.report, facts=facts))
        keys = [(name, self.inputs.model.get_parameter(name), entries) for name, entries in built.state_keys.items()]
        names = [item.name for item in built.program.inputs if item.kind is InputKind.INPUT]
        bound = self.inputs.bound(built.program, built.numbers.inputs)
        shapes = tree_map_only(Tensor, lambda given: torch.empty_like(given, device="meta"), batch)
        ready = Ready(built, executable, bound, names, keys, shapes, compiler.kind(batch))
        self._add(compiler, batch, ready)
        self.captures += 1
        if self.captures in (5, 20, 100):
            log.warning("captured %d programs so far: %s", self.captures, _WHY_SO_MANY)
        return ready
