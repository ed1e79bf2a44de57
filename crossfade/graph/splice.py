"""Python functions spliced into a graph, with metadata and provenance.

A spliced function is ordinary torch code, run once on tensors without data; each ATen call becomes a node. Functions
that only lay out, copy, scale and communicate are run on bare meta tensors, five times faster than on fake ones.
Sizes that are symbolic stay so: they become nodes that read them off the function's inputs.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from crossfade.errors import RewriteError
from crossfade.graph.operators import remembered
from crossfade.graph.private import (
    FakeTensorMode,
    TorchDispatchMode,
    bare_tensor,
    fake_tensor,
    forget_guards,
    guards_of,
    has_schema,
    is_erased,
    schema_of,
    size_expression,
    tree_map_only,
)
from crossfade.graph.program import Program

Found = TypeVar("Found")

# fmt: off
_PLAIN = frozenset({
    "add", "alias", "amax", "amin", "all_gather_into_tensor", "all_gather_into_tensor_coalesced", "all_reduce",
    "all_reduce_coalesced", "all_to_all_single", "broadcast", "cat", "clone", "detach", "div", "expand", "mean", "mul",
    "neg",
    "pack", "permute", "prod", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "select", "slice",
    "split", "split_with_sizes", "squeeze", "sub", "sum", "t", "transpose", "unpack", "unsqueeze", "view",
    "wait_tensor", "_unsafe_view",
})
# fmt: on
"""Ops whose results are described by bare meta tensors as well as by fake ones: on the inputs' device, same strides."""


class NeedsGuard(Exception):
    """A spliced function that holds for some values of the program's symbols only."""


def splice(
    program: Program,
    function: Callable[..., Any],
    *inputs: Any,
    before: fx.Node,
    like: fx.Node,
    may_guard: bool = True,
) -> Any:
    """Record `function` on the given nodes and insert what it does before a node; return its results as nodes.

    The function is ordinary torch code. It runs once on tensors without data; every ATen call becomes a node with
    metadata, and takes its source line from the node `like`, which it stands for. Arguments that are not nodes pass
    through. Unless it `may_guard`, a function that asks which way a symbolic size goes raises `NeedsGuard`.

        >>> from crossfade.graph.text import parse
        >>> program = parse('''
        ... x: f32[4, 2] = input("x")
        ... y: f32[4, 2] = aten.relu(x)
        ... return output("y", y)
        ... ''')
        >>> x, y, out = program.graph.nodes
        >>> z = splice(program, lambda t: torch.sigmoid(t).sum(0), x, before=out, like=y)
        >>> program.set_results([z])
        >>> print(program)
        x: f32[4, 2] = input("x")
        y: f32[4, 2] = aten.relu(x)
        sigmoid: f32[4, 2] = aten.sigmoid(x)
        sum_1: f32[2] = aten.sum.dim_IntList(sigmoid, [0])
        return output("y", sum_1)
    """
    found = list(_all_of(fx.Node, inputs))
    if has_schema(function) and _is_one_plain_call(function, inputs, found):
        made = _plain_call(program, function, inputs, before, like)
        if made is not None:
            return made
    recorder: _Recorder
    with torch.no_grad(), _without_autocast():
        try:
            recorder = _BareRecorder(found) if _is_static(found) else _FakeRecorder(program.fake_mode, may_guard)
            result = recorder.run(function, inputs)
        except _NotPlain:
            recorder = _FakeRecorder(program.fake_mode, may_guard)
            result = recorder.run(function, inputs)
    with program.graph.inserting_before(before):
        return recorder.emit(program.graph, like, found, result)


def _is_one_plain_call(target: Any, inputs: tuple[Any, ...], found: list[fx.Node]) -> bool:
    """Whether a function is an operator that reads one tensor of known sizes, and numbers: nothing need be recorded."""
    if len(found) != 1 or inputs[0] is not found[0] or not (_is_plain(target) and _is_static(found)):
        return False
    numbers = (number for given in inputs[1:] for number in (given if isinstance(given, (list, tuple)) else (given,)))
    return all(type(number) is int for number in numbers)


