"""Tensor parallelism inside a training step: the model's forward and loss, run on this rank's parts.

The model is exported once for each shape of batch, without its numbers, and localized by the plan; what is traced then
is the local program, whose collectives know their backward.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.export.graph_signature import InputKind, OutputKind
from torch.optim import Optimizer

from crossfade.capture.tracing import to_fake
from crossfade.errors import CaptureError, MeshError, ModelError, NotYetError, PlanError
from crossfade.graph.passes import Outcome, Verdict
from crossfade.graph.private import FakeTensorMode, has_forward_hooks, own_buffers, tree_flatten
from crossfade.graph.program import Program
from crossfade.ranks.checkpoint import checksums
from crossfade.ranks.groups import Lease
from crossfade.ranks.members import Members
from crossfade.ranks.mesh import Axis, MeshLike, without_axis
from crossfade.ranks.shards import replaced
from crossfade.shard.tensor.builder import RANK
from crossfade.shard.tensor.devices import like
from crossfade.shard.tensor.localize import LocalProgram, Request, localize
from crossfade.shard.tensor.parts import Parts
from crossfade.shard.tensor.placements import Placement
from crossfade.shard.tensor.plan import Plan

log = logging.getLogger("crossfade")

Forward = Callable[[dict[str, Tensor], tuple[Any, ...]], Any]
Loss = Callable[[Callable[..., Any], tuple[Any, ...]], Tensor]


@dataclass
class TensorParallel:
    """A plan for one model over one axis. Parameters become this rank's parts when it is first localized."""

    plan: Plan
    axis: Axis
    members: Members
    """Of the axis."""
    group: str
    everyone: tuple[Members, str]
    """The ranks of all axes of the mesh, and the name of their process group."""
    model: nn.Module
    optimizer: Optimizer
    loss: Loss
    mesh: DeviceMesh
    """All axes."""
    parts: Parts | None = None
    """How the model is split; None until it is."""
    verdicts: tuple[Verdict, ...] = ()
    """Where the program localized last reduces and gathers, and what of the plan came to nothing."""
    _held: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        plan: Plan | Mapping[str, object],
        mesh: MeshLike,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        timeout: float,
        lease: Lease,
        present: Members | None,
    ) -> tuple[TensorParallel, DeviceMesh | None]:
        """Get ready to compute `loss(model, batch)` split over the mesh's axis `tp`; and the mesh of the other axes.

        `present` are the ranks of the mesh; the lease keeps what is opened."""
        device = next(model.parameters()).device.type
        axis, others, whole = without_axis(mesh, "tp", present, device)
        if axis.size == 1:
            raise MeshError("an axis tp of one rank", remedy="give it ranks, or pass no tensor_parallel plan")
        if has_forward_hooks(model):
            raise NotYetError(
                f"a forward hook on the {type(model).__name__} itself, together with tensor_parallel",
                expected="hooks on modules inside it only",
                remedy="remove it, or wrap the model in a module that does what the hook does",
            )
        members, group = axis.open(timeout, lease)
        everyone = members, group
        if others is not None:
            ranks = mesh.mesh.flatten().tolist() if isinstance(mesh, DeviceMesh) else range(dist.get_world_size())
            everyone = Axis("all", tuple(ranks), list(ranks).index(dist.get_rank()), axis.backend).open(timeout, lease)
        chosen = plan if isinstance(plan, Plan) else Plan(plan)
        return cls(chosen, axis, members, group, everyone, model, optimizer, loss, whole), others

    @property
    def beyond(self) -> Members | None:
        """The members of all axes, where there are others than this one."""
        return self.everyone[0] if self.everyone[0] is not self.members else None

    def agree(self) -> None:
        """Compare the model and the optimizer's state along the axis, while every rank still has all of them."""
        if self.parts is None:
            lines = checksums(self.model, self.optimizer)
            self.members.agree(" ".join(lines), "\n".join(lines))

    def forward(self, batch: tuple[Any, ...]) -> Forward:
        """The loss of batches of these shapes, as a function of the model's state and the batch."""
        self.check()
        exported = torch.export.export(self._without_numbers(), batch, strict=False)
        resolved = self.plan.resolve(exported, self.axis.size)
        local = localize(exported, resolved, self.axis.size, self.axis.name, Request())
        self._split(dict(local.parameters), resolved.aliases)
        self.verdicts = local.verdicts
        for note in resolved.notes:
            log.warning("%s", note)
        for said in local.verdicts:
            log.log(logging.INFO if said.outcome is Outcome.INSERTED else logging.WARNING, "%s", said)
        tied = _first_names(self.model)
        return lambda state, batch: run_local(local, state, batch, tied)

    def split_again(
        self, placements: Mapping[str, Placement], aliases: Mapping[str, str], verdicts: tuple[Verdict, ...]
    ) -> None:
        """Split the model as an earlier process has, without exporting it."""
        self.check()
        self._split(dict(placements), aliases)
        self.verdicts = verdicts

    def said(self) -> str:
        """What the plan came to, in a line."""
        reasons = Counter(verdict.reason for verdict in self.verdicts)
        values = "".join(f"; {count} x {reason}" for reason, count in reasons.items())
        return f"{len(self.split_over())} parameters over {self.axis.name}{values}"

    def split_over(self) -> dict[str, str]:
        """The parameters that are split, by the names that the model lists them under, with the axis."""
        parts = self.parts
        if parts is None:
            return {}
        return {name: self.axis.name for name, _ in self.model.named_parameters() if parts.is_split(name)}

    def alike(self, program: Program) -> list[str]:
        """The inputs and constants of a program that are the same on all ranks of the axis, by name."""
        parts = self.parts
        apart = {name for name in _named_state(self.model) if name.rpartition(".")[2] == RANK}
        apart |= {name for name in _named_state(self.model) if parts is not None and parts.is_split(name)}
        names = [given.name for given in program.inputs]  # of an optimizer's state: PARAMETER:ENTRY
        return [*(name for name in names if name.partition(":")[0] not in apart), *program.constants]

    @contextlib.contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """The model with its whole parameters and buffers, for evaluation or export. All ranks must enter.

        Where rows of parts are split, after these were gathered.
        """
        parts = self.parts
        split = {name: tensor for name, tensor in _named_state(self.model).items() if parts and parts.is_split(name)}
        with replaced(
            self.model, {tensor: parts.whole(name, tensor) for name, tensor in split.items()} if parts else {}
        ):
            yield self.model

    def check(self) -> None:
        """Refuse to take for a part what was put into the model since it was split."""
        if self.parts is None:
            return
        for name, tensor in _named_state(self.model).items():
            if self.parts.is_split(name) and self._held.get(name) is not tensor:
                raise ModelError(
                    f"another tensor {name} than the one that was split",
                    expected="parameters and split buffers that stay the model's own",
                    remedy="load by step.load or step.load_state_dict, outside step.gathered(); or compile again",
                )

    def hold(self) -> None:
        """Take the model's tensors for the parts from now on: their rows have been split, which replaces parameters."""
        self._held = _named_state(self.model)

    def _without_numbers(self) -> nn.Module:
        """A copy of the model as it is now that computes the loss; its parameters and buffers are whole, without data.

        A copy for each export: what a module's attributes say by then, and which of them are in training, counts.
        """
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        memo: dict[int, Any] = {}
        for name, tensor in _named_state(self.model).items():
            fake: Tensor = to_fake(mode, tensor)
            if self.parts is not None and self.parts.is_split(name):
                fake = fake.new_empty(self.parts.whole_shape(name, tensor.shape))
            memo[id(tensor)] = like(fake, tensor)
        copied = copy.deepcopy(self.model, memo)
        own_buffers(copied).pop(RANK, None)
        called = copied.forward

        def forward(module: nn.Module, *batch: Any) -> Tensor:
            return self.loss(called, batch)

        copied.forward = types.MethodType(forward, copied)  # type: ignore[method-assign]
        return copied

    def _split(self, placements: dict[str, Placement], aliases: Mapping[str, str]) -> None:
        if self.parts is not None:
            if self.parts.placements != placements:
                raise PlanError(
                    "a plan that splits the model otherwise for this batch than for the first",
                    remedy="name the parameters in the plan, instead of leaving it to the graph",
                )
            return
        device = next(self.model.parameters()).device
        size, rank = self.axis.size, self.axis.index
        parts = Parts(placements, aliases, self.axis.name, self.group, rank, size, device.type, self.mesh)
        for name, tensor in _named_state(self.model).items():
            whole = tensor.shape
            tensor.data = parts.part(name, tensor.data)
            self._held[name] = tensor
            entries = self.optimizer.state.get(tensor, {})
            for key, value in entries.items():
                if isinstance(value, Tensor) and value.shape == whole:
                    entries[key] = parts.part(name, value)
        self.model.register_buffer(RANK, torch.tensor(rank, device=device), persistent=False)
        self.parts = parts


