"""What `compile_step` checks and opens before anything is captured: options, process groups, a machine, parts."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import functools
import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from crossfade.capture.baked_in import BakedIn
from crossfade.compile.pipeline import DataParallelMode
from crossfade.cost.calibrate import calibrate
from crossfade.cost.machine import Machine
from crossfade.cost.presets import preset
from crossfade.errors import CrossfadeError, MeshError, ModelError, NotYetError, RankFailedError
from crossfade.graph.private import group_named
from crossfade.ranks.checkpoint import checksums
from crossfade.ranks.groups import Lease
from crossfade.ranks.meeting import meet
from crossfade.ranks.members import Members
from crossfade.ranks.mesh import COPY_AXIS, SPLIT_AXIS, DataParallel, MeshLike, backend_on, ranks_of
from crossfade.ranks.shards import Shards, is_distributed

log = logging.getLogger("crossfade")


def check_tensor_parallel(mode: DataParallelMode) -> None:
    """Refuse what is not possible together with a plan."""
    if mode != "replicate":
        raise NotYetError(
            f"data_parallel={mode!r} together with tensor_parallel",
            expected='data_parallel="replicate" over the other axis',
            remedy="leave out one of the two",
        )


KeepWhole = Literal["auto"] | Collection[str]
"""Parameters to keep whole: their names, or patterns; or as many as pay."""


def names_to_keep_whole(
    asked: KeepWhole, mode: DataParallelMode, model: nn.Module, memory_limit: int | None
) -> tuple[str, ...] | None:
    """The parameters to keep whole, by name; None where that is to be chosen."""
    if not asked:
        return ()
    if mode not in ("zero2", "zero3"):
        raise CrossfadeError(
            f"keep_whole={asked!r} with data_parallel={mode!r}",
            expected="a mode that splits parameters",
            remedy="pass zero2 or zero3, or leave it out: every rank keeps all of them whole",
        )
    if asked == "auto":
        _check_automatic(mode, memory_limit)
        return None
    if isinstance(asked, str):
        raise CrossfadeError(
            f"keep_whole={asked!r}", expected='"auto", or a list', remedy=f"pass [{asked!r}] for one name or pattern"
        )
    first = {parameter: name for name, parameter in model.named_parameters()}
    names = {name: first[one] for name, one in model.named_parameters(remove_duplicate=False)}
    patterns = tuple(asked)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=1)
            raise CrossfadeError(
                f"no parameter {pattern!r} to keep whole",
                expected="a parameter's name, or a pattern with *",
                remedy=f"did you mean {near[0]!r}" if near else "see model.named_parameters()",
            )
    chosen = {names[name] for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}
    return tuple(name for name in first.values() if name in chosen)


def _check_automatic(mode: DataParallelMode, memory_limit: int | None) -> None:
    if mode != "zero2":
        raise CrossfadeError(
            f'keep_whole="auto" with data_parallel={mode!r}',
            expected="zero2, which holds all parameters whole for a while anyway",
            remedy="name the parameters to keep whole",
        )
    if memory_limit is not None:
        raise CrossfadeError(
            'keep_whole="auto" within a memory limit',
            expected="names, since what is kept whole between steps does not count towards the limit",
            remedy="name the parameters to keep whole, or leave one of the two out",
        )


def check_wholeness(model: nn.Module, mode: DataParallelMode, kept_whole: Collection[str] | None = ()) -> None:
    """Refuse to train as whole, or to keep whole, what an earlier step has split."""
    split = [name for name, parameter in model.named_parameters() if is_distributed(parameter)]
    lost = split if kept_whole is None else [name for name in split if name in kept_whole]
    if lost:
        raise ModelError(
            f"parameter {lost[0]} as a DTensor",
            expected="whole parameters, of which some are to stay whole",
            remedy="build the model anew and load a checkpoint into it (step.save, step.load), or leave out keep_whole",
        )
    if split and mode not in ("zero2", "zero3"):
        raise ModelError(
            f"parameter {split[0]} as a DTensor",
            expected=f"whole parameters for data_parallel={mode!r}",
            remedy="build the model anew and load a checkpoint into it (step.save, step.load), or pass zero2 or zero3",
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


def agree_on_settings(mesh: MeshLike, lease: Lease, timeout: float, settings: Mapping[str, Any]) -> Members | None:
    """The ranks of the mesh, once all have come with the same settings; None where there is only one."""
    if not (ranks := ranks_of(mesh)):
        return None
    axes = dict(mesh) if isinstance(mesh, Mapping) else f"{tuple(mesh.shape)} of {mesh.mesh_dim_names}"  # type: ignore[union-attr]
    alone = dist.get_backend() == "emulated"
    members = lease.hold(meet(ranks, ranks.index(dist.get_rank()), timeout, alone=alone))
    lines = [f"mesh = {axes}", *(f"{name} = {value}" for name, value in settings.items()), f"timeout = {timeout}"]
    members.agree(" ".join(lines), "\n".join(lines), to="compile a step")
    return members


def open_groups(
    axes: DataParallel, mode: DataParallelMode, timeout: float, lease: Lease
) -> tuple[Members, dict[str, str]]:
    """Process groups of our own for each axis that the mode communicates along, by the axis's name."""
    members, group = axes.whole.open(timeout, lease)
    groups = {axes.whole.name: group}
    if mode != "replicate" and axes.copies is not None:
        groups |= {axis.name: axis.open(timeout, lease)[1] for axis in (axes.split, axes.copies)}
    return members, groups


