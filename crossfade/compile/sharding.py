"""Tensor and expert parallelism: a single-device exported program becomes what each rank of an axis runs.

import crossfade as cf

sharded = cf.shard(exported_program, mesh, cf.Plan({"*.up": "colwise", "*.down": "rowwise"}))
outputs = sharded.module()(inputs)
sharded.save("folder")
sharded = cf.Sharded.load("folder", mesh)  # elsewhere, on as many ranks
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from crossfade.compile.rank_position import Position, axes_of
from crossfade.compile.spread_exported import spread
from crossfade.errors import MeshError
from crossfade.graph.collectives import NAMESPACE
from crossfade.graph.passes import Verdict
from crossfade.graph.private import schema_of, tree_flatten, tree_unflatten
from crossfade.graph.program import tensor_bytes
from crossfade.ranks.mesh import EXPERT_AXIS
from crossfade.shard.tensor.borders import input_placements, output_placements
from crossfade.shard.tensor.devices import device_types, has_numbers, moved
from crossfade.shard.tensor.fill import filled
from crossfade.shard.tensor.folder import (
    Account,
    fingerprint,
    read_account,
    read_program,
    read_weights,
    write_program,
    write_weights,
)
from crossfade.shard.tensor.localize import LocalProgram, Request, localize
from crossfade.shard.tensor.own_experts import OwnExperts, SpreadExperts
from crossfade.shard.tensor.placements import Placement, Shard
from crossfade.shard.tensor.plan import Plan, ResolvedPlan
from crossfade.shard.tensor.sources import Source, local_part, source_of
from crossfade.tracebacks import users_frames

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
    experts: SpreadExperts | None = None
    """The parameters of which this rank has its own experts alone, where an axis `ep` spreads them."""
    expert_rank: int = 0
    """Which of the ranks of that axis this is."""

    @property
    def place(self) -> int:
        """Which this is of all ranks that run the program; those of `axis` are side by side."""
        return self.expert_rank * self.ranks + self.rank

    @property
    def axes(self) -> str:
        """The axes that it is for, with their ranks."""
        return ", ".join(f"{axis}={ranks}" for axis, ranks in self._account().axes.items())

    def module(self) -> torch.nn.Module:
        """The program as a module: called with this rank's inputs; plain autograd through it gives right gradients."""
        return self.program.module()

    def collectives(self) -> dict[str, tuple[int, int]]:
        """How many collectives of each kind a forward runs, and their bytes on this rank.

        Those of the backward are their conjugates: see `crossfade.shard.tensor.conjugate`.
        """
        counted: Counter[str] = Counter()
        moved: Counter[str] = Counter()
        for node in self.program.graph.nodes:
            kind = _KINDS.get(getattr(schema_of(node.target), "name", ""))
            if kind is not None:
                counted[kind] += 1
                moved[kind] += tensor_bytes(node.args[0].meta["val"])
        return {kind: (counted[kind], moved[kind]) for kind in counted}

    def save(self, folder: str | Path) -> Path:
        """Write what `load` reads: every rank its weights, rank 0 also the program, which is alike on all.

        The ranks do not wait for each other. The file of a rank is there once it is complete.
        """
        path = Path(folder)
        account = self._account()
        if self.place == 0:
            write_program(path, self.program, account)
        return write_weights(path, self.program, account, self.place)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        mesh: MeshLike,
        *,
        axis: str | None = None,
        rank: int | None = None,
        trusted: bool = False,
    ) -> Sharded:
        """What `save` or `crossfade shard` wrote: the program, and this rank's weights, mapped from its file.

        `mesh`, `axis` (else the one it was saved for) and `rank` are as for `shard`. Nothing in the files is run,
        unless they are `trusted`: a program with objects of its own kind needs that.
        """
        path = Path(folder)
        account = read_account(path)
        spread_over = account.experts.ranks if account.experts is not None else 1
        try:
            here = Position.on(mesh, axis or account.axis, rank, called=account.axis, experts=spread_over > 1)
        except MeshError as error:
            raise MeshError(f"{error.found} for {path}", expected=error.expected, remedy=error.remedy) from error
        if (here.ranks, here.expert_ranks) != (account.ranks, spread_over):
            raise MeshError(
                f"{here} for {path}",
                expected=f"{Position(account.ranks, 0, spread_over)}, for which it was saved",
                remedy=f"start {account.files} ranks, or shard the model for {here}",
            )
        program = read_weights(path, read_program(path, account, trusted=trusted), account, here.place)
        return cls(
            program,
            account.plan,
            account.axis,
            here.rank,
            here.ranks,
            account.placements,
            account.inputs,
            account.outputs,
            account.verdicts,
            account.experts,
            here.expert_rank,
        )

    def _account(self) -> Account:
        return Account(
            self.axis,
            self.ranks,
            fingerprint(self.program),
            self.plan,
            self.placements,
            self.inputs,
            self.outputs,
            self.verdicts,
            self.experts,
        )

    def __str__(self) -> str:
        found = self.collectives()
        said = ", ".join(f"{count} {kind}s ({size} B)" for kind, (count, size) in found.items()) or "no collectives"
        spread = f"\n{', '.join(self.experts.parameters)}: own experts alone" if self.experts is not None else ""
        return f"{self.axes}, a forward has {said}\n{self.plan}{spread}"


