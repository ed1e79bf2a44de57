"""Memory: how many bytes a program has made and still holds, node by node, as the code that runs it frees values.

What counts are storages, not nodes. A storage begins with the node that makes it and ends with the last use of any
value that lives in it; views, waits and in-place results make none. A collective that reads its input while it
travels keeps it until its wait; a coalesced one keeps all its results until the last. Inputs and constants are the
caller's and are counted apart, as `held`. Results stay. What an operator allocates and frees inside itself is not seen,
nor is an allocator's rounding.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from crossfade.graph import collectives, offload
from crossfade.graph.collectives import Kind
from crossfade.graph.effects import alias_roots, is_pure
from crossfade.graph.operators import remembered
from crossfade.graph.private import has_schema, memory_id, schema_of
from crossfade.graph.program import Program, size_hint

# fmt: off
_SOMETIMES_COPY = frozenset({
    "alpha_dropout", "conj_physical", "contiguous", "dropout", "einsum", "feature_alpha_dropout", "feature_dropout",
    "flatten", "ravel", "reshape", "reshape_as", "sum_to_size", "to", "type_as",
})
# fmt: on
"""ATen ops that share their argument's memory only for some arguments: asked on tensors without data."""


@dataclass(frozen=True)
class Curve:
    """Live bytes of a program: `during` each node, when what it makes is there and nothing is freed yet, and `after`.

    Both run parallel to the graph's nodes. `peak` is the most at any time, first reached during the node `at`; `held`
    is what inputs and constants take beside that.
    """

    during: tuple[int, ...]
    after: tuple[int, ...]
    peak: int
    at: str
    held: int

    def __str__(self) -> str:
        return f"{self.peak:,} bytes at {self.at or 'no node'}, beside {self.held:,} of inputs and constants"


def memory_curve(program: Program, order: Sequence[fx.Node] | None = None) -> Curve:
    """The live bytes of a program in the order of its nodes, or in another order of them.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4] = input("x")
    ... a: f32[4] = aten.neg(x)
    ... v: f32[2, 2] = aten.view(a, [2, 2])
    ... b: f32[2, 2] = aten.exp(v)
    ... c: f32[] = aten.sum(b)
    ... return output("c", c)
    ... ''')
    >>> curve = memory_curve(program)
    >>> curve.during, curve.after
    ((0, 16, 16, 32, 20, 4), (0, 16, 16, 16, 4, 4))
    >>> print(curve)
    32 bytes at b, beside 16 of inputs and constants
    """
    nodes = list(order if order is not None else program.graph.nodes)
    storages = Storages(program.graph.nodes)
    meter = Meter(storages)
    pairs = [meter.run(node) for node in nodes]
    during, after = tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)
    peak = max(during, default=0)
    at = nodes[during.index(peak)].name if peak else ""
    return Curve(during, after, peak, at, storages.held)


def live_by_name(program: Program) -> list[tuple[str, int]]:
    """Live bytes while each node runs, by the node's name.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4] = input("x")
    ... y: f32[4] = aten.neg(x)
    ... return output("y", y)
    ... ''')
    >>> live_by_name(program)
    [('x', 0), ('y', 16), ('output', 16)]
    """
    return [(node.name, size) for node, size in zip(program.graph.nodes, memory_curve(program).during, strict=True)]


def alive_at_peak(program: Program) -> list[tuple[str, int]]:
    """What is alive when most is: the nodes that made it and its bytes, the largest first.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4] = input("x")
    ... a: f32[4] = aten.neg(x)
    ... b: f32[4] = aten.exp(a)
    ... c: f32[] = aten.sum(b)
    ... return output("c", c)
    ... ''')
    >>> alive_at_peak(program)
    [('a', 16), ('b', 16)]
    """
    storages = Storages(program.graph.nodes)
    during = [size for size, _ in map(Meter(storages).run, storages.nodes)]
    at = during.index(max(during, default=0)) if during else 0
    meter, made_by = Meter(storages), dict[int, str]()
    for node in storages.nodes[:at]:
        made_by.update({cell: node.name for cell in storages.touches[node] if cell not in made_by})
        meter.run(node)
    alive = {cell: name for cell, name in made_by.items() if meter.holds(cell)}
    for node in storages.nodes[at : at + 1]:
        alive = dict.fromkeys(storages.touches[node], node.name) | alive
    sizes = Counter[str]()
    for cell, name in alive.items():
        sizes[name] += storages.size[cell]
    return sorted(((name, size) for name, size in sizes.items() if size), key=lambda pair: -pair[1])


