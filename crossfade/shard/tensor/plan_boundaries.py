"""Where a plan's words about what modules take and return meet the graph: which values enter and leave each module."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from crossfade.errors import PlanError
from crossfade.graph.passes import Outcome, Verdict
from crossfade.shard.tensor.devices import moved
from crossfade.shard.tensor.placements import REPLICATE, Placement, Shard, divides
from crossfade.shard.tensor.plan_resolved import ModuleBoundary


@dataclass(frozen=True)
class FoundBoundaries:
    """The program in which every value that a module takes in a placement of its own is a value of its own; where the
    values at boundaries are brought to, by node name; and what of the plan had nothing to act on."""

    exported: ExportedProgram
    placements: Mapping[str, Placement]
    verdicts: tuple[Verdict, ...]


def find_boundaries(exported: ExportedProgram, modules: Mapping[str, ModuleBoundary], ranks: int) -> FoundBoundaries:
    """Find the values that enter and leave modules; `exported` is left as it is."""
    if any(boundary.input is not None for boundary in modules.values()):
        exported = moved(exported, {})  # a copy
    placements = _entering(exported, modules, ranks)
    taken = {module for module, _ in placements}
    found = {name: place for (_, name), place in placements.items()}
    verdicts = [_idle(path, "takes") for path, boundary in modules.items() if boundary.input and path not in taken]
    returned = set()
    for module, node, value in _leaving(exported.graph, modules):
        output = modules[module].output
        place = read_layout(str(output), f"what {module} returns", value, ranks)
        if place is None:
            verdicts.append(
                Verdict.of(node, Outcome.LEFT, "it has no such dim", detail=f"{output}, which {module} is to return")
            )
            continue
        found[node.name] = place
        returned.add(module)
    silent = [path for path, boundary in modules.items() if boundary.output and path not in returned]
    verdicts += [_idle(path, "returns") for path in silent]
    return FoundBoundaries(exported, found, tuple(verdicts))


def _idle(module: str, does: str) -> Verdict:
    detail = f"no value of the program that {module} {does} could be placed"
    return Verdict(module, Outcome.LEFT, "the plan's boundary has nothing to act on", detail=detail)


def _leaving(graph: fx.Graph, modules: Mapping[str, ModuleBoundary]) -> list[tuple[str, fx.Node, Tensor]]:
    """Each value that leaves a module whose output the plan speaks of."""
    found = []
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        outside = [_modules(user) for user in node.users]
        for path in sorted(_modules(node) & modules.keys()):
            if modules[path].output is not None and any(path not in where for where in outside):
                found.append((path, node, value))
    return found


def _entering(
    exported: ExportedProgram, modules: Mapping[str, ModuleBoundary], ranks: int
) -> dict[tuple[str, str], Placement]:
    """Give the first tensor that each call of a module takes a name of its own, in place; and where it is to lie."""
    kinds = zip(exported.graph_signature.input_specs, exported.graph.find_nodes(op="placeholder"), strict=True)
    state = {node for spec, node in kinds if spec.kind is not InputKind.USER_INPUT}
    inside: dict[str, list[fx.Node]] = {}
    for node in exported.graph.nodes:
        for call in _calls(node):
            if (path := _plain_path(call)) in modules and modules[path].input is not None:
                inside.setdefault(call, []).append(node)
    found: dict[tuple[str, str], Placement] = {}
    for call, nodes in inside.items():
        members, path = set(nodes), _plain_path(call)
        known = members | state
        taken = [(node, source) for node in nodes for source in node.all_input_nodes if source not in known]
        first = next(((node, source) for node, source in taken if _is_activation(source)), None)
        if first is None:
            continue
        user, value = first
        place = read_layout(str(modules[path].input), f"what {path} takes", value.meta["val"], ranks)
        if place is None:
            raise PlanError(
                f"what {path} takes has {value.meta['val'].dim()} dims and cannot be {modules[path].input}",
                expected="a dim it has",
                remedy="correct the dim",
            )
        with exported.graph.inserting_before(user):
            own = exported.graph.call_function(torch.ops.aten.alias.default, (value,))
        own.meta = {**value.meta, "nn_module_stack": user.meta.get("nn_module_stack")}
        value.replace_all_uses_with(own, delete_user_cb=members.__contains__)
        found[path, own.name] = place
    return found


def _is_activation(node: fx.Node) -> bool:
    return node.op != "get_attr" and isinstance(node.meta.get("val"), Tensor)


def _modules(node: fx.Node) -> set[str]:
    """The modules that a node was called in, by their paths."""
    return {_plain_path(call) for call in _calls(node)}


def _calls(node: fx.Node) -> list[str]:
    """The calls of modules that a node is part of: a module called twice has two."""
    return [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]


def _plain_path(call: str) -> str:
    """
    >>> _plain_path("L['self'].norm@1"), _plain_path("layers.0.up")
    ('norm', 'layers.0.up')
    """
    return re.sub(r"^L\['self'\]\.?|@\d+$", "", call)


def read_layout(text: str, what: str, value: Tensor, ranks: int) -> Placement | None:
    """A placement from a boundary's words; None if the value lacks the dim, PlanError if that cannot be split.

    >>> read_layout("shard(-1)", "it", torch.ones(2, 8), 4), read_layout("shard(2)", "it", torch.ones(2, 8), 4)
    (Shard(dim=1, outer=1, sizes=(), units=0), None)
    """
    if text == "replicate":
        return REPLICATE
    dim, rank = int(text.removeprefix("shard(").removesuffix(")")), value.dim()
    if not -rank <= dim < rank:
        return None
    place = Shard(dim % rank)
    if not divides(place, value.shape[place.dim], ranks):
        raise PlanError(
            f"{what} has the shape {tuple(value.shape)} and cannot be {text} over {ranks} ranks",
            expected=f"a size that divides by {ranks} whatever it is",
            remedy="split another dim, pad it, or export with a dynamic size that is so many times another",
        )
    return place
