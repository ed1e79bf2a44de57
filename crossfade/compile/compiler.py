"""From a batch to a program that all ranks agree on, by the phases of `training_phases`."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from crossfade.capture.baked_in import BakedIn, ambient
from crossfade.capture.divide_batch import BatchLayout, Described, batch_key
from crossfade.capture.numbers import options_key
from crossfade.capture.optimizer import check_optimizer, optimizer_said, parameter_names
from crossfade.capture.optimizer_state import FirstState, first_states, lacking_state
from crossfade.capture.symbolic_sizes import FittingSizes, SymbolicCapture, SymbolicSizes, is_plain, micro_batch_shapes
from crossfade.capture.training import check_model
from crossfade.compile.agreement import agree, agree_on_batch, agree_on_sizes, hold_together, telling
from crossfade.compile.built import Built
from crossfade.compile.cache import built_from, keep, look_up, not_looked_for
from crossfade.compile.cache_watch import watching
from crossfade.compile.captured import Captured
from crossfade.compile.dynamic import Dynamic, Kind
from crossfade.compile.job import Job
from crossfade.compile.options import Exchange
from crossfade.compile.phases import PhaseRecords
from crossfade.compile.pipeline import copy_kernel
from crossfade.compile.progress import Progress
from crossfade.compile.step_plan import Origin
from crossfade.compile.training_phases import TRAINING, StepCompilation
from crossfade.errors import BatchError, RankFailedError
from crossfade.graph.effects import is_random
from crossfade.graph.events import events_of
from crossfade.graph.private import group_named
from crossfade.graph.program import OutputKind, Program
from crossfade.ranks.checkpoint import checksum, checksums, random_state
from crossfade.ranks.compared import cost_of_comparing, numbers_in_groups, tensors_of
from crossfade.ranks.join_batches import joined
from crossfade.ranks.members import Members
from crossfade.report.report import PassVerdict, Report, Table
from crossfade.report.strict import Judged, Shortfall, shortfalls
from crossfade.shard.average_buffers import UNPROVED_BUFFER, UNPROVED_BUFFER_REMEDY
from crossfade.shard.loss_parts import LossParts
from crossfade.tracebacks import users_level

log = logging.getLogger("crossfade")

_CAPTURE = ("capture", "accumulate", "shard-data", "compare-ranks", "optimizer", "simplify")
"""The phases that make the plain program, whose time the report tells as that of the capture."""


_COUNTED_IN_REGIONS = "what a region is given counts until it ends, what it makes inside as its operators make it"
_COMPUTED_AGAIN = ("Computed again, not kept", ("value", "module", "MB", "ms"))
"""The title and the columns of a report's table."""
_MOVED = ("Moved to the host", ("value", "module", "MB", "ms exposed"))
"""Likewise."""


class StepKey(NamedTuple):
    """What a captured program depends on."""

    batch: Hashable
    baked_in: int
    options: Hashable
    ambient: Hashable


@dataclass(frozen=True)
class _Request:
    """What a program is wanted for, and who is told of each phase that begins."""

    batch: tuple[Any, ...]
    dynamic: Dynamic
    captured: Captured | None
    begun: Callable[[str], None]