def _plain_call(
    program: Program, target: Any, inputs: tuple[Any, ...], before: fx.Node, like: fx.Node
) -> fx.Node | None:
    """One call, described without a recorder; None if it makes several tensors."""
    described = inputs[0].meta["val"]
    with torch.no_grad():
        value = target(bare_tensor(described), *inputs[1:])
    if not isinstance(value, Tensor):
        return None
    with program.graph.inserting_before(before):
        node = program.graph.create_node("call_function", target, inputs, {}, _node_name(target))
    _describe(node, fake_tensor(described.fake_mode, value, described.device), like)
    return node


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    """What is recorded is meant as it is written, wherever the user may call from."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def insert_call(program: Program, target: Any, *args: Any, before: fx.Node, like: fx.Node, **kwargs: Any) -> fx.Node:
    """Insert one call, for arguments that a recorded function cannot carry: scalars that are graph inputs."""
    with program.graph.inserting_before(before):
        node = program.graph.create_node("call_function", target, args, kwargs, _node_name(target))
    values, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    with torch.no_grad(), _without_autocast(), program.fake_mode:
        _describe(node, target(*values, **named), like)
    return node


def as_nodes(program: Program, arguments: Any, *, given: Sequence[fx.Node], before: fx.Node, like: fx.Node) -> Any:
    """Arguments with nodes in place of symbolic sizes, which are read off `given` values or computed from such."""
    with program.graph.inserting_before(before):
        sizes = _Sizes(program.graph, like, list(given))
        return tree_map_only(torch.SymInt, sizes.node_of, arguments)


def after(program: Program, node: fx.Node) -> fx.Node:
    """The node before which to insert what is to come right after `node`: below all inputs, if it is one."""
    return program.placeholders[-1].next if node.op == "placeholder" else node.next


def inline(program: Program, body: fx.Graph, arguments: Mapping[fx.Node, fx.Node], *, before: fx.Node) -> list[Any]:
    """Copy the nodes of `body`, its placeholders replaced by `arguments`, before a node; return its results."""
    mapping = dict(arguments)
    with program.graph.inserting_before(before):
        for node in body.nodes:
            if node.op in ("call_function", "get_attr"):
                mapping[node] = program.graph.node_copy(node, mapping.__getitem__)
                mapping[node].meta = dict(node.meta)
    results: Any = next(iter(body.find_nodes(op="output"))).args[0]
    return list(fx.map_arg(tuple(results), mapping.__getitem__))


class Replacements:
    """Values replaced one by one, the program's results all at once: each rewrite of many results is a walk over them.

    What is replaced stays in the graph until `finish`, and then goes with what only it kept alive.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.new: dict[fx.Node, fx.Node] = {}
        self._dropped: list[fx.Node] = []

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Give a value's users another one."""
        for user in list(old.users):
            if user.op != "output":
                user.replace_input_with(old, new)
        self.new[old] = new

    def drop(self, node: fx.Node) -> None:
        """Let a node go, whatever its effects, once what was replaced is gone."""
        self._dropped.append(node)

    def finish(self) -> None:
        """Rewrite the results, and erase what was replaced or dropped."""
        results = self.program.results
        if any(value in self.new for value in results if isinstance(value, fx.Node)):
            self.program.set_results([self.new.get(value, value) for value in results])
        going = [*self.new, *self._dropped]
        inputs = [source for old in going for source in old.all_input_nodes]
        for old in going:
            self.program.graph.erase_node(old)
        for source in inputs:
            erase_if_dead(source)


def erase_if_dead(node: fx.Node) -> int:
    """Erase a node without users or effects, and then its inputs likewise; return how many went."""
    erased, stack = 0, [node]
    while stack:
        unused = stack.pop()
        if is_erased(unused) or unused.users or unused.op in ("placeholder", "output") or unused.is_impure():
            continue
        inputs = unused.all_input_nodes
        unused.graph.erase_node(unused)
        erased += 1
        stack.extend(inputs)
    return erased


class _NotPlain(Exception):
    """An op that only fake tensors describe."""


