"""`compile_step(mesh="auto")`: the mesh and the rest are found at the first batch, by the first rank for all."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from crossfade.capture.divide_batch import Keywords
from crossfade.compile.agreement import telling
from crossfade.compile.memory_budget import budget_in_bytes, check_memory
from crossfade.compile.options import Exchange
from crossfade.compile.programs import Ready
from crossfade.compile.step import Step
from crossfade.compile.training import compile_step as compile_on_mesh
from crossfade.cost.calibrate import calibrate
from crossfade.cost.machine import ANY_AXIS, Machine
from crossfade.cost.presets import preset
from crossfade.errors import CrossfadeError, MeshError, NotYetError
from crossfade.ranks.meeting import meet
from crossfade.ranks.mesh import backend_on
from crossfade.search.find_plan import find_plan
from crossfade.search.plan_found import FoundPlan
from crossfade.tracebacks import users_frames

log = logging.getLogger("crossfade")
P = ParamSpec("P")

_PATIENCE = 1800.0
"""Seconds for which ranks wait for the first one to find a plan; if it ends, they know at once."""
_FOUND = {"data_parallel": "replicate", "keep_whole": (), "memory_limit": None, "plan": None, "phases": None}
"""What is found, or cannot be known before it is, with what stands for not having been given."""


class FoundStep(Step):
    """A step whose mesh and mode are found at its first batch; `found` is the table of what was tried."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, find: Callable[[tuple[Any, ...]], Any]) -> None:
        super().__init__(model, optimizer)
        self._find: Callable[[tuple[Any, ...]], tuple[FoundPlan, Step]] | None = find
        self._plan: FoundPlan | None = None

    @property
    def found(self) -> FoundPlan:
        """The plan that was found, on every rank."""
        if self._plan is None:
            raise self._too_early("asked for what was found")
        return self._plan

    def _prepared(self, batch: tuple[Any, ...], exchange: Exchange = "now") -> tuple[Ready, tuple[Any, ...]]:
        if self._find is not None:
            self._plan, step = self._find(batch)
            self.become(step)
            self._find = None
        return super()._prepared(batch, exchange)

    def close(self) -> None:
        """Close the step, whether or not anything was found for it yet."""
        self._find = None
        super().close()

    @contextlib.contextmanager
    def _together(self, what: str) -> Iterator[None]:
        if self._find is not None:
            raise self._too_early(f"asked to {what}")
        with super()._together(what):
            yield

    def _too_early(self, asked: str) -> CrossfadeError:
        return CrossfadeError(
            f'a step with mesh="auto" is {asked} before its first batch',
            expected="a batch first, for which the mesh is found",
            remedy="call step.prepare(*batch) before, on every rank",
        )


def finds_mesh(compile_step: Callable[P, Step]) -> Callable[P, Step]:
    """`compile_step`, with `mesh="auto"` found at the first batch."""
    signature = inspect.signature(compile_step)

    @functools.wraps(compile_step)
    def on_found_mesh(*given: P.args, **named: P.kwargs) -> Step:
        bound = signature.bind(*given, **named)
        mesh = bound.arguments.get("mesh")
        if not (isinstance(mesh, str) and mesh == "auto"):
            return compile_step(*given, **named)
        bound.apply_defaults()
        asked = dict(bound.arguments)
        _check(asked)
        model, optimizer = asked["model"], asked["optimizer"]
        return FoundStep(model, optimizer, lambda batch: _found_for(compile_step, asked, batch))

    return users_frames(on_found_mesh)


compile_step = finds_mesh(compile_on_mesh)


