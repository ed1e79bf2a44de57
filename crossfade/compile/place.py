"""Where a step runs: the axes of its mesh and who is on them, the parts that this rank keeps, and the machine."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from crossfade.capture.training import LossFunction, loss_of
from crossfade.compile.carriers import Carriers
from crossfade.compile.options import Options
from crossfade.compile.pipeline import DataParallelMode
from crossfade.compile.reduce_dtype import along_axes, of_16_bits
from crossfade.compile.tensor_parallel import TensorParallel
from crossfade.cost.calibrate import calibrate
from crossfade.cost.machine import Machine
from crossfade.cost.presets import preset
from crossfade.errors import CrossfadeError, MeshError, ModelError, NotYetError
from crossfade.graph.private import group_named
from crossfade.ranks.checkpoint import checksums
from crossfade.ranks.groups import Lease
from crossfade.ranks.meeting import meet
from crossfade.ranks.members import Members
from crossfade.ranks.mesh import (
    COPY_AXIS,
    EXPERT_AXIS,
    SPLIT_AXIS,
    Axis,
    DataParallel,
    MeshLike,
    backend_on,
    data_parallel_axes,
    has_axis,
    ranks_of,
)
from crossfade.ranks.shards import Shards, is_distributed

log = logging.getLogger("crossfade")


@dataclass(frozen=True)
class Place:
    """Where a step runs; by default on one device."""

    axes: DataParallel | None = None
    """The axes that a batch is split over."""
    mode: DataParallelMode = "replicate"
    members: Members | None = None
    """The ranks of these axes."""
    groups: Mapping[str, str] = field(default_factory=dict)
    """The process group of each axis that is communicated along, by the axis's name."""
    tensor: TensorParallel | None = None
    shards: Shards | None = None
    machine: Machine | None = None
    """What is planned for, if anything."""
    reduce_dtypes: Mapping[str, str] = field(default_factory=dict)
    """The dtype that gradients are sent in along an axis, where it is not their own."""
    device: str = "cpu"
    lease: Lease | None = None
    """Keeps groups and members until the step is closed."""

    @classmethod
    def open(
        cls, model: nn.Module, loss_fn: LossFunction | None, optimizer: Optimizer, mesh: MeshLike, options: Options
    ) -> Place:
        """Meet the other ranks, agree with them on the options, and open process groups of our own."""
        lease, timeout = Lease(model), options.timeout
        device = next((parameter.device.type for parameter in model.parameters()), "cpu")
        if has_axis(mesh, EXPERT_AXIS):
            _check_beside_experts(options)
        present = _agree_on_settings(mesh, lease, options)
        tensor: TensorParallel | None = None
        if options.tensor_parallel is not None:
            _check_not_in_rows(model)
            loss = _loss_of(loss_fn)
            plan = options.tensor_parallel
            tensor, mesh = TensorParallel.of(plan, mesh, model, optimizer, loss, timeout, lease, present)
        axes = data_parallel_axes(mesh)
        mode = _mode_over(axes, options.data_parallel, by_plan=tensor is not None)
        _check_wholeness(model, mode, options.keep_whole)
        members, groups = _open_groups(axes, mode, timeout, lease) if axes is not None else (None, {})
        groups |= {tensor.axis.name: tensor.group} if tensor else {}
        place = cls(axes, mode, members, groups, tensor, device=device, lease=lease)
        place = replace(place, machine=place._machine(options, model))
        _check_planned(options, axes, place)
        if axes is not None:
            place = replace(place, reduce_dtypes=along_axes(options.reduce_dtype, _travelled(axes, mode)))
        if axes is None or members is None:
            return place
        later = tensor is not None
        shards = shards_of(model, optimizer, axes, mode, members, options.keep_whole, after_plan=later)
        return replace(place, shards=shards)

    def begin_rows(self, whole: Collection[str] | None) -> None:
        """Split the rows of what a plan has just made parts of, but those of parameters to keep `whole`."""
        if self.shards is None or self.shards.has_begun or self.experts is not None:
            return
        self.shards.begin()
        if self.mode != "zero1" and whole is not None:
            self.split_all_but(whole)

    def split_experts(self, names: Collection[str]) -> None:
        """Keep this rank's experts alone, of the parameters that hold some; the same ones for every batch."""
        assert self.shards is not None
        if not self.shards.has_begun:
            self.shards.begin(names)
            self.split_all_but(())
        if set(names) != set(self.shards.names):
            other = sorted(set(names) ^ set(self.shards.names))[0]
            raise ModelError(
                f"experts in {other} for some batches and not for others",
                expected="the same experts for every batch",
                remedy="let the model compute its experts in one way, by grouped_mm",
            )

    def split_all_but(self, whole: Collection[str]) -> None:
        """Split the rows of all parameters but these; once only."""
        assert self.shards is not None
        self.shards.split_all_but(whole)
        if self.tensor is not None:
            self.tensor.hold()

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """With the model's whole parameters for a while. All ranks must enter."""
        for split in (self.shards, self.tensor):
            if split is not None:
                split.check()
        with contextlib.ExitStack() as whole:
            for split in (self.shards, self.tensor):  # rows first: a plan's parts are put together of all their rows
                if split is not None:
                    whole.enter_context(split.gathered())
            yield

    @property
    def experts(self) -> Axis | None:
        """The axis that experts are spread over, if they are."""
        return self.axes.split if self.axes is not None and self.axes.experts else None

    @property
    def everyone(self) -> Members | None:
        """All ranks that train the model together."""
        return self.tensor.everyone[0] if self.tensor is not None else self.members

    @property
    def everyones_group(self) -> str | None:
        """The name of the process group of all of them."""
        if self.tensor is not None:
            return self.tensor.everyone[1]
        return self.groups.get(self.axes.whole.name) if self.axes is not None else None

    @property
    def part_of_batch(self) -> int:
        """Which part of a batch is this rank's."""
        return self.members.rank if self.members is not None else 0

    @property
    def carriers(self) -> Carriers:
        """What carries the collectives of each axis."""
        axes = [self.axes.whole, self.axes.split, self.axes.copies] if self.axes else []
        axes += [self.tensor.axis] if self.tensor else []
        backends = {axis.name: backend_on(self.device, axis.backend) for axis in axes if axis is not None}
        return Carriers(backends, self.machine, of_16_bits(self.reduce_dtypes))

    @property
    def can_gather(self) -> bool:
        """Whether ranks of the data-parallel axes can gather: gloo's all-gather crashes on CUDA tensors."""
        assert self.axes is not None
        return backend_on(self.device, self.axes.whole.backend) != "gloo" or self.device != "cuda"

    @property
    def sizes(self) -> dict[str, int]:
        """The ranks along each axis that programs communicate along."""
        axes = [self.tensor.axis] if self.tensor else []
        axes += [self.axes.whole] if self.axes else []
        axes += [axis for axis in (self.axes.split, self.axes.copies) if axis] if self.axes and self.shards else []
        return {axis.name: axis.size for axis in axes}

    @property
    def kept_whole(self) -> tuple[str, ...]:
        """The parameters that every rank keeps whole where the others are split."""
        return (self.shards.whole or ()) if self.shards is not None else ()

    def _machine(self, options: Options, model: nn.Module) -> Machine | None:
        """The machine to plan for, unless the user has passes of their own."""
        given = options.machine
        given = preset(given) if isinstance(given, str) and given != "calibrate" else given
        together = self.everyone.together("calibrate the machine") if self.everyone else contextlib.nullcontext()
        with together:
            if options.passes is not None:
                return None
            if options.plan is not None:
                return options.plan.machine
            return machine_for(given, self.mode, self.axes, self.groups, self.everyones_group, model)


