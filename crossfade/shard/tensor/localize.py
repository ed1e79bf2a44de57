"""An exported program of one device becomes the local program of every rank of an axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)

from crossfade.errors import PlanError
from crossfade.graph.effects import written_inputs
from crossfade.graph.passes import Verdict
from crossfade.graph.private import FakeTensorMode, exported_program
from crossfade.shard.tensor.builder import RANK, Builder
from crossfade.shard.tensor.devices import like
from crossfade.shard.tensor.partition import Partitioner
from crossfade.shard.tensor.placements import REPLICATE, Placement, Shard, in_blocks, local_size
from crossfade.shard.tensor.plan_boundaries import find_boundaries
from crossfade.shard.tensor.plan_resolved import ParameterSharding, ResolvedPlan
from crossfade.shard.tensor.propagate import Propagated, Settings, propagate

_STATE = (InputKind.PARAMETER, InputKind.BUFFER)


@dataclass(frozen=True)
class LocalProgram:
    """The program that every rank runs on its parts, and where everything lies; it holds no weights yet.

    `exported` is alike on all ranks: what differs, the parts of the state and the rank's index, is its state.
    """

    exported: ExportedProgram
    parameters: Mapping[str, Placement]
    inputs: Mapping[str, Placement]
    outputs: tuple[Placement, ...]
    verdicts: tuple[Verdict, ...]
    knows_rank: bool
    ranks: int


@dataclass(frozen=True)
class Request:
    """What `localize` is asked for beside the plan: where user inputs (by name) and outputs (by position) lie."""

    inputs: Mapping[str, Placement] = field(default_factory=dict)
    outputs: Mapping[int, Placement] = field(default_factory=dict)
    allow_weight_gather: bool = False


def localize(exported: ExportedProgram, plan: ResolvedPlan, ranks: int, group: str, request: Request) -> LocalProgram:
    """Place every value by the plan, and write the program of the parts.

    A program with mutation inside is rewritten without it first: what is written in place may have to be moved.
    """
    if any(written_inputs(node) for node in exported.graph.nodes):
        exported = exported.run_decompositions({})
    boundaries = find_boundaries(exported, plan.boundaries, ranks)
    exported = boundaries.exported
    signature = exported.graph_signature
    placements = {name: placement_of(sharding) for name, sharding in plan.parameters.items()}
    settings = _settings(exported, plan, placements, ranks, request, boundaries.placements)
    placed = propagate(exported.graph, settings)
    state = frozenset(spec.arg.name for spec in signature.input_specs if spec.kind in _STATE)
    builder = Builder(_fake_mode(exported.graph), ranks, group, state)
    partitioner = Partitioner(exported.graph, placed, builder)
    partitioner.run()
    outputs = _finish(exported, placed, partitioner, request)
    empty = _empty_state(exported, plan, placements, ranks, builder.knows_rank)
    local = exported_program(exported, builder.graph, _signature(signature, builder, outputs), empty)
    kinds = [placed.placements[node] for node in exported.graph.find_nodes(op="placeholder")]
    user = [
        (spec.arg.name, kind)
        for spec, kind in zip(signature.input_specs, kinds, strict=True)
        if spec.kind is InputKind.USER_INPUT
    ]
    returned = tuple(place for _, place in outputs)
    verdicts = (*boundaries.verdicts, *placed.verdicts)
    return LocalProgram(local, placements, dict(user), returned, verdicts, builder.knows_rank, ranks)


def _empty_state(
    exported: ExportedProgram, plan: ResolvedPlan, placements: Mapping[str, Placement], ranks: int, knows_rank: bool
) -> dict[str, Tensor]:
    """The state's names and local shapes, on the meta device."""
    state: dict[str, Tensor] = {}
    for name, value in exported.state_dict.items():
        shape = list(value.shape)
        placement = placements.get(plan.aliases.get(name, name), REPLICATE)
        if isinstance(placement, Shard):
            shape[placement.dim] = local_size(placement, shape[placement.dim], ranks)
        state[name] = like(torch.empty(shape, dtype=value.dtype, device="meta"), value)
    return state | ({RANK: torch.empty((), dtype=torch.int64, device="meta")} if knows_rank else {})


