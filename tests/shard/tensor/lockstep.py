"""All ranks of a tensor-parallel program in one process: node by node for every rank, collectives done by hand.

An oracle beside real ranks: it says what the collectives mean in a few lines, and runs thousands of small programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.shard.tensor.builder import RANK
from crossfade.shard.tensor.localize import LocalProgram
from crossfade.shard.tensor.parts import joined
from crossfade.shard.tensor.placements import Shard
from crossfade.shard.tensor.sources import local_part


def run_ranks(local: LocalProgram, state: Mapping[str, Tensor], inputs: Sequence[Any]) -> list[list[Any]]:
    """The results of every rank, for whole state and whole user inputs."""
    environments: list[dict[fx.Node, Any]] = []
    signature = local.exported.graph_signature
    for rank in range(local.ranks):
        environment: dict[fx.Node, Any] = {}
        given = iter(inputs)
        for spec, node in zip(signature.input_specs, local.exported.graph.find_nodes(op="placeholder"), strict=True):
            if spec.target == RANK:
                environment[node] = torch.tensor(rank)
            elif spec.target is not None:
                placement = local.parameters.get(spec.target)
                whole = state[spec.target].detach()
                environment[node] = local_part(whole, placement, rank, local.ranks) if placement else whole
            else:
                value = next(given)
                placement = local.inputs[spec.arg.name]
                environment[node] = local_part(value, placement, rank, local.ranks) if placement else value
        environments.append(environment)
    for node in local.exported.graph.nodes:
        if node.op == "get_attr":
            for environment in environments:
                environment[node] = getattr(local.exported.graph_module, node.target)
        elif node.op == "call_function":
            _step(node, environments)
    (results,) = local.exported.graph.output_node().args
    return [list(fx.map_arg(results, environment.__getitem__)) for environment in environments]


_DRAWING = {"aten::dropout", "aten::native_dropout", "aten::scaled_dot_product_attention"}


def _step(node: fx.Node, environments: list[dict[fx.Node, Any]]) -> None:
    calls = [fx.map_arg((node.args, node.kwargs), environment.__getitem__) for environment in environments]
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    if name.startswith("crossfade::tp_"):
        outputs = _collective(name.removeprefix("crossfade::tp_"), [args for args, _ in calls])
    else:
        state = torch.get_rng_state() if name in _DRAWING else None
        outputs = []
        for args, kwargs in calls:
            if state is not None:
                torch.set_rng_state(state)  # ranks are seeded alike
            outputs.append(node.target(*args, **kwargs))
    for environment, output in zip(environments, outputs, strict=True):
        environment[node] = output


def _collective(name: str, calls: list[tuple[Any, ...]]) -> list[Any]:
    values = [args[0] for args in calls]
    ranks = len(values)
    if name == "enter":
        return values
    if name == "share":
        return [value if rank == 0 else torch.zeros_like(value) for rank, value in enumerate(values)]
    if name == "reduce":
        stacked = torch.stack(values)
        return [stacked.sum(0) if calls[0][1] == "sum" else stacked.amax(0)] * ranks
    dim, outer = calls[0][1:3]
    if name in ("gather", "gather_enter"):
        return [joined(values, Shard(dim, outer))] * ranks
    whole = torch.stack(values).sum(0) if name == "scatter" else None
    return [
        local_part(whole if whole is not None else values[rank], Shard(dim, outer), rank, ranks)
        for rank in range(ranks)
    ]