def _loss_of(loss_fn: LossFunction | None) -> Callable[[Callable[..., Any], tuple[Any, ...]], torch.Tensor]:
    return lambda call, batch: loss_of(call, loss_fn, batch)


def _travelled(axes: DataParallel, mode: DataParallelMode) -> list[str]:
    """The axes that gradients travel along."""
    if mode == "replicate":
        return [axes.whole.name, *([axes.copies.name] if axes.experts and axes.copies is not None else [])]
    return [axes.split.name, *([axes.copies.name] if axes.copies is not None else [])]


def _check_beside_experts(options: Options) -> None:
    """Refuse what does not go together with experts over an axis."""
    if options.data_parallel != "replicate":
        raise NotYetError(
            f"data_parallel={options.data_parallel!r} together with a mesh axis {EXPERT_AXIS}",
            expected=f"rows of parameters that are not split again, with {EXPERT_AXIS} alone or beside dp and tp",
            remedy=f"leave data_parallel out, or the axis {EXPERT_AXIS}: call it dp to split the batch alone",
        )


def _check_not_in_rows(model: nn.Module) -> None:
    """Refuse to split by a plan what an earlier step has split by rows."""
    if split := [name for name, parameter in model.named_parameters() if is_distributed(parameter)]:
        raise ModelError(
            f"parameter {split[0]} as a DTensor, together with tensor_parallel",
            expected="whole parameters, of which the plan makes parts",
            remedy="build the model again and load a checkpoint into it (step.save, step.load)",
        )


