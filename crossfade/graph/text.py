"""A short, stable text of a program: printed for people, reports and diffs, parsed in tests.

    w: f32[8, 8] = parameter("w")
    x: f32[4, 8] = input("x")
    mm: f32[4, 8] = aten.mm(x, w)
    start: f32[4, 8] = c10d.all_reduce(mm, "sum", "dp")
    done: f32[4, 8] = c10d.wait_tensor(start)
    return output("y", done)

Each line is Python: an annotated assignment, its annotation the dtype and shape. `aten.mm` is an operator's default
overload, `aten.add.Tensor` another one, `x[0]` an element of a multi-output op, `operator.mul` arithmetic on scalars.
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

import ast
import builtins
import json
import math
import operator
import re
import textwrap
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import fx

from crossfade.errors import TextError
from crossfade.graph import collectives
from crossfade.graph.nested import nested_graphs, opened
from crossfade.graph.private import FakeTensorMode, symbolic_shapes
from crossfade.graph.program import Input, InputKind, Output, OutputKind, Program, described, identifier

DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "b8": torch.bool,
    "c64": torch.complex64,
    "c128": torch.complex128,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NAMESPACES = {"c10d": collectives.NAMESPACE}
_SHORT_NAMESPACES = {long: short for short, long in _NAMESPACES.items()}
_MEMORY_FORMATS = {
    name: getattr(torch, name)
    for name in ("preserve_format", "contiguous_format", "channels_last", "channels_last_3d", "strided", "sparse_coo")
}
_CONSTANT_NAMES = {value: name for name, value in _MEMORY_FORMATS.items()}
_MODULES: dict[str, Any] = {"operator": operator, "math": math, "builtins": builtins, "torch": torch}
_TYPES: dict[str, Any] = {"float": 1.0, "int": 1, "bool": True}
_ANNOTATION = re.compile(r"^(\s*\w+: )([^\"'=]*)( = )", re.MULTILINE)
_GRAPH = "graph"  # the type of a constant that is one


def render(program: Program) -> str:
    """The whole program as text; `parse` reads it back."""
    graphs = nested_graphs(program)
    functions = [_function(name, module, program) for name, module in graphs.items()]
    inputs = {node: item for item, node in program.named_inputs()}
    lines = [_line(node, inputs, graphs) for node in program.graph.nodes if node.op != "output"]
    results = ", ".join(f"{out.kind}({_quote(out.name)}, {_value(value)})" for out, value in program.named_results())
    return "\n".join([*functions, *lines, f"return {results}".rstrip()])


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


def render_type(value: Any) -> str:
    """The dtype and shape of a value.

    >>> render_type(torch.empty(2, 3))
    'f32[2, 3]'
    """
    if isinstance(value, torch.Tensor):
        dtype = _DTYPE_NAMES.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{dtype}[{', '.join(str(size) for size in value.shape)}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(render_type(item) for item in value)}{',' if len(value) == 1 else ''})"
    for name, kinds in (
        ("bool", (bool, torch.SymBool)),
        ("int", (int, torch.SymInt)),
        ("float", (float, torch.SymFloat)),
    ):
        if isinstance(value, kinds):
            return name
    return "None" if value is None else type(value).__name__


def parse(text: str, *, groups: Mapping[str, int] | None = None, constants: Mapping[str, Any] | None = None) -> Program:
    """Build a program from its text. Shapes of inputs are read; all others are computed, and checked if written.

    The text has neither the sizes of groups nor the values of constants; without a value, a constant has only a type.

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
    return _Parser(text, groups or {}, constants or {}).program()


