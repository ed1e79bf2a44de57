"""What every program obeys, checked after every pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from crossfade.errors import VerifyError
from crossfade.graph import collectives
from crossfade.graph.order import alias_roots
from crossfade.graph.private import tree_flatten
from crossfade.graph.program import Program, source_line
from crossfade.graph.text import render_node, render_type


def verify(program: Program, *, recompute: bool = False) -> None:
    """Raise `VerifyError` unless the program is well formed.

    - the graph passes `lint` and matches its signature;
    - every node that makes a value carries metadata; with `recompute`, equal to a fresh run on fake tensors;
    - every result of a started collective is waited for, and nothing reads it, or a view of it, before that;
    - every collective names a group that the program knows.

        >>> from crossfade.graph.text import parse
        >>> verify(parse('''
        ... x: f32[4] = input("x")
        ... start: f32[4] = c10d.all_reduce(x, "sum", "dp")
        ... y: f32[4] = aten.relu(start)
        ... return output("y", y)
        ... ''', groups={"dp": 2}))
        Traceback (most recent call last):
        ...
        crossfade.errors.VerifyError: found y = aten.relu(start), which reads start before its wait; ...
    """
    program.graph.lint()
    program.__post_init__()
    _verify_metadata(program.graph)
    _verify_collectives(program)
    if recompute:
        _verify_recomputed(program)


def _error(node: fx.Node, what: str, expected: str, remedy: str) -> VerifyError:
    where = f" [{source_line(node)}]" if source_line(node) else ""
    error = VerifyError(f"{node.name} = {render_node(node)}{where}, {what}", expected=expected, remedy=remedy)
    error.node = node  # type: ignore[attr-defined]
    return error


def _verify_metadata(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op != "output" and "val" not in node.meta and not (node.op == "get_attr" or node.is_impure()):
            raise _error(node, "without metadata", 'meta["val"] on every node', "build nodes with rewrite.splice")


def _verify_collectives(program: Program) -> None:
    found = collectives.find(program.graph)
    if not found:
        return
    for one in found:
        if one.group not in program.groups:
            known = ", ".join(program.groups) or "none"
            raise _error(one.node, f"on group {one.group!r}", f"one of: {known}", "add the group to Program.groups")
        for result in one.results:
            if not any(collectives.is_wait(user) for user in result.users):
                raise _error(result, "never waited for", "a wait on every result", "wait for it, or remove it")
    _verify_no_early_use(program.graph)


def _verify_no_early_use(graph: fx.Graph) -> None:
    """Walk once with the set of buffers in flight: reading one, directly or through a view, is an error."""
    nodes = list(graph.nodes)
    roots = alias_roots(nodes)
    in_flight: dict[fx.Node, fx.Node] = {}
    waited: set[fx.Node] = set()
    for node in nodes:
        if collectives.is_wait(node):
            in_flight.pop(roots[node], None)
            waited.add(node)
            continue
        for source in node.all_input_nodes:
            start = in_flight.get(roots[source])
            if start is not None and not _takes_result_apart(node, start):
                raise _error(
                    node,
                    f"which reads {source.name} before its wait",
                    f"only waits to read what {start.name} is still writing",
                    "read the wait's result instead",
                )
        if collectives.is_collective(node):
            in_flight[roots[node]] = node


def _takes_result_apart(node: fx.Node, start: fx.Node) -> bool:
    """`getitem` on a coalesced collective only names one of its results."""
    return node.op == "call_function" and start in node.all_input_nodes and not hasattr(node.target, "_schema")


def _verify_recomputed(program: Program) -> None:
    mode = program.fake_mode
    with mode:
        for node in program.graph.nodes:
            if node.op != "call_function":
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
            fresh = _flat_types(node.target(*args, **kwargs))
            if fresh != _flat_types(node.meta.get("val")):
                raise _error(node, f"recorded as {_flat_types(node.meta.get('val'))}", f"{fresh}", "refresh its metadata")


def _flat_types(value: Any) -> list[str]:
    leaves, _ = tree_flatten(value)
    return [f"{render_type(x)}{_strides(x)}" for x in leaves]


def _strides(value: Any) -> str:
    if not isinstance(value, torch.Tensor) or value.is_contiguous():
        return ""
    return f" stride {tuple(value.stride())}"