def check_not_split(model: nn.Module) -> None:
    """Refuse a model of which an earlier step has kept this rank's parts only."""
    if any(name.rpartition(".")[2] == RANK for name, _ in model.named_buffers()):
        raise ModelError(
            f"a {type(model).__name__} that an earlier compile_step has split by a plan",
            expected="a whole model",
            remedy="build the model again, and load into it what that step saved (step.save, step.load)",
        )


def run_local(local: LocalProgram, state: dict[str, Tensor], batch: tuple[Any, ...], tied: Mapping[str, str]) -> Any:
    """Run a local program on a state by name and a batch; buffers that it changes are changed in the state.

    `tied` gives the name in the state of parameters and buffers that have several.
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
    results = _Differentiable(local.exported.graph_module).run(*values)
    loss = None
    for spec, value in zip(signature.output_specs, results, strict=True):
        if spec.kind is OutputKind.USER_OUTPUT:
            loss = value
        elif spec.kind is OutputKind.BUFFER_MUTATION:
            state[tied[str(spec.target)]] = value
        else:
            raise CaptureError(f"an output of kind {spec.kind.name}", remedy="return only the loss from the model")
    return loss


class _Differentiable(fx.Interpreter):
    """Runs a graph that autograd records: of the functional `copy`, that knows the derivative of the form in place."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator."""
        if target is torch.ops.aten.copy.default:
            return torch.empty_like(args[0]).copy_(args[1])
        return super().call_function(target, args, kwargs)


def _named_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, each under its first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _first_names(model: nn.Module) -> dict[str, str]:
    """For each name of a parameter or buffer, the one that the model lists it under first."""
    first = {id(tensor): name for name, tensor in _named_state(model).items()}
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: first[id(tensor)] for name, tensor in every}