class Storages:
    """Which memory each node of a graph makes and uses, whatever order the nodes run in.

    Memory is counted in cells. A cell begins with the first node that touches it, which makes it, and ends with the
    last; then it lets go of the cells in `then`, which it had kept. Most cells are storages. Those of no size stand
    for a list of tensors, or for a collective in flight: they keep one use of many storages at once, so that taking a
    list of a thousand apart does not touch a million.
    """

    def __init__(
        self,
        nodes: Iterable[fx.Node],
        roots: dict[fx.Node, fx.Node] | None = None,
        unwritten: Collection[fx.Node] = (),
    ) -> None:
        """`roots` are the nodes' `alias_roots`, of whoever has them already; `unwritten` those that a compiler computes
        where they are read: they take no memory, and keep what they are computed from."""
        self.nodes, self._unwritten = list(nodes), unwritten
        self.size: list[int] = []
        self.uses: list[int] = []
        """How often a cell is touched, by nodes and by cells that keep it, until it ends."""
        self.then: list[tuple[int, ...]] = []
        self.touches: dict[fx.Node, list[int]] = {}
        self.held = 0
        self._roots = alias_roots(self.nodes) if roots is None else roots
        self._cells: dict[fx.Node, tuple[int, ...]] = {}
        """The cells that a value keeps alive as long as its name is known."""
        self._elements: dict[fx.Node, dict[int, tuple[int, ...]]] = {}
        self._flights: dict[fx.Node, int] = {}
        self._constants: set[Any] = set()
        for node in self.nodes:
            self._walk(node)
        self._finish()

    def makes_nothing(self, node: fx.Node) -> bool:
        """Whether a node only names memory that was there before: a view, a wait, an element, a write in place."""
        inherited = {cell for source in node.all_input_nodes for cell in self._cells.get(source, ())}
        return all(cell in inherited or not self.size[cell] for cell in self._cells.get(node, ()))

    def cells_of(self, node: fx.Node) -> tuple[int, ...]:
        """The cells that a value keeps as long as its name is known; of a tensor that an operator made, one."""
        return self._cells.get(node, ())

    def _walk(self, node: fx.Node) -> None:
        if node.op in ("placeholder", "get_attr"):
            self._hold(node)
            return
        inputs, is_element = node.all_input_nodes, node.target is operator.getitem
        touched: list[int] = []
        for source in inputs:
            cells = self._cells[source]  # taking one element of a list does not touch the others
            touched += cells[:1] if is_element and source in self._elements else cells
        if node.op == "call_function":
            self._cells[node] = made = self._element(node) if is_element else self._made_by(node, inputs)
            touched += made
            if not (is_element or is_pure(node.target)):
                touched += self._flight_of(node)
        self.touches[node] = touched = list(dict.fromkeys(touched)) if len(touched) > 1 else touched
        for cell in touched:
            self.uses[cell] += 1

    def _hold(self, node: fx.Node) -> None:
        self._cells[node], self.touches[node] = (), []
        if node.op == "placeholder" or node.target not in self._constants:
            self.held += sum(_storage_bytes(tensor) for tensor in _tensors(node.meta.get("val")))
        if node.op == "get_attr":
            self._constants.add(node.target)

    def _cell(self, size: int, then: Iterable[int] = ()) -> int:
        """A new cell; it uses each of those that it keeps once."""
        kept = tuple(dict.fromkeys(then)) if then else ()
        self.size.append(size)
        self.uses.append(0)
        self.then.append(kept)
        for cell in kept:
            self.uses[cell] += 1
        return len(self.size) - 1

    def _made_by(self, node: fx.Node, inputs: Sequence[fx.Node]) -> tuple[int, ...]:
        value = node.meta.get("val")
        if isinstance(value, (tuple, list)):
            return self._list_of(node, value)
        if not isinstance(value, torch.Tensor):
            return ()
        if node.target is offload.TO_HOST:
            return (self._cell(0),)  # on the host, whose memory is not counted
        if self._roots[node] is node:
            if node in self._unwritten:
                return (self._cell(0, (cell for source in inputs for cell in self._cells[source])),)
            return (self._cell(_storage_bytes(value)),)
        shared = self._shared_cells(node, inputs)
        if shared is None or not _is_known(node.target):  # what an unknown op returns may be either: both are kept
            return (self._cell(_storage_bytes(value)), *(shared or ()))
        return shared

    def _shared_cells(self, node: fx.Node, inputs: Sequence[fx.Node]) -> tuple[int, ...] | None:
        """The cells of the argument whose memory a node's result lies in; None if it lies in memory of its own."""
        root = self._roots[node]
        source = next((read for read in inputs if self._roots[read] is root), None) if root is not node else None
        if source is None or (may_copy(node.target) and _copies(node)):
            return None
        return self._cells[source]

    def _list_of(self, node: fx.Node, values: Sequence[Any]) -> tuple[int, ...]:
        if self._roots[node] is not node and _is_known(node.target):  # a list of views
            return self._shared_cells(node, node.all_input_nodes) or ()
        taken = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        elements: dict[int, tuple[int, ...]] = {}
        for index, value in enumerate(values):
            shared = self._cells_of_element(node, index, taken.get(index, taken.get(index - len(values))))
            fresh = [self._cell(_storage_bytes(tensor)) for tensor in _tensors(value)] if shared is None else []
            elements[index] = tuple(fresh) if shared is None else shared
        self._elements[node] = elements
        inside = [cell for cells in elements.values() for cell in cells]
        own = [cell for cell in inside if not self.uses[cell]]
        return (self._cell(0, inside), *own) if inside else ()

    def _cells_of_element(self, node: fx.Node, index: int, taker: fx.Node | None) -> tuple[int, ...] | None:
        """The cells of the argument that one element of a result shares; None if it has memory of its own."""
        if taker is None:
            return () if _shares(node.target, index) else None
        root = self._roots[taker]
        source = next((read for read in node.all_input_nodes if self._roots[read] is root), None)
        return self._cells[source] if source is not None else None

    def _element(self, node: fx.Node) -> tuple[int, ...]:
        source: Any = node.args[0]
        index: Any = node.args[1]
        elements = self._elements.get(source)
        if elements is None or not isinstance(index, int):
            return self._cells[source]
        return elements.get(index + len(elements) if index < 0 else index, ())

    def _flight_of(self, node: fx.Node) -> tuple[int, ...]:
        """The cell of the flight that a node begins or ends, if that keeps anything."""
        if collectives.is_wait(node):
            start = collectives.started_by(node)
            return (self._flights[start],) if start in self._flights else ()
        started = collectives.view(node)
        kept = [cell for held in self._kept_in_flight(started) for cell in self._cells[held]] if started else []
        if not kept:
            return ()
        self._flights[node] = self._cell(0, kept)
        return (self._flights[node],)

    def _kept_in_flight(self, started: collectives.Collective) -> list[fx.Node]:
        """What a collective keeps until its last wait: what it still reads, and if it is coalesced, all its results."""
        sends_a_copy = started.kind in (Kind.ALL_REDUCE, Kind.BROADCAST)
        inputs = [] if sends_a_copy else list(started.inputs)
        return [*inputs, started.node] if started.coalesced else inputs

    def _finish(self) -> None:
        """What the output uses stays: it is touched once more than anything runs."""
        for node in self.nodes:
            if node.op == "output":
                for cell in self.touches[node]:
                    self.uses[cell] += 1


