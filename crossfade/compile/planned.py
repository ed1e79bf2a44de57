"""Plans of steps: made of what was compiled, and held to by what is compiled as a plan file says."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from crossfade.compile.built import Built
from crossfade.compile.job import Job
from crossfade.compile.options import Options
from crossfade.compile.place import Place
from crossfade.compile.step_plan import Origin, PlannedProgram, StepPlan, differences
from crossfade.cost.machine import Machine
from crossfade.errors import CrossfadeError, NotYetError, PlanDriftError
from crossfade.graph import collectives
from crossfade.graph.passes import Outcome, PassRecord, fingerprint, run_passes
from crossfade.graph.program import MADE_FOR, Program
from crossfade.ranks.compared import tensors_of
from crossfade.ranks.mesh import MeshLike
from crossfade.shard.tensor.placements import Shard
from crossfade.shard.tensor.plan import Plan

_CHOOSING = (
    "as-planned",
    *("exchange-factors", "spell-out", "collective-matmul", "schedule", "communicate", "lower", "fit-memory", "finish"),
)
"""The phase that does what a plan file says, and those in whose place it runs."""
_AGAIN = "plan again: compile without plan=, then step.save_plan(...)"


def plan_of(job: Job, programs: Iterable[tuple[tuple[Any, ...], Built]]) -> StepPlan:
    """Everything that was chosen for a step, of whose programs each is given with a batch that it is for."""
    planned = [_planned(batch, built, job) for batch, built in programs]
    planned.sort(key=lambda program: (program.batch, program.origin.fingerprint))
    return StepPlan(made_for(job), chosen_for(job), parameters_of(job), tuple(planned))


def _planned(batch: tuple[Any, ...], built: Built, job: Job) -> PlannedProgram:
    if built.fitting is not None:
        raise NotYetError(
            "a plan file of a program whose sizes are symbols", remedy="pass dynamic=False, and plan each size"
        )
    if built.regions is not None and job.place.device == "cpu":
        raise NotYetError(
            f"a plan file of a step with execute={job.options.execute!r} on a CPU, where regions are chosen by time",
            remedy='pass execute="eager"',
        )
    if built.origin is None:
        raise CrossfadeError(
            "a plan of a step without a program that it began with",
            expected="the phases that make one",
            remedy="leave phases= out, or put the phase optimizer back",
        )
    starts = [_launched(start) for start in collectives.find(built.program.graph)]
    chosen = [record for phase in built.phases if phase.phase.name in _CHOOSING for record in phase.passes]
    passes, buckets = tuple(_decided(chosen)), tuple(_buckets(chosen))
    return PlannedProgram(batch_lines(batch), built.origin, passes, buckets, tuple(starts), fingerprint(built.program))


def _decided(records: Iterable[PassRecord]) -> Iterator[str]:
    for record in records:
        if record.decided is None:
            raise NotYetError(
                f"a plan file of what {record.name} has chosen",
                expected="passes that can say what they decided",
                remedy=f"leave it out: phases=crossfade.TRAINING.without_pass({record.name!r})",
            )
        if record.changed:
            yield record.decided


def _buckets(records: Iterable[PassRecord]) -> Iterator[str]:
    for record in records:
        members: dict[str, list[str]] = {}
        for verdict in record.verdicts:
            if verdict.outcome is Outcome.BUCKETED:
                members.setdefault(verdict.detail, []).append(verdict.source or verdict.subject)
        yield from (f"{record.name}, {detail}: {', '.join(names)}" for detail, names in members.items())


def _launched(start: collectives.Collective) -> str:
    made_for = start.node.meta.get(MADE_FOR)
    return f"{start.kind} over {start.group}, {start.bytes} bytes{f': {made_for}' if made_for else ''}"


def batch_lines(batch: tuple[Any, ...]) -> tuple[str, ...]:
    """The tensors of a batch, a line each.

    >>> batch_lines((torch.ones(4, 2),))
    ('batch[0]: float32[4, 2]',)
    """
    return tuple(f"{name}: {_type(tensor.dtype, tensor.shape)}" for name, tensor in tensors_of(batch).items())


def _type(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def made_for(job: Job) -> dict[str, Any]:
    """What a plan is for."""
    place = job.place
    return {
        **made_for_before(job.model, job.optimizer, job.options),
        "backends": dict(sorted(place.carriers.backends.items())),
    }


def made_for_before(model: nn.Module, optimizer: Optimizer, options: Options) -> dict[str, Any]:
    """As much of it as is known before ranks have met."""
    names = ("accumulate", "batch", "check_every", "clip_grad_norm", "execute", "loss_is", "semantics")
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return {
        "model": type(model).__name__,
        "optimizer": type(optimizer).__name__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU",
        "settings": {name: getattr(options, name) for name in names},
    }


def chosen_for(job: Job) -> dict[str, Any]:
    """What `compile_step` is to be given."""
    options, place = job.options, job.place
    split = options.tensor_parallel
    plan = None if split is None else (split if isinstance(split, Plan) else Plan(split))
    return {
        "mesh": mesh_of(place),
        "data_parallel": place.mode,
        "keep_whole": list(place.kept_whole),
        "tensor_parallel": None if plan is None else plan.as_data(),
        "machine": None if place.machine is None else place.machine.name,
        "memory_limit": options.memory_limit,
    }


def mesh_of(place: Place) -> dict[str, int] | None:
    """The axes of a place and their ranks; None for one device."""
    if place.tensor is not None:
        mesh = place.tensor.mesh
        return dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=True))
    if place.axes is None:
        return None
    axes = [place.axes.whole] if place.axes.copies is None else [place.axes.copies, place.axes.split]
    return {axis.name: axis.size for axis in axes}


def parameters_of(job: Job) -> dict[str, str]:
    """What each parameter is, and how it lies on the mesh."""
    return {name: _placed(job.place, name, parameter) for name, parameter in job.model.named_parameters()}


def _placed(place: Place, name: str, parameter: Tensor) -> str:
    shape, words = tuple(parameter.shape), []
    if place.tensor is not None and (parts := place.tensor.parts) is not None:
        shape, at = parts.whole_shape(name, shape), parts.placement(name)
        if isinstance(at, Shard):
            blocks = (
                f" in blocks of {list(at.sizes)}" if at.sizes else f" in {at.outer} blocks" if at.outer != 1 else ""
            )
            words.append(f"dim {at.dim}{blocks} over {parts.axis}")
    if place.shards is not None and place.axes is not None and place.shards.updates_rows_of(name):
        held = "rows" if place.shards.has(name) else "updated by rows"
        words.append(f"{held} over {place.axes.split.name}")
    return f"{_type(parameter.dtype, shape)} {', '.join(words) or 'whole'}"


def take(
    plan: StepPlan,
    *,
    mesh: MeshLike,
    data_parallel: str,
    keep_whole: Any,
    tensor_parallel: Any,
    machine: Machine | str | None,
    memory_limit: int | None,
) -> dict[str, Any]:
    """What a plan has chosen, in the place of what was left to it; what was asked for must be the same."""
    chosen = dict(plan.chosen)
    asked: dict[str, Any] = {}
    if mesh is not None:
        asked["mesh"] = _sizes(mesh)
    if data_parallel != "replicate":
        asked["data_parallel"] = data_parallel
    if tensor_parallel is not None:
        given = tensor_parallel if isinstance(tensor_parallel, Plan) else Plan(tensor_parallel)
        asked["tensor_parallel"] = given.as_data()
    if machine is not None:
        name = machine if isinstance(machine, str) else machine.name
        asked["machine"] = "calibrated" if name == "calibrate" else name
    if memory_limit is not None:
        asked["memory_limit"] = memory_limit
    known = {**chosen, "mesh": _without_ones(chosen["mesh"])} if mesh is not None else chosen
    refuse({name: known[name] for name in asked}, asked, "what compile_step is asked for")
    if keep_whole and keep_whole != "auto":
        raise CrossfadeError(
            f"keep_whole={keep_whole!r} together with plan=",
            expected="what the plan keeps whole",
            remedy="leave keep_whole out",
        )
    return {
        **chosen,
        "mesh": mesh if mesh is not None else chosen["mesh"],
        "tensor_parallel": None if chosen["tensor_parallel"] is None else Plan(chosen["tensor_parallel"]),
        "keep_whole": tuple(chosen["keep_whole"]),
        "machine": None,  # place asks the plan
    }


def _sizes(mesh: Any) -> dict[str, int]:
    names = (
        dict(mesh)
        if isinstance(mesh, Mapping)
        else dict(zip(mesh.mesh_dim_names or ("dp",), mesh.mesh.shape, strict=True))
    )
    return _without_ones(names) or {}


def _without_ones(mesh: Mapping[str, int] | None) -> dict[str, int]:
    return {name: size for name, size in (mesh or {}).items() if size != 1}


def check_before(plan: StepPlan, model: nn.Module, optimizer: Optimizer, options: Options) -> None:
    """Refuse a plan for another model, torch, device or other settings, before ranks meet."""
    here = made_for_before(model, optimizer, options)
    there = {name: plan.made_for.get(name) for name in here}
    types = {name: _type(parameter.dtype, parameter.shape) for name, parameter in model.named_parameters()}
    planned = {name: text.partition("]")[0] + "]" for name, text in plan.parameters.items()}
    refuse({**there, "parameters": planned}, {**here, "parameters": types}, "what the plan is for")


def run_as_planned(plan: StepPlan, job: Job, batch: tuple[Any, ...], program: Program) -> Program:
    """What a plan makes of a program: the same as when it was planned, or an error that shows what is not."""
    refuse(
        {"backends": plan.made_for["backends"], "parameters": dict(plan.parameters)},
        {"backends": made_for(job)["backends"], "parameters": parameters_of(job)},
        "where it runs",
    )
    planned = _program_for(plan, batch_lines(batch), Origin.of(program))
    made = run_passes(program, planned.made(), context={})
    starts = [_launched(start) for start in collectives.find(made.graph)]
    refuse({"collectives": list(planned.collectives)}, {"collectives": starts}, "what comes of it")
    return made


def _program_for(plan: StepPlan, batch: tuple[str, ...], origin: Origin) -> PlannedProgram:
    fitting = [program for program in plan.programs if program.batch == batch]
    if not fitting:
        known = sorted({", ".join(program.batch) for program in plan.programs})
        raise PlanDriftError(
            f"a batch with {', '.join(batch) or 'no tensors'}",
            expected=f"one that the plan has a program for: {'; or '.join(known) or 'none'}",
            remedy=_AGAIN,
        )
    for program in fitting:
        if program.origin.fingerprint == origin.fingerprint:
            return program
    there, here = dict(fitting[0].origin.operators), dict(origin.operators)
    if there == here:
        raise PlanDriftError(
            "another program than the plan was made for, although it calls the same operators as often",
            expected="the same model, loss and optimizer, with the same options",
            remedy=_AGAIN,
        )
    refuse({"operators": there}, {"operators": here}, "the program that was captured")
    raise AssertionError("unreachable: the operators differ")


def refuse(there: Mapping[str, Any], here: Mapping[str, Any], what: str) -> None:
    """Raise what differs between a plan and what is found here, if anything does."""
    found = differences(dict(there), dict(here))
    if not found:
        return
    shown = found[:8] + ([f"and {len(found) - 8} more"] if len(found) > 8 else [])
    raise PlanDriftError(
        f"a plan file that does not fit {what} (planned -> here): {'; '.join(shown)}",
        expected="what the plan was made for",
        remedy=_AGAIN,
    )
