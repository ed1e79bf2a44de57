"""How a program's text becomes a program; `text.parse` is the door.

Nothing is evaluated but literals: names are looked up among the lines above and in closed lists. Whatever Python or
torch raises about a line becomes an error that names it.
"""

from __future__ import annotations

import ast
import operator
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import fx

from crossfade.errors import CrossfadeError, TextError
from crossfade.graph.allowed import operator_named, overloads_named
from crossfade.graph.bounded import why_too_large
from crossfade.graph.private import FakeTensorMode, symbolic_shapes
from crossfade.graph.program import Input, InputKind, Output, OutputKind, Program, described, identifier
from crossfade.graph.sizes import Sizes
from crossfade.graph.words import ALL_DTYPES, DTYPES, LAYOUTS, RESERVED, render_type

GRAPH = "graph"
"""The type of a constant that is one."""

_TYPES: dict[str, Any] = {"float": 1.0, "int": 1, "bool": True}
_ANNOTATION = re.compile(r"^(\s*\w+: )([^\"'=]*)( = )", re.MULTILINE)
_MAKERS: dict[str, Callable[..., Any]] = {
    "device": torch.device,
    "float": float,
    "complex": complex,
    "slice": slice,
}
_MOST_SHOWN = 300
Answer = TypeVar("Answer")


def resolve_operator(name: str) -> Any:
    """The operator that a name in the text stands for.

    >>> resolve_operator("aten.mm")
    <OpOverload(op='aten.mm', overload='default')>
    """
    found = operator_named(name)
    if found is None:
        overloads = overloads_named(name)
        known = f"; {name} has {', '.join(overloads)}" if overloads else ""
        raise TextError(
            f"the operator {name}", expected=f"one like aten.mm or aten.add.Tensor{known}", remedy="correct it"
        )
    return found


def _scalars_as_python(annotation: re.Match[str]) -> str:
    """`f32[]` is no Python: read it as `f32[()]`."""
    return annotation[1] + annotation[2].replace("[]", "[()]") + annotation[3]


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _normal(kind: str) -> str:
    """A type as `ast` spells it, whatever its blanks and brackets."""
    return ast.unparse(ast.parse(kind.replace("[]", "[()]"), mode="eval").body)