class Meter:
    """The moving account of live bytes while nodes run in some order."""

    def __init__(self, storages: Storages) -> None:
        self.storages = storages
        self.live = 0
        self._uses = list(storages.uses)
        self._begun = bytearray(len(storages.size))

    def run(self, node: fx.Node) -> tuple[int, int]:
        """Run one node: the live bytes during it, and after what it was the last to use is freed."""
        touched = self.storages.touches[node]
        size, begun = self.storages.size, self._begun
        for cell in touched:
            if not begun[cell]:
                begun[cell] = 1
                self.live += size[cell]
        during = self.live
        for cell in touched:
            self._release(cell)
        return during, self.live

    def run_together(
        self, nodes: Sequence[fx.Node], seen: Callable[[int], object] = lambda live: None
    ) -> tuple[int, int]:
        """Run some nodes as one: what they are given is freed at their end, what they make inside as they go.

        The most live bytes during them, of which `seen` is told node by node, and those after them.
        """
        given = {cell for node in nodes for cell in self.storages.touches[node] if self._begun[cell]}
        most, kept = 0, list[int]()
        for node in nodes:
            touched = self.storages.touches[node]
            for cell in touched:
                if not self._begun[cell]:
                    self._begun[cell] = 1
                    self.live += self.storages.size[cell]
            most = max(most, self.live)
            seen(self.live)
            for cell in touched:
                if cell in given:
                    kept.append(cell)
                else:
                    self._release(cell)
        for cell in kept:
            self._release(cell)
        return most, self.live

    def holds(self, cell: int) -> bool:
        """Whether a cell has begun and not ended."""
        return bool(self._begun[cell]) and self._uses[cell] > 0

    def made_by(self, node: fx.Node) -> int:
        """The bytes that a node would make if it ran now."""
        return sum(self.storages.size[cell] for cell in self.storages.touches[node] if not self._begun[cell])

    def _release(self, cell: int) -> None:
        waiting = [cell]
        while waiting:
            cell = waiting.pop()
            self._uses[cell] -= 1
            if not self._uses[cell]:
                self.live -= self.storages.size[cell]
                waiting += self.storages.then[cell]


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (tuple, list)) else []