def _mode_over(axes: DataParallel | None, asked: DataParallelMode, *, by_plan: bool) -> DataParallelMode:
    """The mode over the data-parallel axes; on one device every mode is the same."""
    if axes is None and by_plan and asked != "replicate":
        raise MeshError(
            f"data_parallel={asked!r} on a mesh with an axis tp alone",
            expected=f"an axis dp beside it, or {COPY_AXIS} and {SPLIT_AXIS}",
            remedy='pass mesh={"dp": ..., "tp": ...}, or leave data_parallel out',
        )
    return asked if axes is not None else "replicate"


def _check_planned(options: Options, axes: DataParallel | None, place: Place) -> None:
    """Refuse what only a plan can keep, without one."""
    machine = place.machine
    if options.memory_limit is not None and (
        options.passes is not None or (options.machine is None and machine is None)
    ):
        raise CrossfadeError(
            f"memory_limit={options.memory_limit} without a machine to plan for",
            expected="machine= too, and no passes of one's own",
            remedy='pass machine="calibrate", or the name of a preset',
        )
    if options.keep_whole is None and axes is not None and machine is None:
        raise CrossfadeError(
            'keep_whole="auto" without a machine to plan for',
            expected="no passes of one's own",
            remedy="leave them out, or name the parameters to keep whole",
        )


def _agree_on_settings(mesh: MeshLike, lease: Lease, options: Options) -> Members | None:
    """The ranks of the mesh, once all have come with the same settings; None where there is only one."""
    if not (ranks := ranks_of(mesh)):
        return None
    axes = dict(mesh) if isinstance(mesh, Mapping) else f"{tuple(mesh.shape)} of {mesh.mesh_dim_names}"  # type: ignore[union-attr]
    alone = dist.get_backend() == "emulated"
    members = lease.hold(meet(ranks, ranks.index(dist.get_rank()), options.timeout, alone=alone))
    lines = [f"mesh = {axes}", *options.settings()]
    members.agree(" ".join(lines), "\n".join(lines), to="compile a step")
    return members


def _check_wholeness(model: nn.Module, mode: DataParallelMode, kept_whole: Collection[str] | None = ()) -> None:
    """Refuse to train as whole, or to keep whole, what an earlier step has split."""
    split = [name for name, parameter in model.named_parameters() if is_distributed(parameter)]
    lost = split if kept_whole is None else [name for name in split if name in kept_whole]
    if lost:
        raise ModelError(
            f"parameter {lost[0]} as a DTensor",
            expected="whole parameters, of which some are to stay whole",
            remedy="build the model again, load a checkpoint (step.save, step.load), or leave out keep_whole",
        )
    if split and mode not in ("zero2", "zero3"):
        raise ModelError(
            f"parameter {split[0]} as a DTensor",
            expected=f"whole parameters for data_parallel={mode!r}",
            remedy="build the model again and load a checkpoint into it (step.save, step.load), or pass zero2 or zero3",
        )


def machine_for(
    given: Machine | str | None,
    mode: DataParallelMode,
    axes: DataParallel | None,
    groups: Mapping[str, str],
    everyone: str | None,
    model: nn.Module,
) -> Machine | None:
    """The machine to plan for; measured on the ranks if asked for, the nearest preset where a plan is needed."""
    device = next(model.parameters()).device.type
    named = {axis: group_named(group) for axis, group in groups.items()}
    several = {axis: group for axis, group in named.items() if group.size() > 1}
    if given == "calibrate" and several and everyone is not None:
        return calibrate("calibrated", several, device=device, world=group_named(everyone))
    if given is None and axes is not None and mode in ("zero2", "zero3"):
        return _nearest_preset(next(model.parameters()).device, backend_on(device, axes.whole.backend), mode)
    return given if isinstance(given, Machine) else None