def shards_of(
    model: nn.Module,
    optimizer: Optimizer,
    axes: DataParallel,
    mode: DataParallelMode,
    members: Members,
    kept_whole: Collection[str] | None = (),
) -> Shards | None:
    """The parts that this rank keeps, each of its own model: so all ranks must have built the same one.

    Parameters are split here, but those to keep whole; where these are to be chosen, once they are.
    """
    if mode == "replicate":
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
            f"data_parallel={mode!r} on CUDA over gloo",
            expected="a backend that gathers CUDA tensors: gloo's all-gather crashes on them",
            remedy='initialise the process group with nccl, or pass data_parallel="replicate"',
        )
    lines = [f"keep_whole = {'auto' if kept_whole is None else sorted(kept_whole)}", *checksums(model, optimizer)]
    members.agree(" ".join(lines), "\n".join(lines))
    mesh = axes.device_mesh(device, members)
    shards = Shards(model, optimizer, mesh, will_split=kept_whole is None, guard=members.guard)
    if mode != "zero1" and kept_whole is not None:
        shards.split_all_but(kept_whole)
    return shards


def check_options(**given: tuple[str, Any]) -> None:
    """Refuse words that an option does not know, each given with its type."""
    for name, (value, kind) in given.items():
        if value not in get_args(kind):
            expected = " or ".join(repr(one) for one in get_args(kind))
            raise CrossfadeError(f"{name}={value!r}", expected=expected, remedy="pass one of those")


def check_numbers(accumulate: int, clip_grad_norm: float | None, timeout: float, check_every: int) -> None:
    """Refuse numbers that make no sense."""
    if check_every < 0:
        raise CrossfadeError(
            f"check_every={check_every}", expected="a number of steps", remedy="pass 0 to compare only the first"
        )
    if accumulate < 1:
        raise CrossfadeError(
            f"accumulate={accumulate}", expected="at least 1", remedy="pass the number of micro-batches"
        )
    if clip_grad_norm is not None and not clip_grad_norm > 0:
        raise CrossfadeError(
            f"clip_grad_norm={clip_grad_norm}", expected="more than 0", remedy="pass None for no clipping"
        )
    if not timeout > 0:
        raise CrossfadeError(f"timeout={timeout}", expected="seconds, more than 0", remedy="pass how long to wait")


@contextlib.contextmanager
def capturing(baked_in: BakedIn, members: Members | None) -> Iterator[None]:
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