_KINDS = {
    "crossfade::tp_reduce": "all-reduce",
    "crossfade::tp_gather": "all-gather",
    "crossfade::tp_gather_enter": "all-gather",
    "crossfade::tp_scatter": "reduce-scatter",
    "crossfade::ep_exchange": "all-to-all",
    f"{NAMESPACE}::all_to_all_single": "all-to-all",
}


@users_frames
def shard(
    exported: ExportedProgram,
    mesh: MeshLike,
    plan: Plan | Mapping[str, object] | None = None,
    *,
    axis: str = "tp",
    rank: int | None = None,
    state: Any = None,
    inputs: Mapping[str, Any] | None = None,
    outputs: Mapping[int, Any] | None = None,
    allow_weight_gather: bool = False,
) -> Sharded:
    """Turn a single-device exported program into the local program of this rank.

    `mesh` is a `DeviceMesh`, whose axis named `axis` (or its only one) is used, or a mapping of axes to sizes: with
    `rank`, which says whose parts to take, no process group is needed until the program runs; without, the world is the
    axis. With an axis `ep`, alone or beside `axis`, each of its ranks has its own experts, whole ones or their parts by
    the plan, and calls the program with tokens of its own, which travel to the ranks of their experts and back; what
    it returns is what one device would for these. `rank` then counts the ranks of both axes, those of `axis` side by
    side. `plan` is a `Plan`, or a dict as `Plan` takes; without one `Plan.megatron(exported)`. Weights are taken from
    the exported program, or from `state`: a dict, a safetensors file or folder, a checkpoint of
    `torch.distributed.checkpoint`, or a list of these; a rank reads only its parts. A program exported with fake
    tensors or on the meta device needs one, and is put on the mesh's device. `inputs` (by name) and `outputs` (by
    position) are whole unless placed here by `torch.distributed.tensor.Shard`. What would gather a parameter at every
    run is refused, unless `allow_weight_gather`.

        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        >>> exported = torch.export.export(model, (torch.ones(4, 8),))
        >>> sharded = shard(exported, {"tp": 2}, {"0": "colwise", "2": "rowwise"}, rank=0)
        >>> sharded.collectives()
        {'all-reduce': (1, 128)}
        >>> sharded.program.state_dict["0.weight"].shape
        torch.Size([16, 8])
    """
    here = Position.on(mesh, axis, rank)
    placed = [
        name for name, given in (("a plan", plan), ("inputs=", inputs), ("outputs=", outputs)) if given is not None
    ]
    if placed and here.expert_ranks > 1 and axis not in axes_of(mesh):
        raise without_axis(placed[0], axis)
    device = torch.device(mesh.device_type if isinstance(mesh, DeviceMesh) else "cpu")
    prepared = prepare(
        exported, here.ranks, plan, axis, device, inputs, outputs, allow_weight_gather, here.expert_ranks
    )
    return prepared.of_place(here.place, source_of(exported.state_dict if state is None else state))


