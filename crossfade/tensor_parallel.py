"""Tensor parallelism: a single-device exported program becomes what each rank of an axis runs.

import crossfade as cf

sharded = cf.shard(exported_program, mesh, cf.Plan({"*.up": "colwise", "*.down": "rowwise"}))
outputs = sharded.module()(inputs)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.export import ExportedProgram

from crossfade.errors import MeshError, StateError
from crossfade.graph.passes import Verdict
from crossfade.graph.private import name_group, state_of_exported
from crossfade.graph.program import tensor_bytes
from crossfade.shard.localize import LocalProgram, Request, localize
from crossfade.shard.partition import RANK
from crossfade.shard.placements import Placement, Replicate
from crossfade.shard.plan import Plan, ResolvedPlan
from crossfade.shard.sources import source_of

MeshLike = DeviceMesh | Mapping[str, int]


@dataclass(frozen=True)
class Sharded:
    """The local program of a rank, its parts of the weights inside, and the account of how it came about.

    `program` is a `torch.export.ExportedProgram`: its graph and names are alike on all ranks, only its state differs.
    """

    program: ExportedProgram
    plan: ResolvedPlan
    axis: str
    rank: int
    ranks: int
    placements: Mapping[str, Placement]
    inputs: Mapping[str, Placement]
    outputs: tuple[Placement, ...]
    verdicts: tuple[Verdict, ...]

    def module(self) -> torch.nn.Module:
        """The program as a module: called with this rank's inputs; plain autograd through it gives right gradients."""
        return self.program.module()

    def collectives(self) -> dict[str, tuple[int, int]]:
        """How many collectives of each kind a forward runs, and their bytes on this rank.

        Those of the backward are their conjugates: see `crossfade.shard.conjugate`.
        """
        counted: Counter[str] = Counter()
        moved: Counter[str] = Counter()
        for node in self.program.graph.nodes:
            kind = _KINDS.get(getattr(getattr(node.target, "_schema", None), "name", ""))
            if kind is not None:
                counted[kind] += 1
                moved[kind] += tensor_bytes(node.args[0].meta["val"])
        return {kind: (counted[kind], moved[kind]) for kind in counted}

    def __str__(self) -> str:
        found = self.collectives()
        said = ", ".join(f"{count} {kind}s ({size} B)" for kind, (count, size) in found.items()) or "no collectives"
        return f"{self.axis}={self.ranks}, a forward has {said}\n{self.plan}"


_KINDS = {
    "crossfade::tp_reduce": "all-reduce",
    "crossfade::tp_gather": "all-gather",
    "crossfade::tp_gather_enter": "all-gather",
    "crossfade::tp_scatter": "reduce-scatter",
}


def shard(
    exported: ExportedProgram,
    mesh: MeshLike,
    plan: Plan | Mapping[str, object] | None = None,
    *,
    axis: str = "tp",
    rank: int | None = None,
    state: Any = None,
    inputs: Mapping[str, Placement] | None = None,
    outputs: Mapping[int, Placement] | None = None,
    allow_weight_gather: bool = False,
) -> Sharded:
    """Turn a single-device exported program into the local program of this rank.

    `mesh` is a `DeviceMesh`, whose axis named `axis` (or its only one) is used, or a mapping of axes to sizes, where
    no process group is needed until the program runs; then `rank` says whose parts to take. `plan` is a `Plan`, or a
    dict as `Plan` takes; without one `Plan.megatron(exported)`. Weights are taken from the exported program, or from
    `state`: a dict, a safetensors file or folder, or a checkpoint of `torch.distributed.checkpoint`, of which a rank
    reads only its parts. `inputs` (by name) and `outputs` (by position) are whole unless placed here by
    `crossfade.shard.placements.Shard`. What would gather a parameter at every run is refused, unless
    `allow_weight_gather`.

        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        >>> exported = torch.export.export(model, (torch.ones(4, 8),))
        >>> sharded = shard(exported, {"tp": 2}, {"0": "colwise", "2": "rowwise"}, rank=0)
        >>> sharded.collectives()
        {'all-reduce': (1, 128)}
        >>> sharded.program.state_dict["0.weight"].shape
        torch.Size([16, 8])
    """
    ranks, own, group = _position(mesh, axis, rank)
    plan = Plan.megatron(exported) if plan is None else plan if isinstance(plan, Plan) else Plan(plan)
    resolved = plan.resolve(exported, ranks)
    request = Request(inputs or {}, outputs or {}, allow_weight_gather)
    local = localize(exported, resolved, ranks, group, request)
    fill_state(local, resolved, exported.state_dict if state is None else state, own)
    return Sharded(
        local.exported,
        resolved,
        axis,
        own,
        ranks,
        local.parameters,
        local.inputs,
        local.outputs,
        local.verdicts,
    )


def _position(mesh: MeshLike, axis: str, rank: int | None) -> tuple[int, int, str]:
    """How many ranks the axis has, which of them this is, and the name that collectives call the group by."""
    names = tuple(mesh.mesh_dim_names or ()) if isinstance(mesh, DeviceMesh) else tuple(mesh)
    if axis not in names:
        raise MeshError(f"a mesh with the axes {', '.join(names) or 'without names'}", expected=f"an axis {axis!r}",
                        remedy="name the axes of the mesh, or pass axis=...")  # fmt: skip
    if isinstance(mesh, DeviceMesh):
        own = mesh.get_local_rank(axis)
        name_group(axis, mesh.get_group(axis))
        return mesh.size(names.index(axis)), own if rank is None else rank, axis
    if rank is None or not 0 <= rank < mesh[axis]:
        raise MeshError(f"rank={rank} on an axis of {mesh[axis]} ranks", expected=f"0 to {mesh[axis] - 1}",
                        remedy="say whose parts to take by rank=..., or pass a DeviceMesh")  # fmt: skip
    return mesh[axis], rank, axis


def fill_state(local: LocalProgram, plan: ResolvedPlan, state: Any, rank: int) -> None:
    """Put a rank's parts into a local program that has only their shapes."""
    source = source_of(state)
    held = state_of_exported(local.exported)
    for name, empty in held.items():
        if name == RANK:
            held[name] = torch.tensor(rank)
            continue
        canonical = plan.aliases.get(name, name)
        placement = local.parameters.get(canonical, Replicate())
        part = source.part(canonical, placement, rank, local.ranks)
        if part.shape != empty.shape:
            raise StateError(
                f"{name} with a part of shape {tuple(part.shape)}",
                expected=f"{tuple(empty.shape)}",
                remedy="give the state of the model that was exported",
            )
        held[name] = _like(part, empty)
    _tie(held, plan.aliases)


def _like(part: Tensor, empty: Tensor) -> Tensor:
    if isinstance(empty, torch.nn.Parameter):
        return torch.nn.Parameter(part, requires_grad=empty.requires_grad)
    return part


def _tie(held: dict[str, Tensor], aliases: Mapping[str, str]) -> None:
    """Tied names hold one tensor."""
    for name, canonical in aliases.items():
        if name in held and canonical in held:
            held[name] = held[canonical]