def _nearest_preset(device: torch.device, backend: str, mode: DataParallelMode) -> Machine:
    """A machine for modes that need one, where none is given; with a warning where it is most likely another."""
    if backend == "gloo":
        return preset("loopback-gloo")
    _warn_of_preset(mode, found_instead(device.type, backend, _name_of(device)))
    return preset(_FOR_GPUS)


_FOR_GPUS = "h100-nvlink-node"


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def found_instead(device: str, backend: str, name: str) -> str:
    """What there is in place of the preset's H100s, in words; nothing if that is what there is.

    >>> found_instead("cuda", "nccl", "NVIDIA H100 80GB HBM3"), found_instead("cuda", "nccl", "NVIDIA A10G")
    ('', ', but the device here is NVIDIA A10G')
    >>> found_instead("cpu", "mpi", "")
    ', but the parameters are on cpu and travel over mpi'
    """
    if device != "cuda":
        return f", but the parameters are on {device} and travel over {backend}"
    return "" if "H100" in name else f", but the device here is {name}"


@functools.cache
def _warn_of_preset(mode: str, instead: str) -> None:
    """Once in a process: who compiles many steps has read it."""
    log.warning(
        'no machine given: data_parallel="%s" is planned for the preset %s%s; pass machine="calibrate" to measure this '
        "one, which takes some seconds, or the name of a preset",
        mode,
        _FOR_GPUS,
        instead,
    )


def _open_groups(
    axes: DataParallel, mode: DataParallelMode, timeout: float, lease: Lease
) -> tuple[Members, dict[str, str]]:
    """Process groups of our own for each axis that the mode communicates along, by the axis's name."""
    members, group = axes.whole.open(timeout, lease)
    groups = {axes.whole.name: group}
    if (mode != "replicate" or axes.experts) and axes.copies is not None:
        groups |= {axis.name: axis.open(timeout, lease)[1] for axis in (axes.split, axes.copies)}
    return members, groups


def shards_of(
    model: nn.Module,
    optimizer: Optimizer,
    axes: DataParallel,
    mode: DataParallelMode,
    members: Members,
    kept_whole: Collection[str] | None = (),
    *,
    after_plan: bool = False,
) -> Shards | None:
    """The parts that this rank keeps, each of its own model: so all ranks must have built the same one.

    Parameters are split here, but those to keep whole; where these are to be chosen, once they are. With a plan nothing
    is split before that has split the model.
    """
    if mode == "replicate" and not axes.experts:
        return None
    device = next(model.parameters()).device.type
    if axes.split.name == COPY_AXIS or axes.split.size == 1:
        raise MeshError(
            f"data_parallel={mode!r} on a mesh that splits nothing",
            expected=f"an axis {SPLIT_AXIS} of at least 2 ranks, or one axis dp",
            remedy='give it ranks, or pass data_parallel="replicate"',
        )
    if device == "cuda" and backend_on(device, axes.split.backend) == "gloo":
        raise NotYetError(
            f"{f'the mesh axis {EXPERT_AXIS}' if axes.experts else f'data_parallel={mode!r}'} on CUDA over gloo",
            expected="a backend that gathers CUDA tensors: gloo's all-gather crashes on them",
            remedy="initialise the process group with nccl, or let every rank hold all parameters: one axis dp, and "
            'data_parallel="replicate"',
        )
    lines = [f"keep_whole = {'auto' if kept_whole is None else sorted(kept_whole)}", *checksums(model, optimizer)]
    members.agree(" ".join(lines), "\n".join(lines))
    mesh = axes.device_mesh(device, members)
    if axes.experts:
        return Shards(model, optimizer, mesh, begins=False, guard=members.guard)
    if after_plan:
        will_split = kept_whole is None and mode != "zero1"
        return Shards(model, optimizer, mesh, will_split=will_split, begins=False, guard=members.guard)
    shards = Shards(model, optimizer, mesh, will_split=kept_whole is None, guard=members.guard)
    if mode != "zero1" and kept_whole is not None:
        shards.split_all_but(kept_whole)
    return shards