def resolve_operator(name: str) -> Any:
    """The operator that a name in the text stands for.

    >>> resolve_operator("aten.mm")
    <OpOverload(op='aten.mm', overload='default')>
    """
    namespace, *path = name.split(".")
    if namespace in _MODULES and len(path) == 1 and hasattr(_MODULES[namespace], path[0]):
        return getattr(_MODULES[namespace], path[0])
    packet = getattr(getattr(torch.ops, _NAMESPACES.get(namespace, namespace)), path[0], None) if path else None
    if isinstance(packet, torch._ops.HigherOrderOperator) and len(path) == 1:
        return packet
    overload = path[1] if len(path) > 1 else "default"
    overloads = packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else []
    if overload not in overloads:
        known = f"; {name} has {', '.join(overloads)}" if overloads else ""
        raise TextError(
            f"the operator {name}", expected=f"one like aten.mm or aten.add.Tensor{known}", remedy="correct it"
        )
    return getattr(packet, overload)


def _line(node: fx.Node, inputs: Mapping[fx.Node, Input], graphs: Container[str]) -> str:
    is_graph = node.op == "get_attr" and node.target in graphs
    left = f"{node.name}: {_GRAPH if is_graph else render_type(node.meta.get('val'))} = "
    if node.op == "placeholder":
        item = inputs[node]
        return f"{left}{item.kind}({_quote(item.name)})"
    return left + _call(node)


def _call(node: fx.Node) -> str:
    if node.op in ("placeholder", "output"):
        return (
            f"placeholder({_quote(str(node.target))})" if node.op == "placeholder" else f"return {_value(node.args[0])}"
        )
    if node.op == "get_attr":
        return f"constant({_quote(str(node.target))})"
    if node.target is operator.getitem:
        return f"{_value(node.args[0])}[{_value(node.args[1])}]"
    arguments = [_value(argument) for argument in node.args]
    arguments += [f"{name}={_value(value)}" for name, value in node.kwargs.items()]
    return f"{_target(node.target)}({', '.join(arguments)})"


