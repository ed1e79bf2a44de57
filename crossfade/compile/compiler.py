"""From a batch to a program that all ranks agree on, by the phases of `training_phases`."""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from crossfade.capture.baked_in import BakedIn, ambient
from crossfade.capture.divide_batch import batch_key
from crossfade.capture.optimizer import check_optimizer, initial_state, options_key, parameter_names
from crossfade.capture.training import check_model
from crossfade.compile.agreement import agree, agree_on_batch, hold_together, telling
from crossfade.compile.built import Built
from crossfade.compile.cache import built_from, keep, look_up
from crossfade.compile.job import Job
from crossfade.compile.phases import PhaseRecords
from crossfade.compile.pipeline import copy_kernel
from crossfade.compile.progress import Progress
from crossfade.compile.training_phases import TRAINING, StepCompilation
from crossfade.errors import RankFailedError
from crossfade.graph.effects import is_random
from crossfade.graph.events import events_of
from crossfade.graph.memory import live_by_name
from crossfade.graph.program import OutputKind, Program
from crossfade.ranks.checkpoint import checksum, checksums, random_state
from crossfade.ranks.compared import cost_of_comparing
from crossfade.ranks.members import Members
from crossfade.report.report import PassVerdict, Report
from crossfade.report.strict import Judged, Shortfall, shortfalls

log = logging.getLogger("crossfade")

_CAPTURE = ("capture", "accumulate", "shard-data", "compare-ranks", "optimizer", "simplify")
"""The phases that make the plain program, whose time the report tells as that of the capture."""


