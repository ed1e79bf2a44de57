"""Programs as Python functions: one line a node, operators bound ahead, every value freed after its last use.

Small operators cost more to call than to compute. Calling torch's own bindings (`torch.mm`) takes about half the time
of calling the same operator through `torch.ops`, so the common ones are bound to those. Views of memory that lasts from
run to run are made once.
"""

from __future__ import annotations

import itertools
import linecache
import math
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from crossfade.graph.lasting import lasting_views
from crossfade.graph.private import OpOverload, schema_of, unwrapped_operator
from crossfade.graph.program import Program

# fmt: off
_NATIVE = frozenset({
    "_foreach_add_", "_foreach_addcdiv_", "_foreach_addcmul_", "_foreach_copy_", "_foreach_div_", "_foreach_lerp_",
    "_foreach_mul_", "_foreach_sqrt", "_foreach_sub_",
    "add", "add_", "addcdiv", "addcdiv_", "addcmul", "addcmul_", "addmm", "bmm", "cat", "clone", "copy_", "detach",
    "div", "div_", "embedding", "exp", "expand", "lerp", "lerp_", "mean", "mm", "mul", "mul_", "native_layer_norm",
    "neg", "permute", "pow", "relu", "relu_", "rsqrt", "select", "sigmoid", "split_with_sizes", "sqrt", "sqrt_",
    "stack", "sub", "sub_", "sum", "t", "tanh", "transpose", "unbind", "unsqueeze", "view",
})
# fmt: on
"""ATen operators whose Python binding takes exactly the operator's arguments; the tests compare each."""

_numbers = itertools.count()


@dataclass(frozen=True)
class Compiled:
    """A program's function over its inputs, the node of each of its lines, and the views that it keeps."""

    function: Callable[[list[Any]], tuple[Any, ...]]
    source: str
    filename: str
    node_at: Mapping[int, fx.Node]
    views: Views


def compile_program(program: Program) -> Compiled:
    """Write the program as Python and compile it. The list of inputs is emptied, so that no input outlives its use.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[2] = input("x")
    ... a: f32[2] = aten.neg(x)
    ... b: f32[2] = aten.add.Tensor(a, x, alpha=2)
    ... return output("b", b)
    ... ''')
    >>> compiled = compile_program(program)
    >>> print(compiled.source)
    def run(inputs):
        [x] = inputs; inputs.clear()
        a = neg(x)
        b = add(a, x, alpha=2); del a, x
        return (b,)
    >>> compiled.function([torch.ones(2)])
    (tensor([1., 1.]),)

    What only looks at lasting memory is a function of its own, called when that memory is elsewhere than before:

    >>> program = parse('''
    ... x: f32[4, 2] = input("x")
    ... w: f32[3, 2] = parameter("w")
    ... t: f32[2, 3] = aten.permute(w, [1, 0])
    ... y: f32[4, 3] = aten.mm(x, t)
    ... return output("y", y)
    ... ''')
    >>> print(compile_program(program).source)
    def look(w):
        t = permute(w, [1, 0])
        return (t,)
    def run(inputs):
        [x, w] = inputs; inputs.clear()
        [t] = views(w)
        y = mm(x, t); del x, t
        return (y,)
    """
    return compile_written(Writer(program))


def compile_written(writer: Writer) -> Compiled:
    """Compile what a writer makes of its program; tracebacks show its lines."""
    source = writer.source()
    filename = f"<crossfade program {next(_numbers)}>"
    exec(compile(source, filename, "exec"), writer.names)
    writer.views.make = writer.names.get("look")
    linecache.cache[filename] = len(source), None, source.splitlines(keepends=True), filename
    weakref.finalize(writer.names["run"], linecache.cache.pop, filename, None).atexit = False
    return Compiled(writer.names["run"], source, filename, writer.node_at, writer.views)


def native(target: Any) -> Callable[..., Any]:
    """What to call for an operator: torch's own binding where that is known to be the same, else the operator."""
    if not isinstance(target, OpOverload):
        return target
    name = schema_of(target).name.removeprefix("aten::")
    if name not in _NATIVE:
        return unwrapped_operator(target)
    return getattr(torch, name, None) or getattr(torch.Tensor, name)


