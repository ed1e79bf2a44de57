"""Tensor parallelism inside a training step: the model's forward and loss, run on this rank's parts.

The model is exported once for each shape of batch, without its numbers, and localized by the plan; what is traced then
is the local program, whose collectives know their backward.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.optim import Optimizer

from crossfade.errors import CaptureError, PlanError
from crossfade.graph.private import FakeTensorMode, tree_flatten
from crossfade.run.mesh import Axis
from crossfade.shard.localize import LocalProgram, Request, localize
from crossfade.shard.partition import RANK
from crossfade.shard.placements import REPLICATE, Placement, Shard
from crossfade.shard.plan import Plan
from crossfade.shard.sources import local_part

Forward = Callable[[dict[str, Tensor], tuple[Any, ...]], Any]


@dataclass
class TensorParallel:
    """A plan for one model over one axis. Parameters become this rank's parts when it is first localized."""

    plan: Plan | None
    axis: Axis
    model: nn.Module
    optimizer: Optimizer
    skeleton: nn.Module
    placements: dict[str, Placement] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, plan: Plan | Mapping[str, object] | None, axis: Axis, model: nn.Module, optimizer: Optimizer, loss: Any
    ) -> TensorParallel:
        """Get ready: a copy of the model without numbers is kept for exports, which computes `loss(model, batch)`."""
        chosen = plan if isinstance(plan, Plan) or plan is None else Plan(plan)
        skeleton = _without_numbers(model)
        called = skeleton.forward

        def forward(self: nn.Module, *batch: Any) -> Tensor:
            return loss(called, batch)

        skeleton.forward = types.MethodType(forward, skeleton)  # type: ignore[method-assign]
        model.register_buffer(RANK, torch.tensor(axis.index, device=_device(model)), persistent=False)
        return cls(chosen, axis, model, optimizer, skeleton)

    def forward(self, batch: tuple[Any, ...]) -> Forward:
        """The loss of batches of these shapes, as a function of the model's state and the batch."""
        self.skeleton.train(self.model.training)
        exported = torch.export.export(self.skeleton, batch, strict=False)
        plan = self.plan if self.plan is not None else Plan.megatron(exported)
        resolved = plan.resolve(exported, self.axis.size)
        local = localize(exported, resolved, self.axis.size, self.axis.name, Request())
        self._split(dict(local.parameters), resolved.aliases)
        tied = _first_names(self.model)
        return lambda state, batch: run_local(local, state, batch, tied)

    def split_over(self) -> dict[str, str]:
        """The parameters that are split, with the axis."""
        return {name: self.axis.name for name, place in self.placements.items() if isinstance(place, Shard)}

    def part_of(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole parameter, or of something like it."""
        placement = self.placements.get(self.aliases.get(name, name), REPLICATE)
        return local_part(whole, placement, self.axis.index, self.axis.size)

    def _split(self, placements: dict[str, Placement], aliases: Mapping[str, str]) -> None:
        if self.placements:
            if self.placements != placements:
                raise PlanError(
                    "a plan that splits the model otherwise for this batch than for the first",
                    remedy="name the parameters in the plan, instead of leaving it to the graph",
                )
            return
        self.placements, self.aliases = placements, aliases
        for name, parameter in self.model.named_parameters():
            whole = parameter.shape
            parameter.data = self.part_of(name, parameter.data)
            entries = self.optimizer.state.get(parameter, {})
            for key, value in entries.items():
                if isinstance(value, Tensor) and value.shape == whole:
                    entries[key] = self.part_of(name, value)


def run_local(local: LocalProgram, state: dict[str, Tensor], batch: tuple[Any, ...], tied: Mapping[str, str]) -> Any:
    """Run a local program on a state by name and a batch; buffers that it changes are changed in the state.

    `tied` gives the name in the state of parameters that have several.
    """
    signature = local.exported.graph_signature
    leaves, _ = tree_flatten((batch, {}))
    given = iter(leaves)
    values = []
    for spec in signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            values.append(next(given))
        elif (name := tied.get(str(spec.target), str(spec.target))) in state:
            values.append(state[name])
        else:
            values.append(local.exported.constants[str(spec.target)])
    results = fx.Interpreter(local.exported.graph_module).run(*values)
    loss = None
    for spec, value in zip(signature.output_specs, results, strict=True):
        if spec.kind is OutputKind.USER_OUTPUT:
            loss = value
        elif spec.kind is OutputKind.BUFFER_MUTATION:
            state[str(spec.target)] = value
        else:
            raise CaptureError(f"an output of kind {spec.kind.name}", remedy="return only the loss from the model")
    return loss


def _first_names(model: nn.Module) -> dict[str, str]:
    """For each name of a parameter, the one that `named_parameters` lists it under."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name: first[id(one)] for name, one in model.named_parameters(remove_duplicate=False)}


def _without_numbers(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers have shapes and devices but no data."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(mode.from_tensor(parameter.data), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = mode.from_tensor(buffer)
    return copy.deepcopy(model, memo)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