def _check(asked: Mapping[str, Any]) -> None:
    """Refuse what is to be found and also given, and a process without others to find a mesh of."""
    if not dist.is_initialized():
        raise MeshError(
            'mesh="auto" without a process group',
            expected="the ranks that the mesh is found for",
            remedy="call torch.distributed.init_process_group first (crossfade launch --ranks N script.py), or leave "
            "mesh out for one device",
        )
    for name, usual in _FOUND.items():
        if asked[name] != usual:
            raise MeshError(
                f'{name}={asked[name]!r} together with mesh="auto", which finds it',
                expected="a mesh, or nothing of what is found with it",
                remedy=f"leave {name} out, or pass mesh= as crossfade.find_plan suggests",
            )
    check_memory(asked["memory"])
    for name in ("recompute", "offload"):
        if asked[name] == "auto":
            raise NotYetError(
                f"{name}='auto' together with mesh=\"auto\"",
                expected="a step that fits as the model is, or rules for modules",
                remedy=f"find the mesh by crossfade.find_plan and pass it with memory= and {name}=",
            )
    if asked["batch"] != "global":
        raise NotYetError(
            f'batch={asked["batch"]!r} together with mesh="auto"',
            expected="the whole batch on every rank, since ranks of one model take the same samples",
            remedy='pass batch="global", or find the mesh by crossfade.find_plan and pass it',
        )


def _found_for(compile_step: Callable[..., Step], asked: Mapping[str, Any], batch: tuple[Any, ...]) -> Any:
    """The plan for a batch, and the step that is compiled by it; on all ranks the same."""
    model, ranks = asked["model"], list(range(dist.get_world_size()))
    members = meet(ranks, dist.get_rank(), max(_PATIENCE, asked["timeout"]))
    try:
        with telling(members):
            machine = _machine(asked["machine"], model)
            lines = [_shapes(batch), f"machine = {machine!r}", f"memory = {asked['memory']}"]
        members.agree(" ".join(lines), "\n".join(lines), to="find a mesh", what="batches and machines")
        with telling(members):
            shared = members.share(lambda: _search(asked, batch, machine, len(ranks)).to_dict())
            found = FoundPlan.from_dict(shared, machine)
        members.agree(found.call, found.call, to="compile what was found")
    finally:
        members.close()
    if not members.rank:
        log.info("%s", found)
    options = {name: value for name, value in asked.items() if name not in ("model", "loss_fn", "optimizer", "memory")}
    options |= found.options
    return found, compile_step(model, asked["loss_fn"], asked["optimizer"], **options)


def _machine(given: Machine | str | None, model: nn.Module) -> Machine:
    """The machine to plan for: as given, or measured now."""
    if isinstance(given, Machine):
        return given
    if given is not None and given != "calibrate":
        return preset(given)
    device = next(model.parameters()).device.type
    return calibrate("calibrated", {ANY_AXIS: dist.group.WORLD} if dist.get_world_size() > 1 else {}, device=device)


def _search(asked: Mapping[str, Any], batch: tuple[Any, ...], machine: Machine, ranks: int) -> FoundPlan:
    """Find a plan, and leave random numbers as they were: only this rank draws any."""
    device, budget = next(asked["model"].parameters()).device.type, check_memory(asked["memory"])
    with torch.random.fork_rng(devices=None if device == "cuda" else []):
        return find_plan(
            asked["model"],
            asked["loss_fn"],
            asked["optimizer"],
            batch,
            ranks=ranks,
            machine=machine,
            memory=None if budget is None else budget_in_bytes(budget, device),
            tensor_parallel=asked["tensor_parallel"],
            accumulate=None if asked["accumulate"] == 1 else (asked["accumulate"],),
            backend=backend_on(device, dist.get_backend()),
        )


def _shapes(batch: tuple[Any, ...]) -> str:
    """What a plan depends on of a batch."""

    def told(value: Any) -> str:
        match value:
            case torch.Tensor():
                return f"{value.dtype}{tuple(value.shape)}"
            case Keywords(named=named):
                return told(named)
            case Mapping():
                return "{" + ", ".join(f"{key}: {told(each)}" for key, each in value.items()) + "}"
            case tuple() | list():
                return "(" + ", ".join(map(told, value)) + ")"
        return repr(value)

    return f"batch = {told(batch)}"