def _storage_bytes(value: torch.Tensor) -> int:
    """The bytes from a tensor's first element to its last; symbolic sizes count by their hint."""
    if value.layout is not torch.strided:
        return size_hint(value.numel()) * value.element_size()
    reach = 1
    for size, stride in zip(value.shape, value.stride(), strict=True):
        if type(size) is not int or type(stride) is not int:
            size, stride = size_hint(size), size_hint(stride)
        if not size:
            return 0
        reach += (size - 1) * stride
    return reach * value.element_size()


def _is_known(target: Any) -> bool:
    return has_schema(target)


@remembered
def may_copy(target: Any) -> bool:
    """Whether an operator that can share its argument's memory makes a copy for some arguments.

    >>> may_copy(torch.ops.aten.reshape.default), may_copy(torch.ops.aten.view.default)
    (True, False)
    """
    namespace, _, name = schema_of(target).name.partition("::") if _is_known(target) else ("", "", "")
    return namespace == "aten" and name in _SOMETIMES_COPY


def _copies(node: fx.Node) -> bool:
    """Whether an op that only sometimes shares memory has made a copy: asked on tensors without data."""
    if node.all_input_nodes[0].meta["val"].device != node.meta["val"].device:
        return True
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: _without_data(source.meta.get("val")))
    args, kwargs = fx.node.map_aggregate((args, kwargs), _without_data)  # type: ignore[misc,arg-type]
    given = {memory_id(tensor) for tensor in _tensors([*args, *kwargs.values()])}
    return any(memory_id(tensor) not in given for tensor in _tensors(node.target(*args, **kwargs)))  # type: ignore[operator]


def _without_data(value: Any) -> Any:
    """An argument on the meta device, its symbols by their hints."""
    if isinstance(value, torch.Tensor) and value.device.type != "meta":
        sizes, strides = ([size_hint(size) for size in found] for found in (value.shape, value.stride()))
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    return size_hint(value) if isinstance(value, torch.SymInt) else value


@remembered
def _annotated(target: Any) -> tuple[bool, ...]:
    schema = schema_of(target)
    return tuple(item.alias_info is not None for item in schema.returns) if schema is not None else ()


def _shares(target: Any, index: int) -> bool:
    """Whether an operator's schema says that a result shares an argument's memory."""
    annotated = _annotated(target)
    if len(annotated) == 1:  # one list of tensors
        return annotated[0]
    return index < len(annotated) and annotated[index]
