"""How the user's inputs and outputs lie over the ranks: read in torch's words or ours, and checked against the program.

>>> from torch.distributed import tensor
>>> read_placement(tensor.Shard(-1), rank=3), read_placement(tensor.Replicate(), rank=3)
(Shard(dim=2, outer=1, sizes=(), units=0), Replicate())
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from crossfade.errors import PlanError
from crossfade.shard.tensor.placements import PARTIAL, REPLICATE, Partial, Placement, Replicate, Shard, divides

_WORDS = "Shard(dim) or Replicate()"


def input_placements(exported: ExportedProgram, given: Mapping[str, Any], ranks: int) -> dict[str, Placement]:
    """Where inputs lie, by name; PlanError for one that the program does not have or that cannot be split so."""
    values = user_inputs(exported)
    found = {}
    for name, placement in given.items():
        if name not in values:
            raise PlanError(f"no input is named {name!r}", expected=f"one of {', '.join(values)}", remedy="correct it")
        found[name] = _fitting(f"the input {name}", values[name], placement, ranks)
        if isinstance(found[name], Partial):
            raise PlanError(f"the input {name} cannot be partial sums", expected=_WORDS, remedy="add them up first")
    return found


def output_placements(exported: ExportedProgram, given: Mapping[int, Any], ranks: int) -> dict[int, Placement]:
    """Where outputs are to lie, by position (from the end if negative); PlanError as for inputs."""
    values = user_outputs(exported)
    found = {}
    for position, placement in given.items():
        if not isinstance(position, int) or not -len(values) <= position < len(values):
            last = len(values) - 1
            raise PlanError(
                f"no output {position!r} exists", expected=f"a position from 0 to {last}", remedy="correct it"
            )
        found[position % len(values)] = _fitting(f"output {position}", values[position], placement, ranks)
    return found


def user_inputs(exported: ExportedProgram) -> dict[str, Any]:
    """The user's inputs by name, each with its description."""
    nodes = exported.graph.find_nodes(op="placeholder")
    pairs = zip(exported.graph_signature.input_specs, nodes, strict=True)
    return {spec.arg.name: node.meta.get("val") for spec, node in pairs if spec.kind is InputKind.USER_INPUT}


def user_outputs(exported: ExportedProgram) -> list[Any]:
    """The descriptions of what the user gets, in order."""
    (results,) = exported.graph.output_node().args
    pairs: Any = zip(exported.graph_signature.output_specs, results, strict=True)  # type: ignore[arg-type]
    user = [value for spec, value in pairs if spec.kind is OutputKind.USER_OUTPUT]
    return [value.meta.get("val") if isinstance(value, fx.Node) else value for value in user]


def read_placement(given: Any, rank: int) -> Placement:
    """A placement of torch's or ours, for a value of so many dims."""
    from torch.distributed import tensor  # here, since importing it is slow

    if isinstance(given, Replicate) or type(given) is tensor.Replicate:
        return REPLICATE
    if isinstance(given, Partial) or (type(given) is tensor.Partial and given.reduce_op == "sum"):
        return PARTIAL
    if not isinstance(given, Shard) and type(given) is not tensor.Shard:
        raise PlanError(f"{given!r} is no placement", expected=_WORDS, remedy="use torch.distributed.tensor's")
    if not -rank <= given.dim < rank:
        raise PlanError(f"{given} does not fit a value of {rank} dims", expected="a dim it has", remedy="correct it")
    return given.on(given.dim % rank) if isinstance(given, Shard) else Shard(given.dim % rank)


def _fitting(what: str, value: Any, given: Any, ranks: int) -> Placement:
    if not isinstance(value, Tensor):
        if read_placement(given, 1) == REPLICATE:
            return REPLICATE
        raise PlanError(f"{what} is no tensor and cannot be {given}", expected="a tensor", remedy="leave it out")
    placement = read_placement(given, value.dim())
    if isinstance(placement, Shard) and not divides(placement, value.shape[placement.dim], ranks):
        raise PlanError(
            f"{what} of shape {tuple(value.shape)} cannot be {placement} over {ranks} ranks",
            expected=f"a size that divides by {ranks} whatever it is",
            remedy="split another dim, or export with a dynamic size that is so many times another",
        )
    return placement
