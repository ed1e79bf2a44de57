"""One candidate as it would run: its program built by the compiler's own passes, scheduled, simulated, its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from crossfade.capture.divide_batch import BatchLayout
from crossfade.capture.optimizer import parameter_names
from crossfade.capture.optimizer_state import initial_state
from crossfade.capture.training import LossFunction, resized
from crossfade.compile.overlap import predicted
from crossfade.cost.estimate import estimate
from crossfade.cost.machine import Machine
from crossfade.cost.timeline import Timeline
from crossfade.forecast.capture import Captured, capture_model
from crossfade.graph.memory import memory_curve
from crossfade.graph.private import tree_map_only
from crossfade.graph.program import InputKind, OutputKind, tensor_bytes
from crossfade.search.building import Building, Setup
from crossfade.search.candidates import Candidate
from crossfade.search.figures import Figures
from crossfade.shard.tensor.plan import Plan

_FEW = (2, 4)
"""How many equal layers the two models have that a sketch is drawn from."""
_SURELY = 0.9
"""The share of what is alive between forward and backward, as captured, that simplification leaves at least."""
_MANY = 8
"""From how many on a model's equal layers are worth it."""


@dataclass(frozen=True)
class Trial:
    """What became of one candidate: its figures, what it does when, and the parameters that stay whole."""

    figures: Figures
    timeline: Timeline
    whole: tuple[str, ...]


@dataclass(frozen=True)
class Least:
    """What a candidate takes at least: seconds of computation, bytes of state, and bytes in all."""

    seconds: float
    held: int
    memory: int

    @classmethod
    def of(cls, candidate: Candidate, plain: Figures, state_share: float) -> Least:
        """From the forward and backward of all of a rank's samples, whose `held` is parameters."""
        ranks = candidate.splits
        held = plain.held / (ranks if candidate.mode in ("zero2", "zero3") else 1) + state_share * plain.held / ranks
        gathered = plain.held if candidate.mode == "zero2" else 0
        summed = plain.held if candidate.accumulate > 1 else 0  # gradients, while the last micro-batch computes its own
        memory = held + gathered + summed + _SURELY * plain.alive / candidate.accumulate
        return cls(plain.seconds, int(held), int(memory))


