"""On which devices a program is: one exported without numbers, on the meta device, is given another."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from crossfade.graph.private import FakeTensor, exported_program, tree_map_only


def has_numbers(tensor: Tensor) -> bool:
    """Whether a tensor is more than a description.

    >>> has_numbers(torch.ones(2)), has_numbers(torch.ones(2, device="meta"))
    (True, False)
    """
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta


def like(value: Tensor, original: Tensor) -> Tensor:
    """A value as what it replaces: a parameter, or a plain tensor.

    >>> like(torch.ones(1), torch.nn.Parameter(torch.ones(2), requires_grad=False))
    Parameter containing:
    tensor([1.])
    """
    is_parameter = isinstance(original, torch.nn.Parameter)
    return torch.nn.Parameter(value, requires_grad=original.requires_grad) if is_parameter else value


def device_types(exported: ExportedProgram) -> set[str]:
    """The kinds of devices that the program's values lie on."""
    values = (node.meta.get("val") for node in exported.graph.nodes)
    return {value.device.type for value in values if isinstance(value, Tensor)}


def moved(exported: ExportedProgram, where: Mapping[str, torch.device]) -> ExportedProgram:
    """The same program with what lies on a kind of device on another device; state and constants stay as they are.

    >>> exported = torch.export.export(torch.nn.Linear(2, 3).to("meta"), (torch.ones(4, 2, device="meta"),))
    >>> device_types(moved(exported, {"meta": torch.device("cpu")}))
    {'cpu'}
    """
    graph = _copied(exported.graph, where)
    result = exported_program(exported, graph, exported.graph_signature, dict(exported.state_dict))
    _move_children(result.graph_module, where)
    return result


def _move_children(module: fx.GraphModule, where: Mapping[str, torch.device]) -> None:
    for name, child in list(module.named_children()):
        if isinstance(child, fx.GraphModule):
            setattr(module, name, made := fx.GraphModule(child, _copied(child.graph, where)))
            _move_children(made, where)


def _copied(graph: fx.Graph, where: Mapping[str, torch.device]) -> fx.Graph:
    """A copy of a graph with its values and device arguments moved."""
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    known: dict[int, Tensor] = {}

    def value(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            known[id(tensor)] = _moved_value(tensor, where)
        return known[id(tensor)]

    for node in graph.nodes:
        copies[node] = made = new.node_copy(node, copies.__getitem__)
        made.name = node.name  # a copied graph renames what Python reserves, such as `input`
        made.args, made.kwargs = tree_map_only(
            torch.device, lambda device: where.get(device.type, device), (made.args, made.kwargs)
        )
        if "val" in made.meta:
            made.meta["val"] = tree_map_only(Tensor, value, made.meta["val"])
    return new


def _moved_value(value: Tensor, where: Mapping[str, torch.device]) -> Tensor:
    if value.device.type not in where or not isinstance(value, FakeTensor):
        return value
    with value.fake_mode:
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=where[value.device.type])
    return like(made, value)