@dataclass(frozen=True)
class Prepared:
    """A local program for all ranks, before any of them has weights."""

    local: LocalProgram
    plan: ResolvedPlan
    axis: str
    whole: ExportedProgram
    experts: SpreadExperts | None = None

    @property
    def places(self) -> int:
        """How many ranks there are, of all axes."""
        return self.local.ranks * (self.experts.ranks if self.experts is not None else 1)

    def of_place(self, place: int, source: Source) -> Sharded:
        """The program of one of all ranks, with its parts of the state."""
        local = self.local
        expert_rank, rank = divmod(place, local.ranks)
        source = OwnExperts(source, self.experts, expert_rank) if self.experts is not None else source
        program = filled(local, self.plan.aliases, source, rank)
        program.example_inputs = self._example_inputs(rank)
        kinds = [spec.kind for spec in program.graph_signature.output_specs]
        outputs = [place for kind, place in zip(kinds, local.outputs, strict=True) if kind is OutputKind.USER_OUTPUT]
        return Sharded(
            program,
            self.plan,
            self.axis,
            rank,
            local.ranks,
            local.parameters,
            local.inputs,
            tuple(outputs),
            local.verdicts,
            self.experts,
            expert_rank,
        )

    def _example_inputs(self, rank: int) -> Any:
        """A rank's parts of the inputs that the model was exported with, which AOTInductor asks for."""
        leaves, shape = tree_flatten(self.whole.example_inputs)
        if self.whole.example_inputs is None or any(
            isinstance(leaf, Tensor) and not has_numbers(leaf) for leaf in leaves
        ):
            return None
        return tree_unflatten(own_inputs(leaves, self.local.inputs.values(), rank, self.local.ranks), shape)


def prepare(
    exported: ExportedProgram,
    ranks: int,
    plan: Plan | Mapping[str, object] | None,
    axis: str,
    device: torch.device,
    inputs: Mapping[str, Any] | None = None,
    outputs: Mapping[int, Any] | None = None,
    allow_weight_gather: bool = False,
    expert_ranks: int = 1,
) -> Prepared:
    """Place and localize a program, for any of its ranks, and spread its experts over `expert_ranks`; see `shard`."""
    if "meta" in device_types(exported):
        exported = moved(exported, {"meta": device})
    if plan is None:
        plan = Plan.megatron(exported) if ranks > 1 or expert_ranks == 1 else Plan({})
    resolved = (plan if isinstance(plan, Plan) else Plan(plan)).resolve(exported, ranks)
    given = input_placements(exported, inputs or {}, ranks)
    wanted = output_placements(exported, outputs or {}, ranks)
    request = Request(given, wanted, allow_weight_gather)
    if expert_ranks == 1:
        return Prepared(localize(exported, resolved, ranks, axis, request), resolved, axis, exported)
    plain = exported.run_decompositions({})  # nothing in place, and few operators to know
    local, experts = spread(localize(plain, resolved, ranks, axis, request), EXPERT_AXIS, expert_ranks)
    return Prepared(local, resolved, axis, exported, experts)


def own_inputs(leaves: Sequence[Any], placements: Iterable[Placement], rank: int, ranks: int) -> list[Any]:
    """A rank's parts of whole inputs, in the order of the program's."""
    pairs = zip(leaves, placements, strict=True)
    return [local_part(whole, where, rank, ranks) if isinstance(where, Shard) else whole for whole, where in pairs]


def without_axis(what: str, axis: str) -> MeshError:
    """The error for what places values over the axis of a plan, on a mesh that only spreads experts."""
    return MeshError(
        f"{what}, on a mesh with an axis {EXPERT_AXIS} and no axis {axis}",
        expected=f"an axis {axis} beside it, for plans; each rank of {EXPERT_AXIS} passes its own tokens",
        remedy=f'pass a mesh like {{"{EXPERT_AXIS}": 2, "{axis}": 2}}, or leave {what} out',
    )