@dataclass
class Trials:
    """Trials of one model on one machine: micro-batches are captured once for each size and number of parts."""

    model: nn.Module
    loss_fn: LossFunction | None
    optimizer: Optimizer
    batch: tuple[Any, ...]
    machine: Machine
    backend: str
    plan: Plan | Mapping[str, object] | None = None
    measured: Mapping[str, float] | None = None
    _captured: dict[tuple[int, int], Captured] = field(default_factory=dict)
    _plain: dict[tuple[int, int], Figures] = field(default_factory=dict)

    @cached_property
    def _names(self) -> dict[Tensor, str]:
        return parameter_names(self.model)

    @cached_property
    def _setup(self) -> Setup:
        return Setup(self.optimizer, self._names, self.machine, self.backend, self.measured)

    @property
    def samples(self) -> int:
        """How many samples the whole batch has."""
        return self._layout.size

    @cached_property
    def _layout(self) -> BatchLayout:
        return BatchLayout.of(self.batch, ranks=1, accumulate=1, given="global")

    def part(self, size: int) -> tuple[Any, ...]:
        """A batch of so many samples, without numbers."""
        bare = tree_map_only(Tensor, lambda value: value.to("meta"), self.batch)
        return resized(bare, size, self._layout)

    def patterns(self, names: Sequence[str]) -> list[str]:
        """Parameters as `keep_whole` takes them: a module of which all are named as one pattern."""
        every, wanted, found = list(self._names.values()), set(names), []
        for name in names:
            parts = name.split(".")
            starts = (".".join(parts[:end]) + "." for end in range(1, len(parts)))
            inside = ((start, [other for other in every if other.startswith(start)]) for start in starts)
            start = next((start for start, others in inside if len(others) > 1 and wanted.issuperset(others)), None)
            found.append(f"{start}*" if start is not None else name)
        return list(dict.fromkeys(found))

    def captured(self, candidate: Candidate) -> Captured:
        """The forward and backward of one micro-batch of one rank."""
        key = ranks, size = self._key(candidate)
        if key not in self._captured:
            self._captured[key] = capture_model(self.model, self.part(size), self.loss_fn, ranks=ranks, plan=self.plan)
        return self._captured[key]

    def _key(self, candidate: Candidate) -> tuple[int, int]:
        return candidate.tensor, self.samples // (candidate.data * candidate.accumulate)

    def least(self, candidate: Candidate) -> Least:
        """What no schedule of a candidate can do without, from its forward and backward alone.

        Smaller micro-batches are not captured for it: each sample takes what it does in the largest.
        """
        largest = replace(candidate, accumulate=1)
        ranks, size = self._key(largest)
        if (plain := self._plain.get((ranks, size))) is None:
            few = self.few_layers(largest)
            parts = [self._plain_of(largest, layers) for layers in few or (None,)]
            plain = parts[0]
            if few is not None:
                plain = parts[1].further(parts[0], (self._count(largest) - few[1]) / (few[1] - few[0]))
            self._plain[ranks, size] = plain
        return Least.of(candidate, plain, self._state_share)

    def _plain_of(self, candidate: Candidate, layers: int | None) -> Figures:
        """The computation of a micro-batch; bytes of parameters, and of what the backward needs of the forward."""
        found = self.captured(candidate)
        program = found.program if layers is None else found.with_layers(layers)
        program.groups = candidate.groups()
        costs = estimate(program, candidate.lies_on(self.machine), self.measured)
        seconds = sum(busy for node, busy in costs.compute.items() if node not in costs.travel)
        kept = sum(tensor_bytes(node.meta["val"]) for item, node in program.named_inputs()
                   if item.kind is InputKind.PARAMETER)  # fmt: skip
        losses = [node for out, node in program.named_results() if out.kind is OutputKind.LOSS]
        nodes = list(program.graph.nodes)
        alive = memory_curve(program).after[nodes.index(losses[0])] if losses else 0
        return Figures(seconds, seconds, {}, kept, alive)

    @cached_property
    def _state_share(self) -> float:
        """Bytes of the optimizer's state for each byte of parameters."""
        like = {name: torch.empty_like(parameter, device="meta") for parameter, name in self._names.items()}
        trained = [self._names[p] for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        states = initial_state(self.optimizer, self._names, trained, like)
        entries = [entry for state in states.values() for entry in state.values() if isinstance(entry, Tensor)]
        return sum(map(tensor_bytes, entries)) / max(1, sum(map(tensor_bytes, like.values())))

    def few_layers(self, candidate: Candidate) -> tuple[int, int] | None:
        """The two numbers of equal layers that a sketch is drawn of; None where the model has hardly more."""
        layers = self.captured(candidate).layers
        return _FEW if layers is not None and layers.count > _MANY else None

    def _count(self, candidate: Candidate) -> int:
        layers = self.captured(candidate).layers
        return layers.count if layers is not None else 1

    def sketch(self, candidate: Candidate, times: int | None = None) -> Figures:
        """One step, roughly: of few layers and micro-batches, what each further one adds counted as often as needed.

        With `times`, of so many of the candidate's micro-batches.
        """
        few, times = self.few_layers(candidate), candidate.accumulate if times is None else times

        def of_layers(times: int) -> Figures:
            if few is None:
                return self.run(candidate, times=times, quickly=True).figures
            count = self._count(candidate)
            one, two = (self.run(candidate, layers=layers, times=times, quickly=True).figures for layers in few)
            return two.further(one, (count - few[1]) / (few[1] - few[0]))

        found = of_layers(times) if times <= 2 else of_layers(3).further(of_layers(2), times - 3)
        surely = self.least(candidate).memory - found.held  # a few layers' peak may lie elsewhere than that of many
        return replace(found, alive=max(found.alive, surely))

    def simulate(self, candidate: Candidate) -> Trial:
        """One step as it would run: all layers; of more than two micro-batches, what each further one adds is taken
        from a sketch."""
        times = candidate.accumulate
        if times <= 2:
            return self.run(candidate)
        whole, few = self.run(candidate, times=2), self.few_layers(candidate)
        if few is None:
            trial = self.run(candidate, times=3)
            return replace(trial, figures=trial.figures.further(whole.figures, times - 3))
        return replace(whole, figures=whole.figures.plus(self.sketch(candidate, 2), self.sketch(candidate)))

    def run(
        self, candidate: Candidate, *, layers: int | None = None, times: int | None = None, quickly: bool = False
    ) -> Trial:
        """One step, scheduled and simulated; with `layers`, of a model with so many periods of its equal layers, and
        with `times`, of so many micro-batches. `quickly`: with the bucket sizes that arithmetic gives, and no others.
        """
        found = self.captured(candidate)
        program = found.program if layers is None else found.with_layers(layers)
        times = candidate.accumulate if times is None else times
        building = Building(self._setup, candidate, times, quickly)
        made = building.program(program)
        timeline = predicted(made, building.carriers.run_on(building.machine), self.measured)
        curve = memory_curve(made)
        waits: dict[str, float] = {}
        for travel in timeline.communication:
            if travel.exposed:
                cause = f"{travel.group} {travel.kind}"
                waits[cause] = waits.get(cause, 0.0) + travel.exposed
        kept = sum(tensor_bytes(node.meta["val"]) for item, node in made.named_inputs()
                   if item.kind is InputKind.WORKSPACE)  # fmt: skip
        figures = Figures(timeline.seconds, timeline.busy, waits, curve.held - kept, curve.peak + kept)
        return Trial(figures, timeline, building.whole)
