"""A short, stable text of a program: printed for people, reports and diffs, parsed in tests.

    w: f32[8, 8] = parameter("w")
    x: f32[4, 8] = input("x")
    mm: f32[4, 8] = aten.mm(x, w)
    start: f32[4, 8] = c10d.all_reduce(mm, "sum", "dp")
    done: f32[4, 8] = c10d.wait_tensor(start)
    return output("y", done)

Each line is Python: an annotated assignment, its annotation the dtype and shape. `aten.mm` is an operator's default
overload, `aten.add.Tensor` another one, `x[0]` an element of a multi-output op, `operator.mul` arithmetic on scalars.
A text may come from a stranger: it can name operators that compute, and nothing else (see `allowed`).
The graphs that higher-order operators call stand before the lines, as functions:

    def body():
        row: f32[3] = input("row")
        relu: f32[3] = aten.relu(row)
        return output("0", relu)
    rows: f32[4, 3] = input("rows")
    body: graph = constant("body")
    map_impl: (f32[4, 3],) = higher_order.map_impl(body, [rows], [])
    y: f32[4, 3] = map_impl[0]
    return output("y", y)
"""

from __future__ import annotations

import operator
import textwrap
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import fx

from crossfade.graph.allowed import FUNCTIONS, NAMESPACES
from crossfade.graph.nested import nested_graphs, opened
from crossfade.graph.parsing import GRAPH, Parser, resolve_operator
from crossfade.graph.private import HigherOrderOperator, OpOverload, schema_of
from crossfade.graph.program import Input, Program, identifier
from crossfade.graph.words import DTYPE_NAMES, DTYPES, LAYOUT_NAMES, RESERVED, quote, render_type, spell_number

__all__ = ["DTYPES", "parse", "render", "render_node", "render_type", "resolve_operator"]

_SHORT_NAMESPACES = {long: short for short, long in NAMESPACES.items()}
_FUNCTION_NAMES = {id(function): name for name, function in FUNCTIONS.items()}


def render(program: Program) -> str:
    """The whole program as text; `parse` reads it back."""
    graphs = nested_graphs(program)
    functions = [_function(name, module, program) for name, module in graphs.items()]
    inputs = {node: item for item, node in program.named_inputs()}
    lines = [_line(node, inputs, graphs) for node in program.graph.nodes if node.op != "output"]
    results = ", ".join(f"{out.kind}({quote(out.name)}, {_value(value)})" for out, value in program.named_results())
    return "\n".join([*functions, *lines, f"return {results}".rstrip()])


Program.render = render


def _function(name: str, module: fx.GraphModule, program: Program) -> str:
    """A nested graph; one that is not of operators with metadata is not shown."""
    inside = opened(module, program)
    body = render(inside) if inside is not None else "..."
    result = module.graph.output_node().args[0]
    if inside is not None and isinstance(result, fx.Node):  # one value, not a tuple of one
        body = f"{body.rpartition(chr(10))[0]}\nreturn {_value(inside.results[0])}"
    return f"def {identifier(name)}():\n{textwrap.indent(body, '    ')}"


def render_node(node: fx.Node) -> str:
    """One node's right-hand side, for messages."""
    return _call(node)


def parse(
    text: str,
    *,
    groups: Mapping[str, int] | None = None,
    constants: Mapping[str, Any] | None = None,
    as_written: bool = False,
) -> Program:
    """Build a program from its text. Shapes of inputs are read; all others are computed, and checked if written.

    The text has neither the sizes of groups nor the values of constants; without a value, a constant has only a type.
    `as_written` takes all types as they are written, laid out without gaps: for programs that are only run.

    >>> program = parse('''
    ... x: f32[2, 3] = input("x")
    ... y = aten.sum.dim_IntList(x, [1])
    ... return output("y", y)
    ... ''')
    >>> print(program)
    x: f32[2, 3] = input("x")
    y: f32[2] = aten.sum.dim_IntList(x, [1])
    return output("y", y)
    """
    return Parser(text, groups or {}, constants or {}, as_written=as_written).program()


def _line(node: fx.Node, inputs: Mapping[fx.Node, Input], graphs: Container[str]) -> str:
    is_graph = node.op == "get_attr" and node.target in graphs
    left = f"{_name(node)}: {GRAPH if is_graph else render_type(node.meta.get('val'))} = "
    if node.op == "placeholder":
        item = inputs[node]
        return f"{left}{item.kind}({quote(item.name)})"
    return left + _call(node)


def _call(node: fx.Node) -> str:
    if node.op in ("placeholder", "output"):
        return (
            f"placeholder({quote(str(node.target))})" if node.op == "placeholder" else f"return {_value(node.args[0])}"
        )
    if node.op == "get_attr":
        return f"constant({quote(str(node.target))})"
    if node.target is operator.getitem:
        return f"{_value(node.args[0])}[{_value(node.args[1])}]"
    arguments = [_value(argument) for argument in node.args]
    arguments += [f"{name}={_value(value)}" for name, value in node.kwargs.items()]
    return f"{_target(node.target)}({', '.join(arguments)})"


def _target(target: Any) -> str:
    if isinstance(target, OpOverload):
        schema = schema_of(target)
        namespace, name = schema.name.split("::")
        overload = f".{schema.overload_name}" if schema.overload_name else ""
        return f"{_SHORT_NAMESPACES.get(namespace, namespace)}.{name}{overload}"
    if isinstance(target, HigherOrderOperator):
        return f"higher_order.{target}"
    if id(target) in _FUNCTION_NAMES:
        return _FUNCTION_NAMES[id(target)]
    module = getattr(target, "__module__", "").removeprefix("_")
    return f"{module}.{target.__name__}"


def _value(value: Any) -> str:
    match value:
        case fx.Node():
            return _name(value)
        case str():
            return quote(value)
        case list():
            return f"[{', '.join(_value(item) for item in value)}]"
        case tuple():
            return f"({', '.join(_value(item) for item in value)}{',' if len(value) == 1 else ''})"
        case dict():
            return f"{{{', '.join(f'{_value(key)}: {_value(item)}' for key, item in value.items())}}}"
        case torch.dtype():
            return DTYPE_NAMES.get(value, str(value))
        case torch.device():
            return f"device({quote(str(value))})"
        case float() | complex():
            return spell_number(value)
        case OpOverload():
            return _target(value)
        case slice():
            return f"slice({_value(value.start)}, {_value(value.stop)}, {_value(value.step)})"
        case torch.memory_format() | torch.layout():
            return LAYOUT_NAMES[value]
    return "..." if value is ... else repr(value)


def _name(node: fx.Node) -> str:
    """A node's name; another one where its own is a word of the text, such as `f32`."""
    name = node.name
    if name in RESERVED:
        taken = {other.name for other in node.graph.nodes}
        while name in RESERVED or name in taken:
            name += "_"
    return name
