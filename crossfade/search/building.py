"""One rank's program of a candidate, built by the compiler's own passes for ranks that need not be there."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from crossfade.capture.accumulate import accumulate
from crossfade.capture.optimizer import trace_optimizer
from crossfade.communicate.exchange_factors import ExchangeFactors
from crossfade.compile.carriers import Carriers
from crossfade.compile.finishing import finishing
from crossfade.compile.kept_whole import parameters_to_keep_whole
from crossfade.compile.overlap import plan_overlap
from crossfade.compile.pipeline import (
    collective_matmuls,
    gradient_exchange,
    lowering,
    parameter_sharding,
    simplification,
    updates_gathered,
)
from crossfade.cost.machine import Machine
from crossfade.errors import CrossfadeError
from crossfade.graph.passes import run_passes as run_checked_passes
from crossfade.graph.program import InputKind, Program
from crossfade.search.candidates import TENSOR_AXIS, Candidate
from crossfade.shard.tensor.builder import RANK

run_passes = functools.partial(run_checked_passes, checked=False)
"""What the compiler checks of a program that it runs need not be looked at in one that is only simulated."""


class NothingKept(CrossfadeError):
    """A candidate that keeps parameters whole of which none pays."""


@dataclass(frozen=True)
class Setup:
    """What all candidates have in common: the optimizer, what its parameters are called, where it all runs."""

    optimizer: Optimizer
    names: Mapping[Tensor, str]
    machine: Machine
    backend: str
    measured: Mapping[str, float] | None = None


@dataclass
class Building:
    """The phases of the compiler of a step (`compile.training_phases`), for a candidate, of so many micro-batches.

    `quickly`: with the bucket sizes that arithmetic gives, and no others.
    """

    setup: Setup
    candidate: Candidate
    times: int
    quickly: bool = False
    whole: tuple[str, ...] = ()
    """The parameters that stay whole, once it is built."""

    def __post_init__(self) -> None:
        self.axes = self.candidate.axes(self.setup.backend)
        self.machine = self.candidate.lies_on(self.setup.machine)
        groups = self.candidate.groups()
        self.carriers = Carriers(dict.fromkeys(groups, self.setup.backend), self.machine)
        self.planned_for = self.carriers.planned_for(self.machine)
        self.context: dict[str, Any] = {"machine": self.planned_for, "measured": self.setup.measured}

    def program(self, captured: Program) -> Program:
        """What a rank runs."""
        captured.groups = self.candidate.groups()
        split = self._split_by_plan(captured)
        exchanged = self._exchanged(captured)
        program = self._with_optimizer(exchanged, self._split_over(exchanged, split))
        if self.axes is not None:
            program = run_passes(program, updates_gathered(self.candidate.mode, self.axes, self.whole))
        program = run_passes(program, simplification())
        if self.axes is not None and self.candidate.mode != "replicate":
            program = run_passes(program, [ExchangeFactors(group=self.axes.split.name)], context=self.context)
        if self.candidate.tensor > 1:
            program = run_passes(program, self._collective_matmuls(program, split), context=self.context)
        return self._finished(self._scheduled(program))

    def _exchanged(self, captured: Program) -> Program:
        """Micro-batches put together, parameters gathered and gradients exchanged."""
        axes, mode = self.axes, self.candidate.mode
        if axes is None:
            return accumulate(captured, self.times)
        if self.candidate.keeps_whole:
            self.whole = self._kept_whole(captured)
            if not self.whole:
                raise NothingKept(
                    "no parameter pays for being kept whole", expected="links slow enough for it", remedy="leave it out"
                )
        each, once = parameter_sharding(mode, axes.split.name, axes.split.size, self.whole)
        program = accumulate(run_passes(captured, each), self.times)
        exchange = gradient_exchange(mode, axes, "mean", self.whole, gathers_rows=True)
        return run_passes(program, [*once, *exchange])

    def _kept_whole(self, captured: Program) -> tuple[str, ...]:
        assert self.axes is not None
        split = self.axes.split
        plain = run_passes(accumulate(captured, self.times), simplification())
        names = parameters_to_keep_whole(plain, self.planned_for, self.setup.measured, split.name, split.size)
        return tuple(names)

    def _split_by_plan(self, program: Program) -> set[str]:
        """The parameters of which the program has parts that a plan made."""
        whole = {name: parameter.shape for parameter, name in self.setup.names.items()}
        inputs = [(item.name, node) for item, node in program.named_inputs() if item.kind is InputKind.PARAMETER]
        return {name for name, node in inputs if name in whole and node.meta["val"].shape != whole[name]}

    def _with_optimizer(self, program: Program, split: Mapping[str, tuple[str, ...]]) -> Program:
        """The program with the optimizer's own step."""
        names, there = self.setup.names, {item.name for item in program.inputs}
        alone = not there.issuperset(names.values())  # of a model with few layers
        return trace_optimizer(program, self.setup.optimizer, names, split_over=split, alone=alone).program

    def _split_over(self, program: Program, by_plan: set[str]) -> dict[str, tuple[str, ...]]:
        """The parameters that are in parts, with the axes that these are spread over."""
        rows = self.axes.split.name if self.axes is not None and self.candidate.mode != "replicate" else ""
        found = {}
        for item, node in program.named_inputs():
            if item.kind is InputKind.PARAMETER:
                over = [*([TENSOR_AXIS] if item.name in by_plan else []),
                        *([rows] if rows and node.meta["val"].dim() else [])]  # fmt: skip
                if over:
                    found[item.name] = tuple(over)
        return found

    def _collective_matmuls(self, program: Program, split: set[str]) -> Any:
        """Matmuls in pieces; alike on all ranks of the plan's axis is what it has not split."""
        names = [item.name for item in program.inputs]
        apart = {name for name in names if name.partition(":")[0] in split or name.rpartition(".")[2] == RANK}
        alike = [*(name for name in names if name not in apart), *program.constants]
        return collective_matmuls(self.carriers.backends, alike=alike, groups=(TENSOR_AXIS,))

    def _scheduled(self, program: Program) -> Program:
        if not program.groups:
            return program
        limit, narrow = self.candidate.memory_limit, self.carriers.summed_here
        scales = (1.0,) if self.quickly else None
        measured = self.setup.measured
        return plan_overlap(
            program, self.planned_for, measured, limit, narrow=narrow, scales=scales, checked=False
        ).program

    def _finished(self, program: Program) -> Program:
        limit, device = self.candidate.memory_limit, self.machine.device
        lean, compiled = limit is not None, device == "cuda"
        last = finishing(device, lean=lean, compiled=compiled, fused=not (lean or compiled))
        return run_passes(program, [*lowering(self.carriers, program.groups, limit), *last], context=self.context)
