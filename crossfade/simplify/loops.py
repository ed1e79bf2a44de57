"""What `map` and `scan` do, as a `while_loop`: an index counts the turns, and each turn's results go to their row."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph.effects import is_random, memory_of, written_inputs
from crossfade.graph.private import OpOverload, statically_equal, tree_flatten
from crossfade.graph.program import Input, InputKind, Output, OutputKind, Program, attribute
from crossfade.graph.splice import insert_call

_aten = torch.ops.aten
_RELAID = "what it carries is laid out differently in memory after a turn"


@dataclass(frozen=True)
class Turns:
    """A higher-order call that runs a graph once for each row of `rows`.

    The graph is given what it `carried` out of the turn before, a row of each, and the `others`; it returns what is
    carried on, then one row of each result.
    """

    program: Program
    node: fx.Node
    called: fx.Node
    carried: Sequence[fx.Node]
    rows: Sequence[fx.Node]
    others: Sequence[Any]

    @property
    def body(self) -> fx.GraphModule:
        """The graph that it runs."""
        return self.program.constants[str(self.called.target)]

    @property
    def results(self) -> list[Any]:
        """What the graph returns: nodes of the graph."""
        return tree_flatten(self.body.graph.output_node().args[0])[0]

    def reason_against(self) -> str | None:
        """Why it cannot be a loop, or None."""
        values: list[Any] = [_value(item) for item in (*self.carried, *self.rows)]
        given: list[Any] = [node.meta.get("val") if isinstance(node, fx.Node) else None for node in self.results]
        if not self.rows or not all(isinstance(value, Tensor) for value in (*values, *given)):
            return "what it is given or returns is not all tensors"
        if any(isinstance(size, torch.SymInt) for value in (*values, *given) for size in value.shape):
            return "its sizes are not known before it runs"
        if any(value.device != values[0].device for value in (*values, *given)):
            return "its values lie on several devices"
        if any(value.dtype.itemsize == 1 and value.is_floating_point() for value in (*values, *given)):
            return "no row of its dtype can be picked by an index"
        return self._reason_of_graph()

    def _reason_of_graph(self) -> str | None:
        if any(_has_effect(node) for node in self.body.graph.nodes):
            return "its graph writes memory or has another effect"
        if not all(user.target is operator.getitem for user in self.node.users):
            return "its results are used as a whole"
        homes = [memory_of(result) for result in self.results[: len(self.carried)]]
        if len(set(homes)) < len(homes) or not all(_is_made_here(home) for home in homes):
            return "what it carries is what it was given, or one tensor twice"
        stacked = self.node.meta["val"][len(self.carried) :]
        return None if all(map(_is_contiguous, stacked)) else "its results would be laid out differently in memory"

    def lower(self) -> str | None:
        """Put the loop in the call's place; return why not, which may turn out only when a turn is written down."""
        if (reason := self.reason_against()) is not None:
            return reason
        program, node, like = self.program, self.node, self.rows[0].meta["val"]
        with program.fake_mode:
            index = torch.empty([], dtype=torch.int64, device=like.device)
        buffers = self.node.meta["val"][len(self.carried) :]
        carried = [index, *map(_value, self.carried), *buffers]
        others = [*self.rows, *self.others]
        turn = self._turn(carried, list(map(_value, others)))
        if turn is None:
            return _RELAID
        graphs = [self._named("goes_on", self._goes_on(carried, list(map(_value, others)))), self._named("turn", turn)]
        first = self._insert(_aten.full.default, [], 0, dtype=torch.int64, device=like.device)
        empty = _aten.empty.memory_format
        rows = [self._insert(empty, list(buffer.shape), dtype=buffer.dtype, device=buffer.device) for buffer in buffers]
        arguments: Any = (*graphs, (first, *self.carried, *rows), tuple(others))
        with program.graph.inserting_before(node):
            loop = program.graph.call_function(torch.ops.higher_order.while_loop, arguments)
        loop.meta = {**node.meta, "val": tuple(carried)}
        self._take_place(loop)
        return None

    def _insert(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return insert_call(self.program, target, *args, before=self.node, like=self.node, **kwargs)

    def _named(self, what: str, module: fx.GraphModule) -> fx.Node:
        """Keep a graph among the program's constants."""
        name = _free_name(f"{self.node.name}_{what}", self.program)
        self.program.constants = {**self.program.constants, name: module}
        with self.program.graph.inserting_before(self.node):
            return self.program.graph.create_node("get_attr", name, name=name)

    def _take_place(self, loop: fx.Node) -> None:
        for user in list(self.node.users):
            index: Any = user.args[1]
            user.args = (loop, index % len(self.results) + 1)
        self.program.graph.erase_node(self.node)
        if not self.called.users:
            self.program.graph.erase_node(self.called)

    def _goes_on(self, carried: Sequence[Any], others: Sequence[Any]) -> fx.GraphModule:
        """Whether there is a turn left."""
        inside, nodes = _graph_of(self.program, (*carried, *others))
        turns = self.rows[0].meta["val"].shape[0]
        less = insert_call(inside, _aten.lt.Scalar, nodes[0], turns, before=inside.output_node, like=self.node)
        inside.output_node.args = (less,)
        return inside.module()

    def _turn(self, carried: Sequence[Any], others: Sequence[Any]) -> fx.GraphModule | None:
        """One turn: pick the rows at the index, run the graph on them, put its results at the index."""
        inside, nodes = _graph_of(self.program, (*carried, *others))
        end, number = inside.output_node, len(self.carried)

        def call(target: Any, *args: Any) -> fx.Node:
            return insert_call(inside, target, *args, before=end, like=self.node)

        index = call(_aten.view.default, nodes[0], [1])
        given = nodes[len(carried) :]
        picked = [call(_aten.index_select.default, tensor, 0, index) for tensor in given[: len(self.rows)]]
        rows = [call(_aten.squeeze.dim, row, 0) for row in picked]
        arguments = [*nodes[1 : 1 + number], *rows, *given[len(self.rows) :]]
        results = _inlined(inside, self.body, arguments, end)
        buffers = nodes[1 + number : len(carried)]
        put = [
            call(_aten.index_copy.default, buffer, 0, index, call(_aten.unsqueeze.default, row, 0))
            for buffer, row in zip(buffers, results[number:], strict=True)
        ]
        carried_on = results[:number]
        if not all(_alike(_value(result), other) for result, other in zip(carried_on, carried[1:], strict=False)):
            return None
        inside.output_node.args = ((call(_aten.add.Tensor, nodes[0], 1), *carried_on, *put),)
        return inside.module()


def _value(item: Any) -> Any:
    return item.meta["val"] if isinstance(item, fx.Node) else item


def _has_effect(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    return bool(written_inputs(node)) or (node.is_impure() and not is_random(node))


def _is_made_here(home: Any) -> bool:
    """Whether memory is a call's own: that of a constant is known by its name, that of an element by its list."""
    return not isinstance(home, str) and (isinstance(home, tuple) or home.op == "call_function")


def _alike(value: Tensor, other: Tensor) -> bool:
    if value.dtype != other.dtype:
        return False
    return statically_equal(tuple(value.shape), tuple(other.shape)) and statically_equal(value.stride(), other.stride())


def _is_contiguous(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_contiguous()


def _free_name(name: str, program: Program) -> str:
    while name in program.constants:
        name += "_"
    return name


def _graph_of(program: Program, values: Sequence[Any]) -> tuple[Program, list[fx.Node]]:
    """A new graph inside a program, with a placeholder for each value."""
    graph = fx.Graph()
    nodes = [graph.placeholder(f"given_{index}") for index in range(len(values))]
    for node, value in zip(nodes, values, strict=True):
        node.meta["val"] = value
    graph.output((nodes[0],))
    inputs = tuple(Input(InputKind.INPUT, node.name) for node in nodes)
    return Program(graph, inputs, (Output(OutputKind.OUTPUT, "0"),), groups=program.groups), nodes


def _inlined(inside: Program, body: fx.GraphModule, arguments: Sequence[fx.Node], end: fx.Node) -> list[Any]:
    """Copy a graph's nodes, with metadata for the arguments given, and return its results."""
    mapping: dict[fx.Node, fx.Node] = dict(zip(body.graph.find_nodes(op="placeholder"), arguments, strict=True))
    constants: dict[str, Any] = {}
    for node in body.graph.nodes:
        if node.op not in ("call_function", "get_attr"):
            continue
        with inside.graph.inserting_before(end):
            copied = mapping[node] = inside.graph.node_copy(node, mapping.__getitem__)
        copied.meta = dict(node.meta)
        if node.op == "get_attr":
            constants[str(node.target)] = attribute(body, str(node.target))
        elif isinstance(node.target, OpOverload):
            args, kwargs = fx.map_arg((copied.args, copied.kwargs), lambda source: source.meta["val"])
            with inside.fake_mode, torch.no_grad():
                copied.meta["val"] = node.target(*args, **kwargs)
    inside.constants = {**inside.constants, **constants}
    results = tree_flatten(body.graph.output_node().args[0])[0]
    return [mapping[result] for result in results]
