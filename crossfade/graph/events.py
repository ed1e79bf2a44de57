"""What a program communicates, in order: its launches and waits, read off the graph.

A launch starts something and goes on; a wait goes on once every member has started it. Operators that communicate
and return a finished value, such as a matmul in pieces, are a launch and its wait. Graphs that a higher-order operator
calls are read where the call stands, if what they communicate does not depend on data; otherwise it is said.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from crossfade.graph import collectives, own_part
from crossfade.graph.launches import Launch, Sent, Size, TensorType
from crossfade.graph.nested import opened
from crossfade.graph.operators import remembered
from crossfade.graph.private import HigherOrderOperator, schema_of, size_expression
from crossfade.graph.program import Program, source_line
from crossfade.graph.text import render_type


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait for the launch at a position among the launches, or for one message of it."""

    node: str
    source: str
    launch: int
    message: int | None = None

    @property
    def where(self) -> str:
        """The node, and the source line where it is known."""
        return f"node {self.node}" + (f" [{self.source}]" if self.source else "")


@dataclass(frozen=True, slots=True)
class Unread:
    """A node whose communication the graph does not show, and why."""

    node: str
    source: str
    reason: str


@dataclass
class Events:
    """What a program communicates, in order; a wait names its launch by position in `launches`."""

    events: list[Launch | Wait] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)

    def start(self, launch: Launch) -> int:
        """Append a launch; returns its position among the launches."""
        self.events.append(launch)
        self.launches.append(launch)
        return len(self.launches) - 1

    def add(self, inside: Events) -> None:
        """Append all of another's."""
        offset = len(self.launches)
        self.launches += inside.launches
        self.events += [e if isinstance(e, Launch) else replace(e, launch=e.launch + offset) for e in inside.events]
        self.unread += inside.unread

    @property
    def shape(self) -> list[Any]:
        """What two graphs must have in common to communicate alike, whatever their nodes are called."""
        return [
            (e.group, e.key, e.sent, e.received, e.messages) if isinstance(e, Launch) else (e.launch, e.message)
            for e in self.events
        ]


def events_of(program: Program) -> Events:
    """The launches and waits of a program, in the order in which a rank meets them.

    >>> from crossfade.graph.text import parse
    >>> found = events_of(parse('''
    ... x: f32[4] = input("x")
    ... start: f32[4] = c10d.all_reduce(x, "sum", "dp")
    ... done: f32[4] = c10d.wait_tensor(start)
    ... return output("y", done)
    ... ''', groups={"dp": 2}))
    >>> [event.node for event in found.events], str(found.launches[0])
    (['start', 'done'], 'all_reduce(sum) of f32[4] on dp')
    """
    return _Reader(program).read()


class _Reader:
    """One walk over a graph."""

    def __init__(self, program: Program) -> None:
        self.program, self.found = program, Events()
        self.started: dict[Any, tuple[int, int | None]] = {}
        self.graphs: dict[str, Events | None] = {}

    def read(self) -> Events:
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self.visit(node)
        return self.found

    def visit(self, node: fx.Node) -> None:
        if collectives.is_wait(node):
            if (place := self.started.get(collectives.waited_value(node))) is not None:
                self.found.events.append(Wait(node.name, source_line(node), *place))
        elif (how := _how(node.target)) == "element":
            if (whole := self.started.get(node.args[0])) is not None:
                position = node.args[1] if self.found.launches[whole[0]].messages else None
                self.started[node] = whole[0], position  # type: ignore[assignment]
        elif how == "calls":
            self.inside(node)
        elif how == "unnamed":
            self.cannot(node, "its process group is not named in the graph")
        elif how != "computes":
            self.launch(node)

    def launch(self, node: fx.Node) -> None:
        position = self.found.start(_launch(node))
        self.started[node] = position, None
        if not collectives.is_collective(node) and not _is_waited_for(node):
            self.found.events.append(Wait(node.name, source_line(node), position))

    def cannot(self, node: fx.Node, reason: str) -> None:
        self.found.unread.append(Unread(node.name, source_line(node), reason))

    def inside(self, node: fx.Node) -> None:
        """What the graphs communicate that a higher-order operator calls."""
        names = [str(source.target) for source in node.all_input_nodes if source.op == "get_attr"]
        graphs = [self.graph(name) for name in names if isinstance(self.program.constants.get(name), fx.GraphModule)]
        if None in graphs:
            self.cannot(node, "it calls a graph that is not one of operators with metadata")
            return
        known = [graph for graph in graphs if graph is not None]
        if not any(graph.events or graph.unread for graph in known):
            return
        turns = _turns(node, known)
        if isinstance(turns, str):
            self.cannot(node, turns)
            return
        for _ in range(turns):
            self.found.add(known[0])

    def graph(self, name: str) -> Events | None:
        if name not in self.graphs:
            inside = opened(self.program.constants[name], self.program)
            self.graphs[name] = events_of(inside) if inside is not None else None
        return self.graphs[name]