@dataclass(frozen=True)
class StepCompiler:
    """Compiles one job for whatever batches come, and agrees with the other ranks on each result."""

    job: Job

    def key(self, batch: tuple[Any, ...]) -> Hashable:
        """What a captured program depends on."""
        return batch_key(batch), self.job.baked_in.number(), options_key(self.job.optimizer), ambient()

    @property
    def shares_random_numbers(self) -> bool:
        """Whether all ranks draw from one stream."""
        return self.job.place.axes is None or self.job.options.semantics == "global"

    def build(self, batch: tuple[Any, ...]) -> Built:
        """Capture and compile for one shape of batch, and agree on the result with the other ranks."""
        everyone = self.job.place.everyone
        what = f"preparing a step of {type(self.job.model).__name__}"
        shown = Progress.on_terminal(everyone.rank if everyone is not None else 0, what)
        with _capturing(self.job.baked_in, everyone), shown as progress:
            return self._build_together(batch, progress)

    def _build_together(self, batch: tuple[Any, ...], progress: Progress) -> Built:
        job, members, split = self.job, self.job.place.members, self.job.place.tensor
        beyond = split.beyond if split is not None else None
        with telling(members, beyond):
            if split is not None:
                split.agree()
        for together in (split.members if split else None, members if job.options.batch == "global" else None):
            if together is not None:
                with telling(beyond):
                    agree_on_batch(together, batch, by_plan=together is not members)
        with telling(members, beyond, split.members if split else None):
            check_model(job.model)  # hooks may have been put on its parameters
            check_optimizer(job.optimizer, parameter_names(job.model))
            built = self._build(batch, progress)
        progress.phase("agree")
        with telling(members, beyond):
            if split is not None:
                agree(split.members, built, [self._stream(built.program), *self._rates()])
        with telling(beyond):
            if members is not None:
                alone = job.options.semantics == "per-rank"
                stream = "random numbers of each rank's own" if alone else self._stream(built.program)
                state = [*checksums(job.model, job.optimizer), *self._rates()]
                agree(members, built, [stream, *state], [f"planned for {job.place.machine}"])
        if beyond is not None:
            agree(beyond, built, [])
        if job.options.expect is not None:
            hold_together(job.options.expect, built, job.place.everyone)
        return built

    def _build(self, batch: tuple[Any, ...], progress: Progress) -> Built:
        start = time.perf_counter()
        progress.phase("cache")
        found = look_up(self.job, batch)
        if found.kept is not None:
            self._warn(found.kept.warning)
            return built_from(found, self.job, batch, time.perf_counter() - start)
        step = StepCompilation(job=self.job, batch=batch, begun=progress.phase)
        warning = ""
        try:
            ran = (self.job.options.phases or TRAINING).run(step)
        finally:
            parts = step.loss_parts
            warning = parts.warning(self.job.options.loss_is) if parts is not None else ""
            self._warn(warning)
        step.need(("program", "layout", "plain"), "a step")
        layout, plain = step.layout, step.plain
        assert layout is not None and plain is not None
        report = self._report(step, plain, ran)
        stepped = {out.name for out in plain.outputs if out.kind is OutputKind.UPDATE}
        exchanges, short = events_of(plain).launches, self._shortfalls(step, plain, report)
        keys = self.state_keys(stepped)
        built = Built(step.made(), layout, report, keys, step.compared or [], exchanges, short, ran)
        progress.phase("keep")
        keep(found, built, step.loss_parts, self.job.options.loss_is, warning)
        return built

    def _warn(self, warning: str) -> None:
        if warning and self.job.place.part_of_batch == 0:
            warnings.warn(warning, stacklevel=8)  # the line that calls the step

    def _report(self, step: StepCompilation, plain: Program, ran: PhaseRecords) -> Report:
        compared = cost_of_comparing(step.compared or [], step.batch)
        facts = self._facts(step, ran) | copy_kernel(step.made()) | compared | self.job.baked_in.facts()
        report = Report.of(plain, step.made(), title=type(self.job.model).__name__, facts=facts)
        if step.timeline is None:
            return report
        return report.with_timelines(predicted=step.timeline, memory=live_by_name(step.made()))

    def _shortfalls(self, step: StepCompilation, plain: Program, report: Report) -> tuple[Shortfall, ...]:
        expect, tensor = self.job.options.expect, self.job.place.tensor
        if expect is None:
            return ()
        earlier = [PassVerdict("shard", verdict) for verdict in tensor.verdicts] if tensor is not None else []
        return tuple(shortfalls(expect, Judged(report, plain, step.made(), earlier)))

    def _stream(self, program: Program) -> str:
        """What ranks that draw from one random stream must have in common beside the program."""
        if not any(is_random(node) for node in program.graph.nodes):
            return "no random numbers shared by the ranks"
        state = " and ".join(f"{checksum(value):08x}" for value in random_state(self.job.model).values())
        return f"random generator in state {state}: call torch.manual_seed alike on every rank"

    def _rates(self) -> list[str]:
        return [f"lr.{index} = {group['lr']}" for index, group in enumerate(self.job.optimizer.param_groups)]

    def initial_state(self, stepped: Collection[str]) -> dict[str, dict[str, torch.Tensor]]:
        """What the optimizer would create at its first step for some parameters."""
        shards = self.job.place.shards
        parts = shards.like_parts() if shards is not None else {}
        return initial_state(self.job.optimizer, parameter_names(self.job.model), stepped, parts)

    def state_keys(self, stepped: Collection[str] | None = None) -> dict[str, list[str]]:
        """The entries of the optimizer's state for some parameters, by default all that are trained."""
        names = parameter_names(self.job.model)
        without_memory = {name: torch.empty(p.shape, dtype=p.dtype, device="meta") for p, name in names.items()}
        chosen = self.job.trained() if stepped is None else stepped
        states = initial_state(self.job.optimizer, names, chosen, without_memory)
        return {name: list(state) for name, state in states.items()}

    def _facts(self, step: StepCompilation, ran: PhaseRecords) -> dict[str, str]:
        options, place, layout = self.job.options, self.job.place, step.layout
        assert layout is not None
        axes = [place.axes.copies, place.axes.split] if place.axes else []
        axes += [place.tensor.axis] if place.tensor else []
        sizes = " x ".join(f"{axis.name}={axis.size}" for axis in axes if axis is not None)
        split = {"split by the plan": place.tensor.said()} if place.tensor else {}
        spared = "no gather in pieces, no small operators grouped: both need more"
        kept = spared if place.everyone is not None else "not kept: on one device nothing is scheduled"
        limit = options.memory_limit
        limited = {"memory limit": f"{limit:,} bytes; {kept}"} if limit is not None else {}
        whole = {"kept whole": f"{len(place.kept_whole)} parameters"} if place.mode in ("zero2", "zero3") else {}
        return {**split, **limited, **whole} | {
            "mesh": f"{sizes} over {axes[-1].backend}" if axes and axes[-1] else "one device",
            "data parallel": place.mode,
            "planned for": place.machine.name if place.machine else "no machine in particular",
            "batch": f"{layout.size} samples ({layout.given}), {layout.accumulate} x {layout.micro_batch_size} a rank",
            "optimizer": type(self.job.optimizer).__name__,
            "semantics": options.semantics,
            "torch": torch.__version__,
            "capture": f"{ran.seconds(*_CAPTURE):.1f} s",
        }


@contextlib.contextmanager
def _capturing(baked_in: BakedIn, members: Members | None) -> Iterator[None]:
    """Say why a program is captured again, also to the other ranks, should they see no reason to do so."""
    reason = baked_in.captured()
    if reason:
        log.info("capturing again: %s", reason)
    if not reason or members is None or members.alone:
        yield
        return
    members.note("doing", f"it captures again, since {reason}")
    try:
        yield
    except RankFailedError as error:
        raise RankFailedError(
            f"{error.found}; this rank captures again, since {reason}",
            expected="every rank to capture again at the same step",
            remedy="make such a change on all ranks between the same steps; or see the other rank's own error first",
        ) from error
    members.note("doing", "")