def placement_of(sharding: ParameterSharding) -> Placement:
    """The placement of a parameter."""
    if sharding.dim is None:
        return REPLICATE
    return in_blocks(sharding.dim, sharding.blocks or (sharding.shape[sharding.dim],), sharding.units)


def _settings(
    exported: ExportedProgram,
    plan: ResolvedPlan,
    placements: Mapping[str, Placement],
    ranks: int,
    request: Request,
    boundaries: Mapping[str, Placement],
) -> Settings:
    inputs: dict[str, Placement] = {}
    weights, constants = {}, set()
    known = [spec.arg.name for spec in exported.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    for name in request.inputs:
        if name not in known:
            raise PlanError(
                f"no input is named {name!r}",
                expected=f"one of {', '.join(known)}",
                remedy="name an input of the program",
            )
    for spec in exported.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            inputs[spec.arg.name] = request.inputs.get(spec.arg.name, REPLICATE)
            continue
        name = plan.aliases.get(str(spec.target), str(spec.target))
        inputs[spec.arg.name] = placements.get(name, REPLICATE)
        constants.add(spec.arg.name)
        if inputs[spec.arg.name] != REPLICATE:
            weights[spec.arg.name] = name
    return Settings(ranks, inputs, weights, boundaries, request.allow_weight_gather, constants=frozenset(constants))


def _fake_mode(graph: fx.Graph) -> FakeTensorMode:
    modes = [getattr(node.meta.get("val"), "fake_mode", None) for node in graph.nodes]
    return next((mode for mode in modes if mode is not None), FakeTensorMode())


def _finish(
    exported: ExportedProgram, placed: Propagated, partitioner: Partitioner, request: Request
) -> list[tuple[fx.Node | Any, Placement]]:
    """The output node: updates as their buffers lie, what the user gets whole unless asked otherwise."""
    (values,) = exported.graph.output_node().args
    holders = {spec.target: spec.arg.name for spec in exported.graph_signature.input_specs if spec.target}
    names = {node.name: node for node in exported.graph.find_nodes(op="placeholder")}
    results: list[tuple[Any, Placement]] = []
    position = 0
    for spec, value in zip(exported.graph_signature.output_specs, values, strict=True):  # type: ignore[arg-type]
        want: Placement = REPLICATE
        if spec.kind is OutputKind.USER_OUTPUT:
            want = request.outputs.get(position, REPLICATE)
            position += 1
        elif spec.target is not None:
            holder = names[holders.get(spec.target, spec.target)]
            want = placed.placements[holder]
        if not isinstance(value, fx.Node):
            results.append((value, REPLICATE))
        elif isinstance(value.meta.get("val"), Tensor):
            partitioner.builder.meta = dict(value.meta)
            partitioner.builder.meta.pop("val")
            results.append((partitioner.form(value, want), want))
        else:
            results.append((partitioner.scalars[value], REPLICATE))
    partitioner.builder.graph.output(tuple(value for value, _ in results))
    return results


def _signature(
    old: ExportGraphSignature, builder: Builder, results: list[tuple[Any, Placement]]
) -> ExportGraphSignature:
    inputs = list(old.input_specs)
    if builder.knows_rank:
        index = next((i for i, spec in enumerate(inputs) if spec.kind not in _STATE), len(inputs))
        rank = InputSpec(InputKind.BUFFER, TensorArgument(name=f"b_{RANK}"), target=RANK, persistent=True)
        inputs.insert(index, rank)
    outputs = []
    for spec, (value, _) in zip(old.output_specs, results, strict=True):
        arg = replace(spec.arg, name=value.name) if isinstance(value, fx.Node) else spec.arg
        outputs.append(OutputSpec(spec.kind, arg, spec.target))
    return ExportGraphSignature(inputs, outputs)
