"""`crossfade shard`: a saved model becomes a folder of every rank's weights and the one program that they all run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch.export import ExportedProgram

from crossfade.compile.sharding import Prepared, Sharded, prepare, without_axis
from crossfade.errors import MeshError, PlanError
from crossfade.ranks.mesh import EXPERT_AXIS
from crossfade.report.units import format_bytes
from crossfade.shard.tensor.plan import Plan
from crossfade.shard.tensor.sources import source_of


@dataclass(frozen=True)
class Written:
    """One rank's file."""

    rank: int
    path: Path
    bytes: int
    sharded: Sharded
    """Without weights: what is alike on all ranks."""


def read_mesh(spelling: str) -> tuple[str, int, int]:
    """The axis of the plan, its ranks, and those that experts are spread over, from the command line.

    Without an axis for a plan, its name is empty.

    >>> read_mesh("tp=4"), read_mesh("ep=2"), read_mesh("ep=2,tp=4")
    (('tp', 4, 1), ('', 1, 2), ('tp', 4, 2))
    """
    axes = [item.partition("=") for item in spelling.split(",")]
    sizes = {axis: int(size) for axis, _, size in axes if axis and size.isdecimal() and int(size)}
    others = [axis for axis in sizes if axis != EXPERT_AXIS]
    if len(sizes) != len(axes) or len(others) > 1:
        raise MeshError(
            f"the mesh {spelling!r}",
            expected=f"AXIS=RANKS, or {EXPERT_AXIS}=RANKS for experts, or both with a comma between",
            remedy=f"write tp=4, for example, or {EXPERT_AXIS}=2,tp=4",
        )
    axis = others[0] if others else ""
    return axis, sizes.get(axis, 1), sizes.get(EXPERT_AXIS, 1)


def read_plan(spelling: str) -> Plan | None:
    """A plan from a file, or None for the one that the graph suggests."""
    if spelling == "megatron":
        return None
    if not Path(spelling).is_file():
        raise PlanError(
            f"no plan in {spelling}", expected="a .yaml or .json file, or megatron", remedy="correct --plan"
        )
    return Plan.load(spelling)


def shard_model(exported: ExportedProgram, mesh: str, plan: str) -> Prepared:
    """The program of all ranks, without weights."""
    axis, ranks, experts = read_mesh(mesh)
    chosen = read_plan(plan)
    if chosen is not None and not axis:
        raise without_axis("a plan", "tp")
    return prepare(exported, ranks, chosen, axis or "tp", torch.device("cpu"), expert_ranks=experts)


def write_ranks(prepared: Prepared, state: object, folder: Path) -> Iterator[Written]:
    """Write one rank after the other: beside the source, only one rank's parts are held at a time."""
    source = source_of(prepared.whole.state_dict if state is None else state)
    for place in range(prepared.places):
        sharded = prepared.of_place(place, source)
        path = sharded.save(folder)
        bare = replace(sharded, program=prepared.local.exported)
        del sharded
        yield Written(place, path, path.stat().st_size, bare)


def summary(written: list[Written]) -> RenderableType:
    """The plan, what a forward communicates, what each rank has to load, and what did not go as a plan hopes."""
    sharded = written[0].sharded
    files = Table("rank", "file", "bytes", title=sharded.axes)
    for file in written:
        files.add_row(str(file.rank), file.path.name, format_bytes(file.bytes))
    found = sharded.collectives()
    said = ", ".join(f"{count} {kind}s ({format_bytes(size)})" for kind, (count, size) in found.items())
    verdicts = [Text(str(verdict)) for verdict in sharded.verdicts if verdict.reason != "reduced"]
    return Group(sharded.plan.__rich__(), files, Text(f"a forward has {said or 'no collectives'}"), *verdicts)
