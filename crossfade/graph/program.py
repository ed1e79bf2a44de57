"""Program: a functional graph, what its inputs and outputs are, its process groups and its history."""

from __future__ import annotations

import copy
import gc
import itertools
import keyword
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, ClassVar

import torch
from torch import fx

from crossfade.errors import CaptureError
from crossfade.graph.collectives import ask_inputs_for_sizes, group_sizes, return_waited
from crossfade.graph.history import PassRecord
from crossfade.graph.metadata import (  # noqa: F401, others take them from here
    MADE_FOR,
    complete_metadata,
    described,
    size_hint,
    source_line,
    tensor_bytes,
)
from crossfade.graph.private import FakeTensor, FakeTensorMode, OperatorBase, symbolic_shapes, tree_flatten


class InputKind(StrEnum):
    """What a graph input is to the user. A `workspace` is memory kept between runs, with nothing in it before one; a
    `residual` is what a program has left out so far and will make up for, zeros before the first run; `alike` numbers
    sum up what must be alike on all ranks; `earlier` are gradients of earlier micro-batches, which ranks have not
    exchanged yet."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    OPTIMIZER_STATE = "optimizer_state"
    INPUT = "input"
    SCALAR = "scalar"
    WORKSPACE = "workspace"
    RESIDUAL = "residual"
    ALIKE = "alike"
    EARLIER = "earlier"


class OutputKind(StrEnum):
    """What a graph output is to the user. An `update` is the new value of the input of the same name; a `shard` is the
    part of a parameter that this rank updates, until the optimizer has taken it; `alike` numbers are of all ranks."""

    OUTPUT = "output"
    LOSS = "loss"
    GRADIENT = "gradient"
    UPDATE = "update"
    SHARD = "shard"
    ALIKE = "alike"


@dataclass(frozen=True, slots=True)
class Input:
    """The kind and name of one placeholder; the name is the user's (`layers.0.weight`), unique in the program."""

    kind: InputKind
    name: str


@dataclass(frozen=True, slots=True)
class Output:
    """The kind and name of one output; for gradients and updates, the name of the input it belongs to."""

    kind: OutputKind
    name: str


@dataclass
class Program:
    """An FX graph of ATen ops and functional collectives, with what its inputs and outputs are.

    `inputs` and `outputs` run parallel to the placeholders and to the output node's flat tuple. `groups` maps the
    group names that collectives use to their sizes: logical names (`dp`), resolved to process groups only when run.
    `constants` holds what `get_attr` nodes name: tensors, and the graphs that higher-order operators call. `history`
    is what each pass did; `facts` what passes established. Inputs stand above all else: FX lets a placeholder stand
    anywhere above its first use, and a program that is made puts it where passes look for it.

        >>> from crossfade.graph.text import parse
        >>> program = parse('''
        ... x: f32[4] = input("x")
        ... y: f32[4] = aten.relu(x)
        ... return output("y", y)
        ... ''')
        >>> [i.name for i in program.inputs]
        ['x']
    """

    graph: fx.Graph
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    groups: Mapping[str, int] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    facts: frozenset[str] = frozenset()
    history: tuple[PassRecord, ...] = ()
    render: ClassVar[Callable[[Program], str]]
    """How a program prints: set by `text`, which knows programs, operators and nested graphs, and stands above them."""

    def __post_init__(self) -> None:
        self.check_signature()
        self._put_inputs_first()

    def check_signature(self) -> None:
        """Refuse a signature that does not describe every placeholder and every result."""
        if len(self.placeholders) != len(self.inputs) or len(self.results) != len(self.outputs):
            raise CaptureError(
                f"the graph has {len(self.placeholders)} placeholders and {len(self.results)} results",
                expected=f"{len(self.inputs)} and {len(self.outputs)}, as the signature says",
                remedy="describe every placeholder and every flat output once",
            )

    def _put_inputs_first(self) -> None:
        leading = sum(1 for _ in itertools.takewhile(lambda node: node.op == "placeholder", self.graph.nodes))
        placeholders = self.placeholders
        if leading < len(placeholders):
            first = next(node for node in self.graph.nodes if node.op != "placeholder")
            for node in placeholders[leading:]:
                first.prepend(node)

    @property
    def placeholders(self) -> list[fx.Node]:
        """The input nodes, in the order of `inputs`."""
        return list(self.graph.find_nodes(op="placeholder"))

    @property
    def output_node(self) -> fx.Node:
        """The one output node."""
        return next(iter(self.graph.find_nodes(op="output")))

    @property
    def results(self) -> list[Any]:
        """The output values, in the order of `outputs`."""
        return list(self.output_node.args[0])  # type: ignore[arg-type]

    @property
    def fake_mode(self) -> FakeTensorMode:
        """The fake-tensor mode that all metadata of this program belongs to."""
        for node in self.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, FakeTensor):
                return value.fake_mode
        return FakeTensorMode()

    def named_inputs(self) -> Iterator[tuple[Input, fx.Node]]:
        """Each input with its node."""
        return zip(self.inputs, self.placeholders, strict=True)

    def named_results(self) -> Iterator[tuple[Output, Any]]:
        """Each output with its value."""
        return zip(self.outputs, self.results, strict=True)

    def input_nodes(self) -> dict[str, fx.Node]:
        """The placeholder of each input, by the input's name."""
        return {item.name: node for item, node in self.named_inputs()}

    def add_input(self, item: Input, value: Any) -> fx.Node:
        """Append an input; `value` describes it."""
        return self.add_inputs([(item, value)])[0]

    def add_inputs(self, items: Sequence[tuple[Input, Any]]) -> list[fx.Node]:
        """Append inputs, each with what describes it: many at once are looked through once."""
        added = []
        after = self.placeholders[-1].next if self.inputs else next(iter(self.graph.nodes))
        with self.graph.inserting_before(after):
            for item, value in items:
                node = self.graph.placeholder(identifier(item.name))
                node.meta["val"] = value
                added.append(node)
        self.inputs += tuple(item for item, _ in items)
        return added

    def set_results(self, results: list[Any], outputs: tuple[Output, ...] | None = None) -> None:
        """Replace the output values, and what they are if that changes too."""
        self.output_node.args = (tuple(results),)
        if outputs is not None:
            self.outputs = outputs

    def copy(self) -> Program:
        """An independent copy; tensors in metadata and constants are shared. About 15 us a node."""
        graph = fx.Graph()
        with paused_garbage_collection():
            result = graph.graph_copy(self.graph, {})
            graph.output(result).meta = copy.copy(self.output_node.meta)
        return replace(self, graph=graph, groups=dict(self.groups), constants=dict(self.constants))

    def module(self) -> fx.GraphModule:
        """A runnable module over this graph (not a copy of it)."""
        return fx.GraphModule(dict(self.constants), self.graph, "Program")

    def __str__(self) -> str:
        return self.render()


