"""What every program obeys, checked after every pass."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from crossfade.errors import CaptureError, VerifyError
from crossfade.graph import collectives
from crossfade.graph.effects import alias_roots, written_inputs
from crossfade.graph.nested import nested_graphs, opened
from crossfade.graph.private import schema_of, tree_flatten
from crossfade.graph.program import Program, described, from_graph_module, source_line
from crossfade.graph.text import render_node, render_type

_Nodes = dict[fx.Node, fx.Node]


def verify(program: Program, *, recompute: bool = False, nested: bool = True, known: bool = False) -> None:
    """Raise `VerifyError` unless the program is well formed.

    - the graph passes `lint`, matches its signature, and its constants are there;
    - every node that makes a value carries metadata; with `recompute`, equal to a fresh run on fake tensors;
    - every result of a started collective is waited for, and nothing reads it, or a view of it, before that;
    - nothing writes what a started collective is still reading;
    - everything that communicates names a group that the program knows;
    - all of this holds of the graphs inside it that are made of operators with metadata, unless `nested` is false.

    Of a program that is `known`, by its hash, to be one that was verified before, only the metadata is looked at.

        >>> from crossfade.graph.text import parse
        >>> verify(parse('''
        ... x: f32[4] = input("x")
        ... start: f32[4] = c10d.all_reduce(x, "sum", "dp")
        ... y: f32[4] = aten.relu(start)
        ... return output("y", y)
        ... ''', groups={"dp": 2}))
        Traceback (most recent call last):
        ...
        crossfade.errors.VerifyError: y = aten.relu(start) reads start before its wait: expected ...
    """
    if not known:
        _verify_structure(program)
    _verify_metadata(program.graph)
    if not known:
        _verify_collectives(program)
    if recompute:
        _verify_recomputed(program)
    if nested:
        for module in nested_graphs(program).values():
            if (inside := opened(module, program)) is not None:
                verify(inside, recompute=recompute)


def accept(module: fx.GraphModule, *, groups: Mapping[str, int] | None = None) -> Program:
    """A graph that somebody gives, as a program that is well formed; see `from_graph_module`.

    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> start = lambda x: collectives.all_reduce(x, "sum", "dp")
    >>> accept(make_fx(start, tracing_mode="fake")(torch.ones(3)))
    Traceback (most recent call last):
    ...
    crossfade.errors.VerifyError: in the graph given: all_reduce = ... is never waited for: expected a wait on ...
    """
    with _said_of_the_graph_given():
        _lint(module.graph)
    program = from_graph_module(module, groups=groups)
    verify_given(program)
    return program


def verify_given(program: Program) -> None:
    """Like `verify`, before any pass has run: whatever is wrong, no pass is to blame."""
    with _said_of_the_graph_given():
        verify(program)


@contextlib.contextmanager
def _said_of_the_graph_given() -> Iterator[None]:
    try:
        yield
    except VerifyError as error:
        blamed = VerifyError(f"in the graph given: {error.found}", expected=error.expected, remedy=error.remedy)
        blamed.node = getattr(error, "node", None)  # type: ignore[attr-defined]
        raise blamed from error


def _verify_structure(program: Program) -> None:
    _lint(program.graph)
    try:
        program.check_signature()
    except CaptureError as error:
        raise VerifyError(error.found, expected=error.expected, remedy=error.remedy) from error
    for node in program.graph.find_nodes(op="get_attr"):
        if node.target not in program.constants:
            known = ", ".join(program.constants) or "none"
            raise _error(node, "has no value", f"one of: {known}", "add it to Program.constants")


def _lint(graph: fx.Graph) -> None:
    try:
        graph.lint()
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]  # lint prints the whole graph after it
        raise VerifyError(
            f"a malformed graph ({first_line})",
            expected="a graph that passes lint",
            remedy="define each value once, above its uses, and give the module all that its graph names",
        ) from error


def _error(node: fx.Node, what: str, expected: str, remedy: str) -> VerifyError:
    where = f" [{source_line(node)}]" if source_line(node) else ""
    error = VerifyError(f"{node.name} = {render_node(node)}{where} {what}", expected=expected, remedy=remedy)
    error.node = node  # type: ignore[attr-defined]
    return error


def _verify_metadata(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if "val" not in node.meta and _makes_value(node):
            remedy = "build nodes with splice.splice, and trace what you give with make_fx"
            raise _error(node, "has no metadata", 'meta["val"] on every node', remedy)


def _makes_value(node: fx.Node) -> bool:
    if node.op in ("output", "get_attr"):
        return False
    schema = schema_of(node.target)
    return bool(schema.returns) if schema is not None else node.op == "placeholder" or not node.is_impure()


def _verify_collectives(program: Program) -> None:
    for node in program.graph.nodes:
        if (group := collectives.group_of(node)) is not None and group not in program.groups:
            known = ", ".join(program.groups) or "none"
            remedy = f'add it to the groups of the program, with its ranks: groups={{"{group}": 2}}'
            raise _error(node, f"is on group {group!r}", f"one of: {known}", remedy)
    found = collectives.find(program.graph)
    for collective in found:
        for result in collective.results:
            if not any(collectives.is_wait(user) for user in result.users):
                raise _error(result, "is never waited for", "a wait on every result", "wait for it, or remove it")
        if collective.coalesced and (
            missing := set(range(len(collective.inputs))) - {result.args[1] for result in collective.results}
        ):
            what = f"has result {min(missing)}, which is never waited for"
            raise _error(collective.node, what, "a wait on every result", "wait for it, or remove it")
    if found:
        _verify_in_flight(program.graph)


def _verify_in_flight(graph: fx.Graph) -> None:
    """Walk once with the memory in flight: nothing may read what a collective writes, nor write what it reads."""
    nodes = list(graph.nodes)
    roots = alias_roots(nodes)
    arriving: dict[fx.Node, fx.Node] = {}
    leaving: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if collectives.is_wait(node):
            start = collectives.started_by(node)
            if start is None or arriving.get(roots[node]) is start:  # a second wait on an older start ends nothing
                arriving.pop(roots[node], None)
            for source in start.all_input_nodes if start is not None else ():
                if leaving.get(roots[source]) is start:
                    del leaving[roots[source]]
            continue
        _verify_touches(node, roots, arriving, leaving)
        if (collective := collectives.view(node)) is not None:
            arriving.update((roots[result], node) for result in (node, *collective.results))
            if collective.kind not in (collectives.Kind.ALL_REDUCE, collectives.Kind.BROADCAST):  # these copy first
                leaving.update((roots[source], node) for source in collective.inputs)


def _verify_touches(node: fx.Node, roots: _Nodes, arriving: _Nodes, leaving: _Nodes) -> None:
    for source in node.all_input_nodes:
        start = arriving.get(roots[source])
        if start is not None and node.target is not operator.getitem:
            raise _error(
                node,
                f"reads {source.name} before its wait",
                f"only waits to read what {start.name} is still writing",
                "read the wait's result instead",
            )
    for target in written_inputs(node) if leaving else ():
        start = leaving.get(roots[target])
        if start is not None:
            raise _error(
                node,
                f"writes {target.name} before the wait of {start.name}",
                f"no writes to what {start.name} is still reading",
                "write after the wait",
            )


def _verify_recomputed(program: Program) -> None:
    mode = program.fake_mode
    with mode:
        for node in program.graph.nodes:
            if node.op != "call_function":
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: described(n, program.constants))
            fresh = _flat_types(node.target(*args, **kwargs))
            if fresh != _flat_types(node.meta.get("val")):
                raise _error(
                    node, f"is recorded as {_flat_types(node.meta.get('val'))}", f"{fresh}", "refresh its metadata"
                )


def _flat_types(value: Any) -> list[str]:
    leaves, _ = tree_flatten(value)
    return [f"{render_type(x)}{_strides(x)}" for x in leaves]


def _strides(value: Any) -> str:
    if not isinstance(value, torch.Tensor) or value.is_contiguous():
        return ""
    return f" stride {tuple(value.stride())}"
