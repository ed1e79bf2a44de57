"""Graphs inside programs: what `cond`, `map`, `scan` and `while_loop` call.

A nested graph is a constant of its program: an `fx.GraphModule` that a `get_attr` node names. It is treated as a
value: whoever changes one opens it as a program of its own, and puts what became of it in its place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from crossfade.errors import CaptureError
from crossfade.graph.effects import is_random, written_inputs
from crossfade.graph.private import keep_codegen, statically_equal, tree_flatten, tree_unflatten
from crossfade.graph.program import Program, attribute, from_graph_module

_CARRIED = {"while_loop": 2, "while_loop_stack_output": 2, "scan": 1}
"""Operators that give what their graph returns to it again: where the values stand that they carry at first."""

_CALLERS = {"cond", "map_impl", "invoke_subgraph", *_CARRIED}
"""Operators that call a graph on values as its metadata describes them. Others may batch it, or cut it in pieces."""


def nested_graphs(program: Program) -> dict[str, fx.GraphModule]:
    """The graphs that a program's nodes name, by their names."""
    names = [str(node.target) for node in program.graph.find_nodes(op="get_attr")]
    values = {name: program.constants.get(name) for name in names}
    return {name: value for name, value in values.items() if isinstance(value, fx.GraphModule)}


def opened(module: fx.GraphModule, program: Program) -> Program | None:
    """A nested graph as a program of its own, a copy; None if it is not one of operators with metadata."""
    try:
        inside = from_graph_module(module, groups=program.groups)
    except CaptureError:
        return None
    inside.facts = program.facts
    return inside


def closed(inside: Program, like: fx.GraphModule) -> fx.GraphModule:
    """A program as a nested graph again, returning what `like` returns in the same structure."""
    _, spec = tree_flatten(like.graph.output_node().args[0])
    done = inside.copy()
    done.output_node.args = (tree_unflatten(done.results, spec),)
    keep_codegen(done.graph, like.graph)
    return fx.GraphModule(dict(done.constants), done.graph, type(like).__name__)


def why_closed(program: Program, name: str) -> str | None:
    """Why what a nested graph's metadata says may not hold whenever it is called; None if it does."""
    for node in program.graph.find_nodes(op="get_attr"):
        for caller in node.users if node.target == name else ():
            if str(caller.target) not in _CALLERS:
                return "its caller may give it other values than its metadata describes"
            if not _is_steady(program, caller):
                return "what its caller carries from turn to turn lies in memory differently"
    return None


def _is_steady(program: Program, caller: fx.Node) -> bool:
    """Whether a loop's values have, after each turn, the strides they had before it."""
    place = _CARRIED.get(str(caller.target))
    if place is None:
        return True
    body, carried = caller.args[place - 1], caller.args[place]
    assert isinstance(body, fx.Node) and isinstance(carried, tuple | list)
    graph = program.constants[str(body.target)].graph
    results, _ = tree_flatten(graph.output_node().args[0])
    before = list(graph.find_nodes(op="placeholder"))
    return all(_lie_alike(*pair) for pair in zip(before[: len(carried)], results, strict=False))


def _lie_alike(first: Any, second: Any) -> bool:
    old, new = (value.meta.get("val") if isinstance(value, fx.Node) else value for value in (first, second))
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return not isinstance(old, torch.Tensor) and not isinstance(new, torch.Tensor)
    return statically_equal(tuple(old.stride()), tuple(new.stride()))


def has_effect_inside(program: Program, node: fx.Node) -> bool:
    """Whether a graph that a node calls writes what it is given, draws random numbers, or has another effect."""
    called = [program.constants.get(str(source.target)) for source in node.all_input_nodes if source.op == "get_attr"]
    return any(_has_effect(module) for module in called if isinstance(module, fx.GraphModule))


def _has_effect(module: fx.GraphModule) -> bool:
    for node in module.graph.nodes:
        if node.op == "get_attr":
            inner = attribute(module, str(node.target))
            if isinstance(inner, fx.GraphModule) and _has_effect(inner):
                return True
        elif node.op not in ("placeholder", "output") and (is_random(node) or node.is_impure() or written_inputs(node)):
            return True
    return False


def node_count(program: Program) -> int:
    """How many nodes a program has, those of its nested graphs included."""
    return len(program.graph.nodes) + sum(_nodes(module) for module in nested_graphs(program).values())


def _nodes(module: fx.GraphModule) -> int:
    names = {str(node.target) for node in module.graph.find_nodes(op="get_attr")}
    inner = [attribute(module, name) for name in names]
    return len(module.graph.nodes) + sum(_nodes(child) for child in inner if isinstance(child, fx.GraphModule))