def _target(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        namespace, name = target._schema.name.split("::")
        overload = "" if target._overloadname == "default" else f".{target._overloadname}"
        return f"{_SHORT_NAMESPACES.get(namespace, namespace)}.{name}{overload}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target}"
    module = getattr(target, "__module__", "").removeprefix("_")
    return f"{module}.{target.__name__}"


def _value(value: Any) -> str:
    match value:
        case fx.Node():
            return value.name
        case str():
            return _quote(value)
        case list():
            return f"[{', '.join(_value(item) for item in value)}]"
        case tuple():
            return f"({', '.join(_value(item) for item in value)}{',' if len(value) == 1 else ''})"
        case dict():
            return f"{{{', '.join(f'{_value(key)}: {_value(item)}' for key, item in value.items())}}}"
        case torch.dtype():
            return _DTYPE_NAMES.get(value, str(value))
        case torch.device():
            return f"device({_quote(str(value))})"
        case float() if not math.isfinite(value):
            return f"float({_quote(str(value))})"
        case torch._ops.OpOverload():
            return _target(value)
        case slice():
            return f"slice({_value(value.start)}, {_value(value.stop)}, {_value(value.step)})"
    if isinstance(value, (torch.memory_format, torch.layout)):
        return _CONSTANT_NAMES.get(value, str(value))
    return repr(value)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _dtype(name: str) -> torch.dtype | None:
    """A dtype by its short name, or by torch's where it has no short one."""
    found = DTYPES.get(name) or getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


def _scalars_as_python(annotation: re.Match[str]) -> str:
    """`f32[]` is no Python: read it as `f32[()]`."""
    return annotation[1] + annotation[2].replace("[]", "[()]") + annotation[3]


class _Parser:
    """One pass over the lines; each becomes a node whose metadata is computed on fake tensors."""

    def __init__(self, text: str, groups: Mapping[str, int], constants: Mapping[str, Any]) -> None:
        self.text, self.groups, self.constants = textwrap.dedent(text).strip(), groups, dict(constants)
        self.graph, self.mode = fx.Graph(), FakeTensorMode(shape_env=symbolic_shapes())
        self.nodes: dict[str, fx.Node] = {}
        self.inputs: list[Input] = []

    def program(self) -> Program:
        try:
            statements = ast.parse(_ANNOTATION.sub(_scalars_as_python, self.text)).body
        except SyntaxError as error:
            line = self.text.splitlines()[(error.lineno or 1) - 1 :][:1]
            raise TextError(f"line {error.lineno}: {''.join(line)}", remedy="write one assignment per line") from error
        if not statements:
            raise TextError("no lines", expected="a program", remedy='end with a line like `return output("y", y)`')
        return self.build(statements)

    def build(self, statements: list[ast.stmt]) -> Program:
        for statement in statements[:-1]:
            if isinstance(statement, ast.FunctionDef):
                self.constants[statement.name] = self.function(statement)
            else:
                self.assignment(statement)
        return self.returned(statements[-1])

    def function(self, definition: ast.FunctionDef) -> fx.GraphModule:
        """A nested graph: its metadata belongs to the same mode, so that its caller can run it."""
        inside = _Parser("", self.groups, {})
        inside.mode = self.mode
        *lines, last = definition.body
        single = last.value if isinstance(last, ast.Return) and isinstance(last.value, ast.Name) else None
        if single is not None:
            last = ast.copy_location(ast.parse(f'return output("0", {single.id})').body[0], last)
        program = inside.build([*lines, last])
        if single is not None:
            program.output_node.args = (program.results[0],)
        return program.module()

    def assignment(self, line: ast.stmt) -> None:
        match line:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=kind, value=ast.expr() as value):
                self.define(line, name, value, kind)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.define(line, name, value, None)
            case _:
                raise self.error(line, "an assignment")

    def define(self, line: ast.stmt, name: str, value: ast.expr, kind: ast.expr | None) -> None:
        match value:
            case ast.Call(func=ast.Name(id=role), args=[ast.Constant(value=str(label))]) if role in set(InputKind):
                if kind is None:
                    raise self.error(line, 'a type, as in `x: f32[4] = input("x")`')
                node = self.graph.placeholder(name)
                node.meta["val"] = self.type_of(line, kind)
                self.inputs.append(Input(InputKind(role), label))
            case ast.Call(func=ast.Name(id="constant"), args=[ast.Constant(value=str(label))]):
                if kind is None:
                    raise self.error(line, 'a type, as in `k: f32[4] = constant("k")`')
                node = self.constant(line, name, label, kind)
            case ast.Subscript(value=ast.Name(id=source), slice=index) if source in self.nodes:
                arguments = (self.nodes[source], self.value(line, index))
                node = self.compute(line, name, operator.getitem, arguments, {})
            case ast.Call(func=func, args=args, keywords=keywords):
                node = self.call(line, name, self.target(line, func), args, keywords)
            case _:
                raise self.error(line, "an input, a call or an element")
        if name in DTYPES or name in _MEMORY_FORMATS:
            raise self.error(line, f"a name other than {name}, which is a value")
        found = render_type(node.meta["val"]) if "val" in node.meta else _GRAPH
        if kind is not None and found != ast.unparse(kind).replace("[()]", "[]"):
            raise self.error(line, f"the type {found}")
        if node.name != name:
            raise self.error(line, f"a name that is not used twice or reserved ({node.name} would be free)")
        self.nodes[name] = node

    def constant(self, line: ast.stmt, name: str, label: str, kind: ast.expr) -> fx.Node:
        is_graph = isinstance(kind, ast.Name) and kind.id == _GRAPH
        if is_graph and not isinstance(self.constants.get(label), fx.GraphModule):
            raise self.error(line, f"a function above it, `def {label}():`")
        node = self.graph.create_node("get_attr", label, name=name)
        if not is_graph:
            node.meta["val"] = self.type_of(line, kind)
        return node

    def call(
        self, line: ast.stmt, name: str, target: Any, args: list[ast.expr], keywords: list[ast.keyword]
    ) -> fx.Node:
        arguments = tuple(self.value(line, item) for item in args)
        named = {item.arg: self.value(line, item.value) for item in keywords if item.arg}
        return self.compute(line, name, target, arguments, named)

    def compute(self, line: ast.stmt, name: str, target: Any, arguments: tuple, named: dict[str, Any]) -> fx.Node:
        node = self.graph.create_node("call_function", target, arguments, named, name)
        fakes = fx.map_arg((arguments, named), lambda n: described(n, self.constants))
        try:
            with self.mode:
                node.meta["val"] = target(*fakes[0], **fakes[1])
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise self.error(line, f"arguments that fit, but {type(error).__name__}: {reason}") from error
        return node

    def target(self, line: ast.stmt, func: ast.expr) -> Any:
        try:
            return resolve_operator(ast.unparse(func))
        except TextError as error:
            raise self.error(line, error.expected) from error

    def returned(self, line: ast.stmt) -> Program:
        if not isinstance(line, ast.Return):
            raise self.error(line, 'a last line like `return output("y", y)`')
        items = line.value.elts if isinstance(line.value, ast.Tuple) else [line.value] if line.value else []
        outputs, values = [], []
        for item in items:
            match item:
                case ast.Call(func=ast.Name(id=role), args=[ast.Constant(value=str(label)), value]) if role in set(
                    OutputKind
                ):
                    outputs.append(Output(OutputKind(role), label))
                    values.append(self.value(line, value))
                case _:
                    raise self.error(line, 'results like `output("y", y)` or `gradient("w", g)`')
        self.graph.output(tuple(values))
        signature = tuple(self.inputs), tuple(outputs)
        return Program(self.graph, *signature, groups=dict(self.groups), constants=dict(self.constants))

    def type_of(self, line: ast.stmt, kind: ast.expr) -> Any:
        match kind:
            case ast.Name(id=name) if name in _TYPES:
                return _TYPES[name]
            case ast.Subscript(value=ast.Name(id=name), slice=sizes) if dtype := _dtype(name):
                items = sizes.elts if isinstance(sizes, ast.Tuple) else [sizes]
                with self.mode:
                    return torch.empty([self.value(line, item) for item in items], dtype=dtype)
        raise self.error(line, f"a type like f32[2, 3], one of {', '.join(DTYPES)}")

    def value(self, line: ast.stmt, item: ast.expr) -> Any:
        match item:
            case ast.Name(id=name) if name in self.nodes:
                return self.nodes[name]
            case ast.Name(id=name) if name in DTYPES or name in _MEMORY_FORMATS:
                return DTYPES.get(name) or _MEMORY_FORMATS[name]
            case ast.Attribute(value=ast.Name(id="torch"), attr=name) if dtype := _dtype(name):
                return dtype
            case ast.Attribute():
                return self.target(line, item)
            case ast.List(elts=items):
                return [self.value(line, one) for one in items]
            case ast.Tuple(elts=items):
                return tuple(self.value(line, one) for one in items)
            case ast.Dict(keys=keys, values=items):
                pairs = zip(keys, items, strict=True)
                return {ast.literal_eval(key): self.value(line, item) for key, item in pairs if key is not None}
            case ast.Call(func=ast.Name(id="device"), args=[ast.Constant(value=str(name))]):
                return torch.device(name)
            case ast.Call(func=ast.Name(id="float" | "slice" as name), args=items):
                return getattr(builtins, name)(*(self.value(line, one) for one in items))
        try:
            return ast.literal_eval(item)
        except ValueError as error:
            raise self.error(line, f"a value or a name defined above for {ast.unparse(item)!r}") from error

    def error(self, line: ast.stmt, expected: str) -> TextError:
        return TextError(f"line {line.lineno}: {ast.unparse(line)}", expected=expected, remedy="correct that line")