class Views:
    """The views of lasting memory that `make` gives for it, kept; made again when that memory is elsewhere than before.

    What was looked at cannot be elsewhere unnoticed: the views keep it, so that nothing else comes to lie there.
    """

    def __init__(self) -> None:
        self.make: Callable[..., tuple[Any, ...]] | None = None
        self._views: tuple[Any, ...] = ()
        self._where: list[Any] | None = None

    def __call__(self, *owners: torch.Tensor) -> tuple[Any, ...]:
        """The views of these tensors."""
        where = [(owner.data_ptr(), owner.shape, owner.stride()) for owner in owners]
        if where != self._where:
            assert self.make is not None
            self._views, self._where = self.make(*owners), where
        return self._views


class Writer:
    """Writes a program as Python, one line a node; `names` are the objects its text refers to.

    `views` keeps the views of lasting memory, if there are such; the function that makes them is named `look`.
    """

    def __init__(self, program: Program, views: Views | None = None) -> None:
        self.program = program
        self.views = views or Views()
        self.names: dict[str, Any] = {}
        self.node_at: dict[int, fx.Node] = {}
        self._bound: dict[Any, str] = {}
        self._taken = {"look", "run"} | {node.name for node in program.graph.nodes}

    def source(self) -> str:
        """The whole function; also notes in `node_at` which line is which node's."""
        views = lasting_views(self.program)
        last_use = self._last_uses(views)
        arguments = ", ".join(node.name for node in self.program.placeholders)
        lines, looked_at = self._look(views) if views else ([], [])
        lines += ["def run(inputs):", f"    [{arguments}] = inputs; inputs.clear()", *looked_at]
        for node in self.program.graph.nodes:
            if node.op in ("call_function", "get_attr") and node not in views:
                lines.append("    " + "; ".join(self.statements(node, last_use.get(node, []))))
                self.node_at[len(lines)] = node
        results = "".join(f"{self._value(value)}," for value in self.program.results)
        return "\n".join([*lines, f"    return ({results})"])

    def statements(self, node: fx.Node, freed: list[str]) -> list[str]:
        """What a node's line does, in order: call it, then let go of the values that nobody needs any more."""
        return [f"{node.name} = {self._call(node)}", *([f"del {', '.join(freed)}"] if freed else [])]

    def _look(self, views: Collection[fx.Node]) -> tuple[list[str], list[str]]:
        """The function that makes views of lasting memory, and the line of `run` that calls it when need be."""
        used = [view.name for view in views if any(user not in views for user in view.users)]
        owners = dict.fromkeys(source.name for view in views for source in view.all_input_nodes if source not in views)
        made = [f"    {view.name} = {self._call(view)}" for view in views]
        look = [f"def look({', '.join(owners)}):", *made, f"    return ({''.join(f'{name},' for name in used)})"]
        return look, [f"    [{', '.join(used)}] = {self.bind(self.views, 'views')}({', '.join(owners)})"]

    def _last_uses(self, views: Collection[fx.Node]) -> dict[fx.Node, list[str]]:
        """For each node, the values that are not needed after it; lasting memory that is only looked at stays."""
        freed: dict[fx.Node, list[str]] = {}
        seen: set[fx.Node] = set()
        for node in reversed(list(self.program.graph.nodes)):
            if node.op == "placeholder" or node in views:
                continue
            if node.op != "output" and node not in seen:
                freed.setdefault(node, []).append(node.name)
            for source in node.all_input_nodes:
                if source not in seen:
                    seen.add(source)
                    if node.op != "output":
                        freed.setdefault(node, []).append(source.name)
        return freed

    def _call(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            return self.bind(self.program.constants[str(node.target)], "constant")
        arguments = [self._value(argument) for argument in node.args]
        arguments += [f"{name}={self._value(value)}" for name, value in node.kwargs.items()]
        function = native(node.target)
        return f"{self.bind(function, getattr(function, '__name__', 'call'))}({', '.join(arguments)})"

    def _value(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return value.name
        if isinstance(value, (list, tuple)):
            inside = ", ".join(self._value(item) for item in value)
            return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if len(value) == 1 else ''})"
        plain = (
            value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))
        )
        return repr(value) if plain else self.bind(value, "constant")

    def bind(self, value: Any, hint: str) -> str:
        """A global name for an object, as readable as it can be."""
        key = id(value)
        if key not in self._bound:
            name = self._free_name(hint if hint.isidentifier() else "call")
            self._bound[key] = name
            self.names[name] = value
        return self._bound[key]

    def _free_name(self, hint: str) -> str:
        candidates = itertools.chain([hint], (f"{hint}_{number}" for number in itertools.count(1)))
        return next(name for name in candidates if name not in self.names and name not in self._taken)