class Parser:
    """One pass over the lines; each becomes a node whose metadata is computed on fake tensors."""

    def __init__(
        self, text: str, groups: Mapping[str, int], constants: Mapping[str, Any], *, as_written: bool = False
    ) -> None:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        self.text, self.groups, self.constants = textwrap.dedent(text).strip(), groups, dict(constants)
        self.graph, self.mode = fx.Graph(), FakeTensorMode(shape_env=symbolic_shapes())
        self.sizes = Sizes(self.mode.shape_env)
        self.functions: dict[str, fx.GraphModule] = {}
        self.nodes: dict[str, fx.Node] = {}
        self.inputs: list[Input] = []
        self.as_written = as_written

    def program(self) -> Program:
        try:
            statements = ast.parse(_ANNOTATION.sub(_scalars_as_python, self.text)).body
        except SyntaxError as error:
            line = self.source_line(error.lineno or 1)
            raise TextError(f"line {error.lineno}: {line}", remedy="write one assignment per line") from error
        except (ValueError, RecursionError, MemoryError) as error:
            raise TextError(
                f"text that Python does not read ({type(error).__name__}: {error})",
                expected="lines without null bytes, and not nested deeply",
                remedy="write one assignment per line",
            ) from error
        if not statements:
            raise TextError("no lines", expected="a program", remedy='end with a line like `return output("y", y)`')
        return self.build(statements)

    def source_line(self, number: int) -> str:
        return _shortened("".join(self.text.split("\n")[number - 1 :][:1]))

    def build(self, statements: list[ast.stmt]) -> Program:
        for statement in statements[:-1]:
            self.guarded(self.statement, statement)
        return self.guarded(self.returned, statements[-1])

    def guarded(self, read: Callable[[Any], Answer], line: ast.stmt) -> Answer:
        """Read a line; what Python or torch raises about it becomes an error that names it."""
        try:
            return read(line)
        except CrossfadeError:
            raise
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise self.error(line, f"values that fit, but {type(error).__name__}: {_shortened(reason)}") from error

    def statement(self, line: ast.stmt) -> None:
        match line:
            case ast.FunctionDef():
                self.function(line)
            case ast.AnnAssign(target=ast.Name(id=name), annotation=kind, value=ast.expr() as value):
                self.define(line, name, value, kind)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.define(line, name, value, None)
            case _:
                raise self.error(line, "an assignment")

    def function(self, definition: ast.FunctionDef) -> None:
        """A nested graph: its metadata belongs to the same mode, so that its caller can run it."""
        if definition.name in self.functions or definition.decorator_list or ast.unparse(definition.args):
            raise self.error(definition, "one function of this name, without arguments: its inputs are lines in it")
        inside = Parser("", self.groups, {}, as_written=self.as_written)
        inside.mode, inside.sizes, inside.text = self.mode, self.sizes, self.text
        *lines, last = definition.body
        single = last.value if isinstance(last, ast.Return) and isinstance(last.value, ast.Name) else None
        if single is not None:
            last = ast.copy_location(ast.parse(f'return output("0", {single.id})').body[0], last)
        program = inside.build([*lines, last])
        if single is not None:
            program.output_node.args = (program.results[0],)
        self.functions[definition.name] = program.module()

    def define(self, line: ast.stmt, name: str, value: ast.expr, kind: ast.expr | None) -> None:
        if name in RESERVED:
            raise self.error(line, f"a name other than {name}, which is a value")
        node = self.defined(line, name, value, kind)
        if self.as_written and kind is not None and node.op == "call_function":
            node.meta["val"] = self.type_of(line, kind)
        found = render_type(node.meta["val"]) if "val" in node.meta else GRAPH
        if not self.as_written and kind is not None and _normal(found) != ast.unparse(kind):
            raise self.error(line, f"the type {found}")
        if node.name != name:
            raise self.error(line, f"a name that is not used twice or reserved ({node.name} would be free)")
        self.nodes[name] = node

    def defined(self, line: ast.stmt, name: str, value: ast.expr, kind: ast.expr | None) -> fx.Node:
        match value:
            case ast.Call(func=ast.Name(id=role), args=[ast.Constant(value=str(label))], keywords=[]) if role in set(
                InputKind
            ):
                if kind is None:
                    raise self.error(line, 'a type, as in `x: f32[4] = input("x")`')
                return self.input(line, name, Input(InputKind(role), label), kind)
            case ast.Call(func=ast.Name(id="constant"), args=[ast.Constant(value=str(label))], keywords=[]):
                if kind is None:
                    raise self.error(line, 'a type, as in `k: f32[4] = constant("k")`')
                return self.constant(line, name, label, kind)
            case ast.Subscript(value=ast.Name(id=source), slice=index) if source in self.nodes:
                arguments = (self.nodes[source], self.value(line, index))
                return self.compute(line, name, operator.getitem, arguments, {})
            case ast.Call(func=func, args=args, keywords=keywords):
                return self.call(line, name, self.target(line, func), args, keywords)
        raise self.error(line, "an input, a call or an element")

    def input(self, line: ast.stmt, name: str, item: Input, kind: ast.expr) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = self.type_of(line, kind)
        self.inputs.append(item)
        return node

    def constant(self, line: ast.stmt, name: str, label: str, kind: ast.expr) -> fx.Node:
        node = self.graph.create_node("get_attr", label, name=name)
        if not (isinstance(kind, ast.Name) and kind.id == GRAPH):
            node.meta["val"] = self.type_of(line, kind)
            return node
        if identifier(label) in self.functions:
            self.constants[label] = self.functions[identifier(label)]
        if not isinstance(self.constants.get(label), fx.GraphModule):
            raise self.error(line, f"a function above it, `def {identifier(label)}():`")
        return node

    def call(
        self, line: ast.stmt, name: str, target: Any, args: list[ast.expr], keywords: list[ast.keyword]
    ) -> fx.Node:
        names = [item.arg for item in keywords]
        if None in names or len(set(names)) < len(names):
            raise self.error(line, "every argument once, by its name")
        arguments = tuple(self.value(line, item) for item in args)
        named = {str(item.arg): self.value(line, item.value) for item in keywords}
        return self.compute(line, name, target, arguments, named)

    def compute(self, line: ast.stmt, name: str, target: Any, arguments: tuple, named: dict[str, Any]) -> fx.Node:
        if self.as_written:
            return self.graph.create_node("call_function", target, arguments, named, name)
        fakes = fx.map_arg((arguments, named), lambda n: described(n, self.constants))
        if too_large := why_too_large(target, *fakes):
            raise self.error(line, too_large)
        node = self.graph.create_node("call_function", target, arguments, named, name)
        try:
            with self.mode:
                node.meta["val"] = target(*fakes[0], **fakes[1])
        except Exception as error:
            reason = _shortened(str(error).partition("\n")[0])
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
                case ast.Call(func=ast.Name(id=role), args=[ast.Constant(value=str(label)), value], keywords=[]) if (
                    role in set(OutputKind)
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
            case ast.Constant(value=None):
                return None
            case ast.Tuple(elts=parts) if self.as_written:
                return tuple(self.type_of(line, part) for part in parts)
            case ast.Subscript(value=ast.Name(id=name), slice=sizes) if name in ALL_DTYPES:
                items = sizes.elts if isinstance(sizes, ast.Tuple) else [sizes]
                with self.mode:
                    return torch.empty([self.sizes.read(item) for item in items], dtype=ALL_DTYPES[name])
        raise self.error(line, f"a type like f32[2, 3], one of {', '.join(DTYPES)}")

    def value(self, line: ast.stmt, item: ast.expr) -> Any:
        match item:
            case ast.Name(id=name) if name in self.nodes:
                return self.nodes[name]
            case ast.Name(id=name) if name in RESERVED:
                return DTYPES[name] if name in DTYPES else LAYOUTS[name]
            case ast.Attribute(value=ast.Name(id="torch"), attr=name) if name in ALL_DTYPES:
                return ALL_DTYPES[name]
            case ast.Attribute():
                return self.target(line, item)
            case ast.List(elts=items):
                return [self.value(line, part) for part in items]
            case ast.Tuple(elts=items):
                return tuple(self.value(line, part) for part in items)
            case ast.Dict(keys=keys, values=items) if None not in keys:
                pairs = zip(keys, items, strict=True)
                return {self.value(line, key): self.value(line, part) for key, part in pairs if key is not None}
            case ast.Call(func=ast.Name(id=name), args=items, keywords=[]) if name in _MAKERS:
                return _MAKERS[name](*(self.value(line, part) for part in items))
        try:
            return ast.literal_eval(item)
        except ValueError as error:
            raise self.error(line, f"a value or a name defined above for {ast.unparse(item)!r}") from error

    def error(self, line: ast.stmt, expected: str) -> TextError:
        try:
            said = _shortened(ast.unparse(line))
        except RecursionError:
            said = self.source_line(line.lineno)
        return TextError(f"line {line.lineno}: {said}", expected=expected, remedy="correct that line")