def from_graph_module(module: fx.GraphModule, *, groups: Mapping[str, int] | None = None) -> Program:
    """Accept any FX graph of ATen ops and collectives as a Program; `module` is left as it is.

    Placeholders become inputs under their own names, results become outputs. Metadata (`meta["val"]`) must be there,
    as `make_fx`, `torch.export` and AOTAutograd leave it.

        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> module = make_fx(lambda x: x.relu() + 1, tracing_mode="fake")(torch.ones(3))
        >>> print(from_graph_module(module))
        x_1: f32[3] = input("x_1")
        relu: f32[3] = aten.relu(x_1)
        add: f32[3] = aten.add.Tensor(relu, 1)
        return output("0", add)
    """
    _refuse_other_dialects(module.graph)
    graph = fx.Graph()
    result = graph.graph_copy(module.graph, {})
    flat, _ = tree_flatten(result)
    graph.output(tuple(flat))
    complete_metadata(graph)
    constants = {str(node.target): attribute(module, str(node.target)) for node in graph.find_nodes(op="get_attr")}
    if len(_fake_modes(graph)) != 1:
        _describe_again(graph, constants)
    ask_inputs_for_sizes(graph)
    return_waited(graph)
    inputs = tuple(Input(InputKind.INPUT, str(node.target)) for node in graph.find_nodes(op="placeholder"))
    outputs = tuple(Output(OutputKind.OUTPUT, str(index)) for index in range(len(flat)))
    return Program(graph, inputs, outputs, groups=dict(groups or group_sizes(graph)), constants=constants)


def _refuse_other_dialects(graph: fx.Graph) -> None:
    """Accept graphs of operators with metadata; say what to do with graphs of Python calls."""
    for node in graph.nodes:
        plain = node.op != "call_function" or isinstance(node.target, OperatorBase) or _is_scalar_op(node)
        if node.op in ("call_module", "call_method") or not plain:
            raise CaptureError(
                f"{node.op} {node.target} in the graph",
                expected="ATen operators, as after make_fx, torch.export or AOTAutograd",
                remedy="trace it with make_fx, or take the graph that aot_autograd gives to its compilers",
            )
        if node.op == "placeholder" and "val" not in node.meta:
            raise CaptureError(
                f"input {node.target} has no metadata",
                remedy='trace with make_fx(..., tracing_mode="fake"), which leaves meta["val"] on every node',
            )


def _is_scalar_op(node: fx.Node) -> bool:
    return getattr(node.target, "__module__", "") in ("_operator", "math", "torch") and callable(node.target)


def _fake_modes(graph: fx.Graph) -> set[FakeTensorMode | None]:
    values = [node.meta.get("val") for node in graph.nodes]
    return {getattr(value, "fake_mode", None) for value in values if isinstance(value, torch.Tensor)}


def _describe_again(graph: fx.Graph, constants: Mapping[str, Any]) -> None:
    """Run a graph once on fake tensors of one mode: `make_fx` on real tensors gives every node a mode of its own."""
    mode = FakeTensorMode(shape_env=symbolic_shapes())

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        with mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = fake(node.meta.get("val"))
        elif node.op == "get_attr" and not isinstance(constants[str(node.target)], fx.GraphModule):
            node.meta["val"] = fake(constants[str(node.target)])
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: described(n, constants))
            with mode:
                node.meta["val"] = node.target(*args, **kwargs)


def identifier(name: str) -> str:
    """A Python name for a user's name.

    >>> identifier("0.weight:step")
    '_0_weight_step'
    """
    plain = re.sub(r"\W+", "_", name).strip("_") or "_"
    return f"_{plain}" if plain[0].isdigit() or keyword.iskeyword(plain) else plain


def rows_per_rank(rows: int, ranks: int) -> int:
    """How many rows each rank holds of a tensor in parts; the last ranks may hold fewer, and are padded to as many.

    >>> rows_per_rank(5, 2)
    3
    """
    return -(-rows // ranks)


def attribute(module: torch.nn.Module, path: str) -> Any:
    """What a dotted path names in a module."""
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value


class paused_garbage_collection:
    """Building 100,000 nodes triggers dozens of full collections that free nothing: pausing them halves a copy."""

    def __enter__(self) -> None:
        self.was_enabled = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self.was_enabled:
            gc.enable()


def device_of(program: Program) -> torch.device:
    """Where a program computes: on a device if any of its inputs is there."""
    values = (node.meta.get("val") for node in program.placeholders)
    devices = [leaf.device for leaf in tree_flatten(list(values))[0] if isinstance(leaf, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