def _turns(node: fx.Node, graphs: list[Events]) -> int | str:
    """How often a higher-order operator runs the first of its graphs; or why that is not known before it runs."""
    name = str(node.target)
    if name == "cond":
        alike = len(graphs) == 2 and graphs[0].shape == graphs[1].shape
        return 1 if alike else "which of its branches communicates depends on data"
    if name == "invoke_subgraph":
        return 1
    if name in ("map_impl", "scan"):
        over: Any = node.args[1 if name == "map_impl" else 2]
        rows = over[0].meta["val"].shape[0] if over else None
        return rows if isinstance(rows, int) else "how often it communicates depends on a size that is not known"
    return "how often it communicates depends on data"


def _is_waited_for(node: fx.Node) -> bool:
    elements = [after for user in node.users if user.target is operator.getitem for after in user.users]
    return any(collectives.is_wait(user) for user in (*node.users, *elements))


@remembered
def _how(target: Any) -> str:
    """What an operator is to the other ranks."""
    if target is operator.getitem:
        return "element"
    if isinstance(target, HigherOrderOperator):
        return "calls"
    if target is own_part.OPERATOR or not collectives.communicates(target):
        schema: Any = schema_of(target)
        namespace = schema.name.split("::")[0] if schema is not None else ""
        named = namespace == "crossfade" and any(argument.name == "group" for argument in schema.arguments)
        return "unnamed" if namespace == "c10d" or named else "computes"
    return "starts"


def _launch(node: fx.Node) -> Launch:
    where = node.name, source_line(node)
    if (sent := collectives.messages(node)) is not None:
        parts = tuple(Sent(message.sends, message.peer, message.tag, _described(message.tensor)) for message in sent)
        return Launch(*where, "messages", collectives.group_of(node) or "", messages=parts)
    collective = collectives.view(node)
    if collective is None or collectives.counts_rows_as_it_runs(node):
        return _other_launch(node)
    tensors = tuple(_described(tensor) for tensor in collective.inputs)
    root: int | None = None
    sent_rows: tuple[Size, ...] = ()
    received: tuple[Size, ...] = ()
    if collective.kind is collectives.Kind.BROADCAST:
        root = collectives.settings(node)[0]
    elif collective.kind is collectives.Kind.ALL_TO_ALL:
        received, sent_rows = (tuple(map(_size, rows)) for rows in collectives.settings(node)[:2])
    return Launch(
        *where,
        _name(node) if collective.by_copy_engines else str(collective.kind),  # which wait for each other, not for plain
        collective.group,
        tensors,
        collective.reduce_op or "",
        root,
        collective.group_size,
        sent_rows,
        received,
        collective.coalesced,
    )


def _other_launch(node: fx.Node) -> Launch:
    """An operator that communicates in a way of its own: members must call it with the same settings and types."""
    tensors = tuple(_described(source) for source in node.all_input_nodes if _is_tensor(source))
    group = collectives.group_of(node) or ""
    settings = fx.map_arg((node.args, node.kwargs), lambda source: "_" if _is_tensor(source) else str(_size(source)))
    return Launch(node.name, source_line(node), _name(node), group, tensors, settings=str(settings))


def _name(node: fx.Node) -> str:
    return str(schema_of(node.target).name.split("::")[1])


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _described(node: fx.Node) -> TensorType:
    value = node.meta["val"]
    return _type(value.dtype, tuple(value.shape)) if _is_static(value.shape) else _symbolic(value)


def _is_static(shape: Any) -> bool:
    return all(type(size) is int for size in shape)


@functools.lru_cache(maxsize=1024)
def _type(dtype: torch.dtype, shape: tuple[int, ...]) -> TensorType:
    return TensorType(_dtype(dtype), shape)


@functools.cache
def _dtype(dtype: torch.dtype) -> str:
    return render_type(torch.empty(0, dtype=dtype, device="meta")).partition("[")[0]


def _symbolic(value: torch.Tensor) -> TensorType:
    return TensorType(_dtype(value.dtype), tuple(map(_size, value.shape)))


def _size(size: Any) -> Size:
    """An int, or a symbol's expression; of a node, its value's."""
    value = size.meta.get("val") if isinstance(size, fx.Node) else size
    return value if type(value) is int else str(size_expression(value))