class _Recorder(TorchDispatchMode):
    """Keeps the ATen calls of a function, then makes each a node. What the function runs on is the subclass's."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.nodes: dict[int, fx.Node] = {}
        self.known: dict[int, Tensor] = {}  # a freed tensor's id would be given to another one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # questions about a tensor, such as its device: nothing to compute later
            return func(*args, **kwargs)
        self.check(func, kwargs)
        for tensor in _all_of(Tensor, (args, kwargs)):
            if id(tensor) not in self.known:
                raise _foreign(tensor)
        result = func(*args, **kwargs)
        for tensor in _all_of(Tensor, result):
            self.known[id(tensor)] = tensor
        self.calls.append((func, args, kwargs, result))
        return result

    def emit(self, graph: fx.Graph, like: fx.Node, inputs: list[fx.Node], result: Any) -> Any:
        """Make the calls nodes, and return those of the function's result."""
        sizes = _Sizes(graph, like, inputs)
        for func, args, kwargs, value in self.calls:
            named = {name: self.as_nodes(item, sizes) for name, item in kwargs.items()}
            node = graph.create_node("call_function", func, self.as_nodes(args, sizes), named, _node_name(func))
            _describe(node, self.described(value), like)
            if isinstance(value, Tensor):
                self.nodes[id(value)] = node
            elif isinstance(value, (tuple, list)):
                for index, item in enumerate(value):
                    if isinstance(item, Tensor):
                        part = graph.create_node("call_function", operator.getitem, (node, index), {}, "getitem")
                        _describe(part, node.meta["val"][index], like)
                        self.nodes[id(item)] = part
        return tree_map_only(Tensor, self.node_of, result)

    def receive(self, tensor: Tensor, node: fx.Node) -> None:
        self.known[id(tensor)] = tensor
        self.nodes[id(tensor)] = node

    def node_of(self, tensor: Tensor) -> fx.Node:
        if id(tensor) not in self.nodes:
            raise _foreign(tensor)
        return self.nodes[id(tensor)]

    def as_nodes(self, value: Any, sizes: _Sizes) -> Any:
        if isinstance(value, Tensor):
            return self.node_of(value)
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return sizes.node_of(value)
        if isinstance(value, (tuple, list)):
            return type(value)([self.as_nodes(item, sizes) for item in value])
        return value

    def run(self, function: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
        raise NotImplementedError

    def check(self, func: Any, kwargs: Mapping[str, Any]) -> None:
        """Refuse what these tensors do not describe."""

    def described(self, result: Any) -> Any:
        """The fake tensors that describe a call's result."""
        return result


class _BareRecorder(_Recorder):
    """Runs plain functions on bare meta tensors, which share the memory that the inputs' fake tensors stand for."""

    def __init__(self, inputs: list[fx.Node]) -> None:
        super().__init__()
        self.values = [bare_tensor(node.meta["val"]) for node in inputs]
        self.mode, self.device = inputs[0].meta["val"].fake_mode, inputs[0].meta["val"].device
        for tensor, node in zip(self.values, inputs, strict=True):
            self.receive(tensor, node)

    def run(self, function: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
        values = iter(self.values)
        with self:
            return function(*tree_map_only(fx.Node, lambda _: next(values), inputs))

    def check(self, func: Any, kwargs: Mapping[str, Any]) -> None:
        if not _is_plain(func) or "device" in kwargs:
            raise _NotPlain

    def described(self, result: Any) -> Any:
        if isinstance(result, Tensor):
            return fake_tensor(self.mode, result, self.device)
        return [fake_tensor(self.mode, item, self.device) for item in result]


class _FakeRecorder(_Recorder):
    """Runs any function on fake tensors."""

    def __init__(self, mode: FakeTensorMode, may_guard: bool) -> None:
        super().__init__()
        self.mode, self.may_guard = mode, may_guard

    def run(self, function: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
        before = guards_of(self.mode)
        with self.mode:
            values = tree_map_only(fx.Node, self.enter, inputs)
            with self:
                result = function(*values)
        if not self.may_guard and guards_of(self.mode) != before:
            forget_guards(self.mode, before)
            raise NeedsGuard
        return result

    def enter(self, node: fx.Node) -> Any:
        value = node.meta["val"]
        if isinstance(value, Tensor):
            if self.nodes.get(id(value), node) is not node:  # copies of a node share its fake tensor: tell them apart
                value = value.detach()  # the same place in the same storage
            self.receive(value, node)
        return value


@remembered
def _is_plain(target: Any) -> bool:
    return _node_name(target) in _PLAIN


class _Sizes:
    """Nodes for symbolic sizes: read off the shapes of a function's inputs, or computed from such."""

    def __init__(self, graph: fx.Graph, like: fx.Node, inputs: list[fx.Node]) -> None:
        self.graph, self.like, self.inputs = graph, like, inputs
        self.made: dict[Any, fx.Node] = {}
        self.readable: dict[Any, tuple[Any, tuple[Any, ...]]] | None = None

    def node_of(self, size: Any) -> Any:
        """The node whose value is this size."""
        if self.readable is None:
            self.readable = self._read_off()
        found = self._build(size_expression(size))
        if found is None:
            raise RewriteError(
                f"the symbolic size {size} in a spliced function, which no shape of its inputs gives",
                remedy="pass the size, or a tensor that has it, in as an input of the function",
            )
        return found

    def _read_off(self) -> dict[Any, tuple[Any, tuple[Any, ...]]]:
        readable: dict[Any, tuple[Any, tuple[Any, ...]]] = {}
        for node in self.inputs:
            value = node.meta["val"]
            if isinstance(value, torch.SymInt):
                self.made.setdefault(size_expression(value), node)
            elif isinstance(value, Tensor):
                for dim, size in enumerate(value.shape):
                    readable.setdefault(size_expression(size), (torch.ops.aten.sym_size.int, (node, dim)))
                readable.setdefault(size_expression(value.numel()), (torch.ops.aten.sym_numel.default, (node,)))
        return readable

    def _build(self, expression: Any) -> Any:
        if expression.is_Integer:
            return int(expression)
        if expression not in self.made:
            assert self.readable is not None
            target, arguments = self.readable.get(expression) or self._computed(expression)
            if target is None or any(argument is None for argument in arguments):
                return None
            node = self.graph.create_node("call_function", target, arguments, {}, _node_name(target))
            _describe(node, target(*fx.map_arg(arguments, lambda n: n.meta["val"])), self.like)
            self.made[expression] = node
        return self.made[expression]

    def _computed(self, expression: Any) -> tuple[Any, tuple[Any, ...]]:
        for known in self.readable or ():
            times = known / expression
            if times.is_Integer and times > 1:
                return operator.floordiv, (self._build(known), int(times))
        kinds = {"Mul": operator.mul, "Add": operator.add, "FloorDiv": operator.floordiv, "Mod": operator.mod}
        target = kinds.get(type(expression).__name__)
        if target is None:
            return None, ()
        first, *rest = expression.args
        other = rest[0] if len(rest) == 1 else expression.func(*rest)
        return target, (self._build(first), self._build(other))


def _all_of(kind: type[Found], value: Any) -> Iterator[Found]:
    """Everything of a kind inside nested lists, tuples and dicts."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _all_of(kind, item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _all_of(kind, item)


def _foreign(tensor: Tensor) -> RewriteError:
    return RewriteError(
        f"a tensor of shape {tuple(tensor.shape)} that the spliced function did not make or receive",
        remedy="pass it in as an input of the function",
    )


def _is_static(nodes: list[fx.Node]) -> bool:
    """Whether all inputs are tensors of known sizes on one device."""
    values = [node.meta["val"] for node in nodes]
    if not values or not all(isinstance(value, Tensor) for value in values):
        return False
    one_device = all(value.device == values[0].device for value in values)
    numbers = [(*value.shape, *value.stride(), value.storage_offset()) for value in values]
    return one_device and not any(isinstance(number, torch.SymInt) for sizes in numbers for number in sizes)


def _node_name(target: Any) -> str:
    schema = schema_of(target)
    return schema.name.split("::")[1] if schema is not None else target.__name__


def _describe(node: fx.Node, value: Any, like: fx.Node) -> None:
    node.meta["val"] = value
    for key in ("stack_trace", "nn_module_stack"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