@dataclass(frozen=True)
class StepCompiler:
    """Compiles one job for whatever batches come, and agrees with the other ranks on each result."""

    job: Job

    def key(self, batch: tuple[Any, ...]) -> StepKey:
        """What a captured program depends on."""
        job = self.job
        given = job.options.batch, job.options.exchange, batch_key(batch)
        options = options_key(job.optimizer, job.learned), job.begins()
        return StepKey(given, job.baked_in.number(), options, ambient())

    def changed(self) -> str:
        """What has changed since a program was captured last; from now on it counts as captured."""
        return self.job.baked_in.captured()

    def kind(self, batch: tuple[Any, ...]) -> Kind | None:
        """What a program of symbolic sizes depends on beside these; None for a batch that needs one of its own."""
        if not is_plain(batch):
            return None
        structure, leaves = batch_key(batch)
        try:
            undivided = bool(self.job.layout(batch).undivided)
        except BatchError:  # refused when it is captured, which other ranks are told of
            return None
        open_sizes = tuple((len(leaf[0]), *leaf[1:]) if isinstance(leaf, Described) else leaf for leaf in leaves)
        options = options_key(self.job.optimizer, self.job.learned)
        settings = self.job.options.batch, self.job.options.exchange, undivided, self.job.begins(), options, ambient()
        return Kind((structure, open_sizes), settings, self.job.baked_in.number())

    def given(self, batch: tuple[Any, ...], exchange: Exchange = "now") -> tuple[StepCompiler, tuple[Any, ...]]:
        """What compiles a batch, and the batch: all ranks' samples where these bring different numbers of them."""
        if exchange != self.job.options.exchange:
            options = replace(self.job.options, exchange=exchange)
            return replace(self, job=replace(self.job, options=options)).given(batch, exchange)
        place, options = self.job.place, self.job.options
        if options.batch != "uneven" or place.axes is None or place.members is None:
            return self, batch
        with place.members.together("compare the numbers of samples that ranks bring"):
            whole = joined(batch, group_named(place.groups[place.axes.whole.name]), place.device)
        if whole is batch:
            return self, batch
        return replace(self, job=replace(self.job, options=replace(options, batch="global"))), whole

    @property
    def shares_random_numbers(self) -> bool:
        """Whether all ranks draw from one stream."""
        return self.job.place.axes is None or self.job.options.semantics == "global"

    def recapture(self, batch: tuple[Any, ...], sizes: SymbolicSizes | None) -> Captured | None:
        """Trace again after a change, on this rank alone; None with a plan, whose ranks split the model together."""
        if self.job.place.tensor is not None:
            return None
        symbolic = SymbolicCapture(sizes) if sizes is not None else None
        with telling(self.job.place.members):
            self._check()
            return Captured.of(self.job.capture(batch, self.job.layout(batch), symbolic), self.job.model, symbolic)

    def _check(self) -> None:
        """Refuse what may have come since a program was compiled, such as hooks."""
        check_model(self.job.model)
        check_optimizer(self.job.optimizer, parameter_names(self.job.model))

    def build(self, batch: tuple[Any, ...], dynamic: Dynamic, captured: Captured | None = None) -> Built:
        """Capture and compile for one shape of batch, or for several, and agree on the result with the other ranks.

        `captured` is what tracing this very batch has made already, if it has.
        """
        everyone = self.job.place.everyone
        what = f"preparing a step of {type(self.job.model).__name__}"
        shown = Progress.on_terminal(everyone.rank if everyone is not None else 0, what)
        with _capturing(self.job.baked_in, everyone), shown as progress:
            return self._build_together(_Request(batch, dynamic, captured, progress.phase))

    def _build_together(self, asked: _Request) -> Built:
        batch = asked.batch
        job, members, split = self.job, self.job.place.members, self.job.place.tensor
        beyond = split.beyond if split is not None else None
        with telling(members, beyond):
            if split is not None:
                split.agree()
        for together in (split.members if split else None, members if job.options.batch == "global" else None):
            if together is not None:
                with telling(beyond):
                    agree_on_batch(together, batch, by_plan=together is not members)
        if members is not None and job.options.batch != "global":
            with telling(beyond):
                agree_on_sizes(members, batch)
        with telling(members, beyond, split.members if split else None):
            self._check()
            built = self._build_dynamic(asked)
        asked.begun("agree")
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

    def _build_dynamic(self, asked: _Request) -> Built:
        """A program of symbolic sizes if it is time for one; one for this batch alone, and a word why, otherwise."""
        batch = asked.batch
        if (kind := self.kind(batch)) is None:
            return self._build(asked)
        layout = self.job.layout(batch)
        in_parts = layout.ranks * layout.accumulate > 1
        shapes = [tuple(leaf.shape) for leaf in tensors_of(batch).values()]
        sizes = asked.dynamic.sizes_for(kind, shapes, micro_batch_shapes(batch, layout), samples=in_parts)
        if sizes is None:
            return self._build(asked)
        try:
            built = self._build(replace(asked, captured=None), SymbolicCapture(sizes))
            assert built.fitting is not None
            why_not = built.fitting.why_not(micro_batch_shapes(batch, built.layout))
        except RankFailedError:
            raise
        except Exception as error:  # whatever it is about the sizes: without symbols it must work, or raises again
            why_not = f"{type(error).__name__}: {error}"
        if not why_not:
            return built
        log.warning("every size of such batches is captured by itself: %s", why_not)
        asked.dynamic.failed(kind)
        return self._build(asked)

    def _build(self, asked: _Request, symbolic: SymbolicCapture | None = None) -> Built:
        first = self._learn_how_it_begins()
        asked.begun("cache")
        lookup = look_up(self.job, asked.batch, first) if symbolic is None else not_looked_for("its sizes are symbols")
        if lookup.found is not None:
            built = built_from(lookup, self.job, asked.batch)
            self._say(built.mark.loss_parts, built.layout)
            return built
        with watching() as watched:
            built = self._compiled(asked, symbolic)
        asked.begun("keep")
        why_not = keep(lookup, built, self.job, watched)
        facts = {**built.report.facts, **lookup.fact(why_not)}
        return replace(built, report=replace(built.report, facts=facts))

    def _say(self, parts: LossParts, layout: BatchLayout | None) -> None:
        """Warn of what a capture has found out about losses and batches; once, on the first rank."""
        if self.job.place.part_of_batch:
            return
        if warning := parts.warning(self.job.options.loss_is):
            warnings.warn(warning, stacklevel=users_level())
        if parts.buffers:
            found = f"{UNPROVED_BUFFER}: {'; '.join(parts.buffers)}. Remedy: {UNPROVED_BUFFER_REMEDY}."
            warnings.warn(found, stacklevel=users_level())
        if layout is not None and layout.undivided:
            log.info("every rank computes all of this batch at once: %s", layout.undivided)

    def _compiled(self, asked: _Request, symbolic: SymbolicCapture | None) -> Built:
        step = StepCompilation(
            job=self.job, batch=asked.batch, captured=asked.captured, symbolic=symbolic, begun=asked.begun
        )
        try:
            ran = (self.job.options.phases or TRAINING).run(step)
        finally:
            if step.loss_parts is not None:
                self._say(step.loss_parts, step.layout)
        step.need(("program", "layout", "plain", "captured"), "a step")
        layout, plain, made = step.layout, step.plain, step.captured
        assert layout is not None and plain is not None and made is not None
        report = self._report(step, plain, ran)
        stepped = {out.name for out in plain.outputs if out.kind is OutputKind.UPDATE}
        exchanges, short = events_of(plain).launches, self._shortfalls(step, plain, report)
        keys = self.state_keys(stepped)
        fitting = self._fitting(step, layout) if symbolic is not None else None
        mark = made.mark()
        return Built(
            step.made(),
            layout,
            report,
            keys,
            step.compared or [],
            exchanges,
            short,
            ran,
            mark,
            step.numbers,
            fitting,
            Origin.of(plain),
            step.memory(),
            step.regions,
        )

    def _learn_how_it_begins(self) -> dict[str, FirstState]:
        """Find out whether the optimizer's first step is like later ones, if there is a first step to take.

        Returns the states that are not there yet.
        """
        job, names = self.job, parameter_names(self.job.model)
        lacking = lacking_state(job.optimizer, names, job.trained())
        states = first_states(job.optimizer, names, lacking, _without_memory(names))
        job.learned.starts_from_gradients |= any(first.from_gradient for first in states.values())
        return states

    def _fitting(self, step: StepCompilation, layout: BatchLayout) -> FittingSizes:
        assert step.symbolic is not None
        for fixed in step.symbolic.fixed:
            log.info("the model asks for %s; batches of other sizes there are captured again", fixed)
        parts = layout.ranks if layout.ranks > 1 else layout.accumulate
        at_once = 1 if self.job.options.semantics == "per-rank" else parts
        return FittingSizes.of(step.symbolic.sizes, step.made().fake_mode, at_once, step.symbolic.lines)

    def _report(self, step: StepCompilation, plain: Program, ran: PhaseRecords) -> Report:
        compared = cost_of_comparing(step.compared or [], step.batch)
        facts = self._facts(step, ran) | copy_kernel(step.made()) | compared | self.job.baked_in.facts()
        made, memory = step.made(), step.memory()
        report = Report.of(plain, made, title=type(self.job.model).__name__, facts=facts)
        if memory is not None:
            report = report.with_table(Table(*_COMPUTED_AGAIN, memory.rows()))
            report = report.with_table(Table(*_MOVED, memory.moves())) if memory.moved else report
        if memory is None and step.timeline is None:
            return report
        names = [node.name for node in made.graph.nodes]
        during = list(zip(names, step.accounting.during(made), strict=True))
        return report.with_timelines(predicted=step.timeline, memory=during, alive=step.accounting.alive(made))

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
        return [f"{name} = {value}" for name, value in numbers_in_groups(self.job.optimizer).items()]

    def initial_state(self, stepped: Collection[str]) -> dict[str, dict[str, Any]]:
        """What the optimizer would create at its first step for some parameters."""
        job, shards = self.job, self.job.place.shards
        parts = shards.like_parts() if shards is not None else {}
        values = shards.own_part if shards is not None else None
        states = first_states(job.optimizer, parameter_names(job.model), stepped, parts, values)
        job.learned.not_begun.update(name for name, first in states.items() if first.from_gradient)
        return {name: dict(first.entries) for name, first in states.items()}

    def state_keys(self, stepped: Collection[str] | None = None) -> dict[str, list[str]]:
        """The entries of the optimizer's state for some parameters, by default all that are trained."""
        optimizer, names = self.job.optimizer, parameter_names(self.job.model)
        chosen = self.job.trained() if stepped is None else stepped
        lacking = lacking_state(optimizer, names, chosen)
        states = first_states(optimizer, names, lacking, _without_memory(names))
        made = {name: list(first.entries) for name, first in states.items()}
        there = {name: list(optimizer.state[p]) for p, name in names.items() if name in chosen and name not in made}
        return made | there

    def _facts(self, step: StepCompilation, ran: PhaseRecords) -> dict[str, str]:
        options, place, layout = self.job.options, self.job.place, step.layout
        assert layout is not None
        axes = [place.axes.copies, place.axes.split] if place.axes else []
        axes += [place.tensor.axis] if place.tensor else []
        sizes = " x ".join(f"{axis.name}={axis.size}" for axis in axes if axis is not None)
        split = {"split by the plan": place.tensor.said()} if place.tensor else {}
        if place.experts is not None and place.shards is not None:
            split["experts"] = f"{len(place.shards.names)} parameters over {place.experts.name}={place.experts.size}"
        spared = "no gather in pieces, no small operators grouped: both need more"
        kept = spared if place.everyone is not None else "not kept: on one device nothing is scheduled"
        limit = options.memory_limit
        limited = {"memory limit": f"{limit:,} bytes; {kept}"} if limit is not None else {}
        whole = {"kept whole": f"{len(place.kept_whole)} parameters"} if place.mode in ("zero2", "zero3") else {}
        memory = step.memory()
        fits = memory.lines() if memory is not None else {}
        if memory is not None and step.regions is not None:
            fits["memory of compiled regions"] = _COUNTED_IN_REGIONS
        return {**split, **limited, **fits, **whole} | {
            "mesh": f"{sizes} over {axes[-1].backend}" if axes and axes[-1] else "one device",
            "data parallel": place.mode,
            "planned for": place.machine.name if place.machine else "no machine in particular",
            "batch": _batch_in_words(layout),
            "optimizer": optimizer_said(self.job.optimizer),
            "semantics": options.semantics,
            "torch": torch.__version__,
            "capture": f"{ran.seconds(*_CAPTURE):.1f} s",
        }


def _without_memory(names: Mapping[torch.Tensor, str]) -> dict[str, torch.Tensor]:
    """For each parameter, by name, a tensor like it that has no numbers."""
    return {name: torch.empty(p.shape, dtype=p.dtype, device="meta") for p, name in names.items()}


def _batch_in_words(layout: BatchLayout) -> str:
    each = f"{layout.accumulate} x {layout.micro_batch_size} a rank"
    if layout.undivided:
        each = f"all {layout.size} at once on every rank: {layout.undivided}"
    return f"{layout.size} samples ({layout.given}), {each}"


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
