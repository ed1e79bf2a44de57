"""`find_plan`: every way to lay a step over ranks, simulated; the fastest that fits, and why not the others."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from crossfade.capture.optimizer import check_optimizer, parameter_names
from crossfade.capture.training import LossFunction
from crossfade.compile.memory_budget import Memory, check_memory
from crossfade.cost.machine import Machine
from crossfade.cost.presets import preset
from crossfade.errors import BatchError, CrossfadeError, MemoryLimitError, MeshError
from crossfade.forecast.capture import plan_of_graph
from crossfade.search.candidates import Candidate, meshes, micro_batches, modes
from crossfade.search.figures import Figures
from crossfade.search.plan_found import GB, FoundPlan, Row, why_slower
from crossfade.search.shown import shown
from crossfade.search.trial import Trials
from crossfade.shard.tensor.plan import Plan
from crossfade.tracebacks import users_frames

_NEAR = 0.03
"""Sketches within this share of the fastest one are simulated in full: a sketch is about as good as that."""
_MOST_IN_FULL = 2
_MOST_TENSOR = 8
"""Over how many ranks a model is split by a plan where the machine says nothing of nodes."""
_WORTH_LIMITING = 0.5
"""By which share of the memory a step may exceed it for a schedule within a limit to be tried."""

Told = Callable[[int, int, str], None]
"""Told of each candidate: how many are done, how many there are at most, and which is simulated next."""


@users_frames
def find_plan(
    model: nn.Module,
    loss_fn: LossFunction | None,
    optimizer: Optimizer,
    batch: tuple[Any, ...],
    *,
    ranks: int,
    machine: Machine | str = "h100-cluster",
    memory: Memory = None,
    tensor_parallel: Plan | Mapping[str, object] | None = None,
    accumulate: Sequence[int] | None = None,
    backend: str | None = None,
    measured: Mapping[str, float] | None = None,
    in_full: bool = False,
    told: Told | None = None,
) -> FoundPlan:
    """The fastest way to train a model on so many ranks that fits their memory, found by simulation.

    Tried are meshes (`dp`, `dp` by `tp`, `dp_replicate` by `dp_shard`), the modes `replicate` and `zero1` to `zero3`,
    what stays whole, and, where a rank's memory does not suffice, more micro-batches. Each candidate's program is built
    by the compiler's own passes, with the optimizer's step, scheduled for the machine and simulated. Only shapes are
    used: model and batch may be on the meta device, and no process group is needed.

    Args:
        model, loss_fn, optimizer: as for `compile_step`. Activations are computed again where the model does so.
        batch: what all ranks together take in a step, as `step(*batch)` is given it.
        ranks: how many there are.
        machine: a `Machine` or a preset's name.
        memory: what each rank may use, as for `compile_step` (`80e9`, `"80GB"`, a share of what the machine has); by
            default what the machine says it has, if it says so.
        tensor_parallel: the plan by which a model is split; by default the one that its graph suggests.
        accumulate: numbers of micro-batches to try, each of them; by default the fewest with which a step fits.
        backend: what carries collectives; by default nccl for devices that are CUDA's, gloo for CPUs.
        measured: seconds of operators by key, where they were measured (`crossfade.cost.measure`).
        in_full: simulate every candidate with all layers and several bucket sizes. By default only those that a sketch
            (few layers, one bucket size) shows to be near the fastest.
        told: called before each candidate; by default a bar on the terminal.

        >>> import torch
        >>> model = nn.Sequential(*(nn.Linear(256, 256, device="meta") for _ in range(3)))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> batch = torch.empty(64, 256, device="meta"), torch.empty(64, 256, device="meta")
        >>> found = find_plan(model, nn.functional.mse_loss, optimizer, batch, ranks=2, machine="ethernet-1gbit")
        >>> print(found.call)
        step = cf.compile_step(
            model, loss_fn, optimizer,
            mesh={...},...
            machine='ethernet-1gbit',
        )
    """
    known = preset(machine) if isinstance(machine, str) else machine
    limit = _bytes(memory, known)
    _check(model, optimizer, batch, ranks, accumulate)
    served = backend or ("nccl" if known.device == "cuda" else "gloo")
    trials = Trials(model, loss_fn, optimizer, batch, known, served, tensor_parallel, measured)
    with shown(told, f"{type(model).__name__} on {ranks} ranks of {known.name}") as tell:
        return _Search(trials, ranks, limit, accumulate, in_full, tell).found()


def _bytes(memory: Memory, machine: Machine) -> int | None:
    """The memory of a rank, checked."""
    budget = check_memory(memory)
    if budget is None:
        return machine.memory
    if budget > 1:
        return int(budget)
    if machine.memory is None:
        raise MemoryLimitError(
            f"memory={memory!r}, a share of what {machine.name} has, which it does not say",
            expected="a number of bytes there",
            remedy='pass one, like "70GB"',
        )
    return int(budget * machine.memory)


def _check(
    model: nn.Module, optimizer: Optimizer, batch: tuple[Any, ...], ranks: int, accumulate: Sequence[int] | None
) -> None:
    """Refuse what cannot be searched for."""
    if not isinstance(batch, tuple):
        raise BatchError(
            f"a batch of type {type(batch).__name__}",
            expected="a tuple, of what step(*batch) takes",
            remedy="pass (inputs, targets), or (inputs,)",
        )
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise MeshError(f"ranks={ranks!r}", expected="a number of at least 1", remedy="pass how many ranks there are")
    if accumulate is not None and (not accumulate or any(type(each) is not int or each < 1 for each in accumulate)):
        raise BatchError(
            f"accumulate={accumulate!r}",
            expected="numbers of micro-batches, each at least 1",
            remedy="pass (1, 2, 4), or leave it out for the fewest that fit",
        )
    check_optimizer(optimizer, parameter_names(model))


@dataclass
class _Search:
    trials: Trials
    ranks: int
    memory: int | None
    accumulate: Sequence[int] | None
    in_full: bool
    tell: Told
    rows: list[Row] = field(default_factory=list)
    done: int = 0
    most: int = 0
    too_large: list[tuple[int, Candidate]] = field(default_factory=list)
    """Candidates that were not worth a sketch, with the memory that they need at least."""

    def found(self) -> FoundPlan:
        """Sketch all candidates, simulate the best in full, and say why the others lost."""
        start = time.perf_counter()
        laid = self._meshes()
        self.most = sum(len(list(modes(mesh))) for mesh in laid) + _MOST_IN_FULL
        for mesh in sorted(laid, key=self._least_seconds):
            self._try_mesh(mesh)
        self._simulate_best()
        best = min(self._fitting(), key=lambda row: _seconds(row), default=None)
        if best is None:
            raise self._nothing_fits()
        assert best.figures is not None
        losers = [self._explained(row, best.figures) for row in self.rows if row is not best]
        losers.sort(key=lambda row: (not row.fits(self.memory), row.figures is None, _seconds(row)))
        plan = self.trials.plan
        return FoundPlan(
            type(self.trials.model).__name__, self.trials.machine, self.ranks, self.memory, [best, *losers],
            plan.as_data() if isinstance(plan, Plan) else plan, time.perf_counter() - start,
        )  # fmt: skip

    def _meshes(self) -> list[dict[str, int]]:
        """The meshes that the batch divides by, those that the model is split over only where it can be."""
        network, samples = self.trials.machine.network, self.trials.samples
        per_node = network.per_node if network is not None else None
        every = list(meshes(self.ranks, per_node or _MOST_TENSOR, per_node))
        found = [mesh for mesh in every if micro_batches(samples, Candidate(mesh).data)]
        if any("tp" in mesh for mesh in found) and self.trials.plan is None:
            why_not = self._take_plan_of_graph()
            if why_not:
                self.rows += [Row(Candidate(mesh), why_not=why_not) for mesh in found if "tp" in mesh]
                found = [mesh for mesh in found if "tp" not in mesh]
        if not found:
            raise self._nothing_divides()
        return found

    def _nothing_divides(self) -> BatchError:
        samples, others = self.trials.samples, "".join(f"; {row.candidate}: {row.why_not}" for row in self.rows[:1])
        return BatchError(
            f"a batch of {samples} samples on {self.ranks} ranks{others}",
            expected=f"samples that divide by {self.ranks}, or by fewer where a plan splits the model over the others",
            remedy=f"pass a batch of {self.ranks * max(1, round(samples / self.ranks))} samples, or other ranks=",
        )

    def _take_plan_of_graph(self) -> str:
        """Take the plan that the graph suggests; why there is none."""
        try:
            plan = plan_of_graph(self.trials.model, self.trials.part(1), self.trials.loss_fn)
        except CrossfadeError as error:
            return error.found
        if not len(plan):
            return "the graph suggests nothing to split by a plan"
        self.trials.plan = plan
        return ""

    def _least_seconds(self, mesh: Mapping[str, int]) -> float:
        """What forward and backward take on a mesh; the fastest is tried first, so that others need not be."""
        try:
            return self.trials.least(Candidate(mesh)).seconds
        except CrossfadeError:
            if "tp" not in mesh:
                raise  # nothing can be captured of this model
            return float("inf")

    def _try_mesh(self, mesh: Mapping[str, int]) -> None:
        for mode, whole in modes(mesh):
            candidate = Candidate(mesh, mode, 1, whole)
            self.tell(self.done, self.most, str(candidate))
            self.done += 1
            try:
                self._try_mode(candidate)
            except CrossfadeError as error:
                self.rows.append(Row(candidate, why_not=error.found))

    def _try_mode(self, candidate: Candidate) -> None:
        """A mode with the fewest micro-batches that fit, or with each of those that are asked for."""
        part = self.trials.samples // candidate.data
        asked = self.accumulate or micro_batches(self.trials.samples, candidate.data)
        refused: Row | None = None
        for times in asked:
            if part % times:
                continue
            each = replace(candidate, accumulate=times)
            why_not = "" if self.in_full else self._why_not_tried(each)
            if why_not:
                refused = Row(each, why_not=why_not)
                continue
            row = self._try(each)
            refused = None
            assert row.figures is not None
            if self.accumulate is not None:
                continue
            if row.fits(self.memory) or self.memory is None or row.figures.held > self.memory:
                return
            if self._try_limited(row):
                return
        if refused is not None:
            self.rows.append(refused)

    def _why_not_tried(self, candidate: Candidate) -> str:
        """Why a candidate is not worth a sketch: by what no schedule of it can do without."""
        least = self.trials.least(candidate)
        if self.memory is not None and least.memory > self.memory:
            self.too_large.append((least.memory, candidate))
            if least.held > self.memory:
                return f"lacks {(least.held - self.memory) / GB:,.3g} GB for parameters and optimizer state alone"
            return f"lacks at least {(least.memory - self.memory) / GB:,.3g} GB of memory"
        best = min(map(_seconds, self._fitting()), default=float("inf"))
        if best < least.seconds:
            return f"computes {least.seconds * 1e3:,.1f} ms in any mode, longer than the best takes"
        return ""

    def _try(self, candidate: Candidate) -> Row:
        if self.in_full:
            row = self._in_full(candidate)
        else:
            row = Row(candidate, self.trials.sketch(candidate), is_sketch=True)
        self.rows.append(row)
        return row

    def _in_full(self, candidate: Candidate) -> Row:
        trial = self.trials.simulate(candidate)
        return Row(candidate, trial.figures, kept_whole=tuple(self.trials.patterns(trial.whole)))

    def _try_limited(self, row: Row) -> bool:
        """A schedule within the memory that is left; not of a sketch, whose memory is not that of the whole."""
        assert self.memory is not None and row.figures is not None
        near = row.figures.memory <= self.memory * (1 + _WORTH_LIMITING)
        if not near or self.trials.few_layers(row.candidate) is not None:
            return False
        limited = replace(row.candidate, memory_limit=self.memory - row.figures.held)
        try:
            tried = self._try(limited)
        except MemoryLimitError:
            return False
        if not tried.fits(self.memory):  # what is lowered afterwards needs more than was planned for
            self.rows.remove(tried)
        return tried.fits(self.memory)

    def _fitting(self) -> list[Row]:
        return [row for row in self.rows if row.fits(self.memory)]

    def _simulate_best(self) -> None:
        """Simulate the sketches near the fastest in full, until the fastest one of all is no sketch."""
        for count in range(1, len(self.rows) + 1):
            fitting = sorted(self._fitting(), key=_seconds)
            near = [row for row in fitting if row.is_sketch and _seconds(row) <= _seconds(fitting[0]) * (1 + _NEAR)]
            if not near or (count > _MOST_IN_FULL and not fitting[0].is_sketch):
                return
            row = near[0]
            self.tell(self.done, max(self.most, self.done + len(near)), f"{row.candidate}, all layers")
            self.done += 1
            self.rows[self.rows.index(row)] = self._in_full(row.candidate)

    def _explained(self, row: Row, best: Figures) -> Row:
        if row.why_not or row.figures is None:
            return row
        if not row.fits(self.memory):
            assert self.memory is not None
            lacking = (row.figures.memory - self.memory) / GB
            of_state = ", parameters and optimizer state alone do not fit" if row.figures.held > self.memory else ""
            return replace(row, why_not=f"lacks {lacking:,.3g} GB of memory{of_state}")
        return replace(row, why_not=why_slower(row.figures, best))

    def _nothing_fits(self) -> CrossfadeError:
        rows = [row for row in self.rows if row.figures is not None]
        known = [(row.figures.memory, str(row.candidate)) for row in rows if row.figures is not None]
        for least, candidate in sorted(self.too_large, key=lambda each: each[0]):
            if known and min(known)[0] <= least:
                break
            with contextlib.suppress(CrossfadeError):
                known.append((self.trials.sketch(candidate).memory, str(candidate)))
        if not known:
            return self._nothing_divides()
        needed, best = min(known)
        assert self.memory is not None
        error = MemoryLimitError(
            f"none of {len(self.rows)} candidates on {self.ranks} ranks fits {self.memory:,} bytes",
            expected=f"at least {needed:,} bytes a rank, for {best}",
            remedy="pass more ranks= or memory=, a smaller batch, or compute activations again in the model "
            "(torch.utils.checkpoint)",
        )
        error.least = needed
        return error


def _seconds(row: Row) -> float:
    return row.figures.seconds if row.figures is not None else float("inf")
