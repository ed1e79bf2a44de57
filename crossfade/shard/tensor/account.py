"""The account of a sharded program: how it is split and why, as `sharded.json` has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from crossfade.errors import StateError
from crossfade.files.found import FileValue
from crossfade.graph.passes import Verdict
from crossfade.graph.words import ALL_DTYPES
from crossfade.shard.tensor.own_experts import SpreadExperts
from crossfade.shard.tensor.placements import PARTIAL, REPLICATE, Partial, Placement, Shard
from crossfade.shard.tensor.plan_resolved import ModuleBoundary, ParameterSharding, ResolvedPlan

FORMAT = 2


@dataclass(frozen=True)
class Account:
    """What `sharded.json` says."""

    axis: str
    ranks: int
    program: str
    """The hash of the program."""
    plan: ResolvedPlan
    placements: Mapping[str, Placement]
    inputs: Mapping[str, Placement]
    outputs: tuple[Placement, ...]
    verdicts: tuple[Verdict, ...]
    experts: SpreadExperts | None = None

    @property
    def files(self) -> int:
        """How many ranks there are, each with a file of weights."""
        return self.ranks * (self.experts.ranks if self.experts is not None else 1)

    @property
    def axes(self) -> dict[str, int]:
        """The ranks along each axis that the program communicates along."""
        spread = {self.experts.axis: self.experts.ranks} if self.experts is not None else {}
        return {**spread, **({self.axis: self.ranks} if self.ranks > 1 or not spread else {})}


def to_data(account: Account) -> dict[str, Any]:
    """What the file holds."""
    plan = account.plan
    return {
        "format": FORMAT,
        "axis": account.axis,
        "ranks": account.ranks,
        "program": account.program,
        "versions": {"torch": str(torch.__version__)},
        "inputs": {name: _spelled(placement) for name, placement in account.inputs.items()},
        "outputs": [_spelled(placement) for placement in account.outputs],
        "placements": {name: _spelled(placement) for name, placement in account.placements.items()},
        "plan": {
            "parameters": [_parameter_data(sharding) for sharding in plan.parameters.values()],
            "boundaries": [dataclasses.asdict(boundary) for boundary in plan.boundaries.values()],
            "aliases": dict(plan.aliases),
            "notes": list(plan.notes),
        },
        "verdicts": [dataclasses.asdict(verdict) for verdict in account.verdicts],
        "experts": dataclasses.asdict(account.experts) if account.experts is not None else None,
    }


def account_of(data: FileValue) -> Account:
    """An account from what a file says; StateError with the place of what it cannot say."""
    said, ranks = data["plan"], data["ranks"].whole(least=1, most=1 << 20)
    parameters = [_parameter(item) for item in said["parameters"].items()]
    boundaries = [item.record(ModuleBoundary) for item in said["boundaries"].items()]
    plan = ResolvedPlan(
        {parameter.name: parameter for parameter in parameters},
        {boundary.module: boundary for boundary in boundaries},
        {name: entry.text() for name, entry in said["aliases"].entries().items()},
        ranks,
        tuple(item.text() for item in said["notes"].items()),
    )
    return Account(
        data["axis"].text(),
        ranks,
        data["program"].text(),
        plan,
        {name: _read(entry) for name, entry in data["placements"].entries().items()},
        {name: _read(entry) for name, entry in data["inputs"].entries().items()},
        tuple(_read(item) for item in data["outputs"].items()),
        tuple(item.record(Verdict) for item in data["verdicts"].items()),
        _experts(data.get("experts", None)),
    )


def check_fits(folder: Path, account: Account, exported: ExportedProgram) -> None:
    """What an account says of placements is about this program: StateError with the name that does not fit."""
    nodes = {node.name: node for node in exported.graph.find_nodes(op="placeholder")}
    inputs = [nodes[name] for name in exported.graph_signature.user_inputs if name in nodes]
    tensors = {**exported.state_dict, **exported.constants}
    if len(inputs) != len(account.inputs):
        raise _misfit(folder, "inputs", f"{len(account.inputs)} of them", f"{len(inputs)}, as the program has")
    for (name, placement), node in zip(account.inputs.items(), inputs, strict=True):
        _check_dim(folder, f"inputs.{name}", placement, node.meta.get("val"))
    for name, placement in account.placements.items():
        _check_dim(folder, f"placements.{name}", placement, tensors.get(name))
    results = exported.graph.output_node().args[0][-len(exported.graph_signature.user_outputs) or None :]  # type: ignore[index]
    if len(exported.graph_signature.user_outputs) != len(account.outputs):
        raise _misfit(folder, "outputs", f"{len(account.outputs)} of them", f"{len(results)}, as the program has")
    for index, (placement, node) in enumerate(zip(account.outputs, results, strict=False)):
        _check_dim(folder, f"outputs[{index}]", placement, getattr(node, "meta", {}).get("val"))


def _check_dim(folder: Path, place: str, placement: Placement, value: object) -> None:
    if isinstance(placement, Shard) and isinstance(value, Tensor) and not placement.dim < value.dim():
        raise _misfit(folder, place, str(placement), f"a dim of {value.dim()}")


def _misfit(folder: Path, place: str, found: str, expected: str) -> StateError:
    remedy = "save all ranks again, into an empty folder"
    return StateError(f"{folder / 'sharded.json'}, {place}: {found}", expected=expected, remedy=remedy)


def _parameter_data(sharding: ParameterSharding) -> dict[str, Any]:
    return {**dataclasses.asdict(sharding), "dtype": str(sharding.dtype).removeprefix("torch.")}


def _parameter(data: FileValue) -> ParameterSharding:
    for size in (*data["shape"].items(), *data["blocks"].items()):
        size.whole(least=0)
    data["ranks"].whole(least=1)
    data["units"].whole(least=0)
    if data["dim"].value is not None:
        data["dim"].whole(least=0, most=max(len(data["shape"].items()) - 1, 0))
    found: ParameterSharding = data.record(ParameterSharding, dtype=data["dtype"].one_of(ALL_DTYPES))
    if found.dim is not None and (not found.shape or sum(found.blocks) not in (0, found.shape[found.dim])):
        raise data["blocks"].wrong("blocks that fill the dim")
    return found


def _experts(data: FileValue) -> SpreadExperts | None:
    if data.value is None:
        return None
    data["ranks"].whole(least=2, most=1 << 20)
    found: SpreadExperts = data.record(SpreadExperts)
    return found


def _spelled(placement: Placement) -> Any:
    """
    >>> _spelled(Shard(1)), _spelled(Shard(0, sizes=(4, 2))), _spelled(REPLICATE)
    ({'shard': 1}, {'shard': 0, 'sizes': [4, 2]}, 'replicate')
    """
    if not isinstance(placement, Shard):
        return "partial" if isinstance(placement, Partial) else "replicate"
    blocks = {"sizes": list(placement.sizes)} if placement.sizes else {"outer": placement.outer}
    units = {"units": placement.units} if placement.units else {}
    return {"shard": placement.dim, **({} if blocks == {"outer": 1} else blocks), **units}


def _read(data: FileValue) -> Placement:
    if isinstance(data.value, str):
        return data.one_of({"partial": PARTIAL, "replicate": REPLICATE})
    sizes = tuple(size.whole(least=1) for size in data.get("sizes", []).items())
    units = data.get("units", 0).whole(least=0, most=1 << 40)
    return Shard(data["shard"].whole(least=0, most=64), data.get("outer", 1).whole(least=1), sizes, units)
