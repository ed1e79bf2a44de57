"""Experts that are spread over an axis: found in the captured program, and kept by the ranks that are to have them."""

from __future__ import annotations

from torch import nn

from crossfade.compile.place import Place
from crossfade.errors import ModelError
from crossfade.graph.passes import Pass
from crossfade.graph.program import Program
from crossfade.shard.expert_regions import find_experts
from crossfade.shard.split_experts import SplitExperts


def keep_own_experts(program: Program, model: nn.Module, place: Place) -> tuple[str, ...]:
    """The parameters of which this rank keeps its own experts from now on; none where experts are not spread."""
    if place.experts is None:
        return ()
    found = find_experts(program, place.experts.size)
    if not found.parameters:
        raise ModelError(
            f"a {type(model).__name__} in which no experts are found, on a mesh with an axis {place.experts.name}",
            expected="matmuls of groups of rows, each with a matrix of its own: torch's or transformers' grouped_mm",
            remedy='compute experts by grouped_mm (transformers: experts_implementation="grouped_mm", its default), or '
            "call the axis dp",
        )
    place.split_experts(found.parameters)
    return found.parameters


def spreading(experts: tuple[str, ...], place: Place) -> list[Pass]:
    """Passes that send rows to their experts, where these are spread."""
    axis = place.experts
    return [SplitExperts(axis.name, axis.size)] if axis is not None and experts else []
