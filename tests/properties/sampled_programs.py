"""Sampled programs, what each of their nodes does to memory, and an executor as unkind as a real machine may be.

The sampler keeps its own account of memory, randomness and groups, so that it can be held against `Order`'s.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import fx

from crossfade.graph.private import FakeTensorMode
from crossfade.graph.program import Input, InputKind, Output, OutputKind, Program

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
Shape = tuple[int, ...]

GROUP_SIZE = 2
MODE = FakeTensorMode()
with MODE:
    FAKES = {shape: torch.empty(shape) for shape in [(2,), (4,), (8,), (2, 2)]}

VIEWS: dict[Shape, list[tuple[Any, tuple, Shape]]] = {
    (2,): [(aten.alias.default, (), (2,))],
    (4,): [
        (aten.view.default, ([2, 2],), (2, 2)),
        (aten._unsafe_view.default, ([2, 2],), (2, 2)),
        (aten.slice.Tensor, (0, 0, 2), (2,)),
        (aten.slice.Tensor, (0, 2, 4), (2,)),
        (aten.dropout.default, (0.5, False), (4,)),
    ],
    (2, 2): [(aten.reshape.default, ([4],), (4,)), (aten.t.default, (), (2, 2)), (aten.select.int, (0, 1), (2,))],
    (8,): [(aten.slice.Tensor, (0, 0, 4), (4,)), (aten.slice.Tensor, (0, 4, 8), (4,))],
}


@dataclass(frozen=True)
class Effects:
    """What a node does: memory by number, whether it draws random numbers, and the group it communicates on."""

    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    random: bool = False
    group: str | None = None

    def conflicts_with(self, later: Effects) -> bool:
        """Whether the two must keep their order, data apart."""
        memory = self.writes & (later.reads | later.writes) or self.reads & later.writes
        same_group = self.group is not None and self.group == later.group
        return bool(memory) or (self.random and later.random) or same_group


@dataclass
class Sampled:
    """A program and the effects of its nodes."""

    program: Program
    effects: dict[fx.Node, Effects]

    def must_follow(self, before: fx.Node, after: fx.Node) -> bool:
        """Brute force: whether `before`, which stands above `after`, must stay there."""
        nothing = Effects()
        conflict = self.effects.get(before, nothing).conflicts_with(self.effects.get(after, nothing))
        return before in after.all_input_nodes or conflict

    def __repr__(self) -> str:
        return f"\n{self.program}\n"


@dataclass
class _Flight:
    """One result of a started collective that has not been waited for."""

    result: fx.Node
    reads: frozenset[int]
    writes: frozenset[int]


@dataclass
class _Sampler:
    draw: Callable
    groups: Sequence[str]
    graph: fx.Graph = field(default_factory=fx.Graph)
    effects: dict[fx.Node, Effects] = field(default_factory=dict)
    memory: dict[fx.Node, int] = field(default_factory=dict)
    values: list[fx.Node] = field(default_factory=list)
    in_flight: list[_Flight] = field(default_factory=list)
    landed: list[_Flight] = field(default_factory=list)
    lists: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)

    def emit(self, target: Any, args: tuple, value: Any, *, like: fx.Node | None = None, **effects: Any) -> fx.Node:
        """Add a node; its result lives in the memory of `like`, or in its own."""
        node = self.graph.call_function(target, args, effects.pop("kwargs", {}))
        node.meta["val"] = value
        if target is not operator.getitem:
            reads = {self.memory[source] for source in node.all_input_nodes} | set(effects.pop("also_reads", ()))
            self.effects[node] = Effects(reads=frozenset(reads), **effects)
        self.memory[node] = self.memory[like] if like is not None else len(self.memory)
        return node

    def pick(self, *, written: bool = False, shapes: Iterable[Shape] = FAKES, apart: Iterable[fx.Node] = ()) -> Any:
        """A value that may be read (or written) now, in memory apart from others; None if there is none."""
        busy = {number for flight in self.in_flight for number in flight.writes}
        if written:
            busy |= {number for flight in self.in_flight for number in flight.reads}
        busy |= {self.memory[node] for node in apart}
        found = [node for node in self.values if self.memory[node] not in busy and shape_of(node) in shapes]
        return self.draw(st.sampled_from(found)) if found else None

    def pointwise(self) -> None:
        node = self.pick()
        if node is not None:
            target = self.draw(st.sampled_from([aten.sin.default, aten.neg.default, aten.clone.default]))
            self.values.append(self.emit(target, (node,), node.meta["val"]))

    def binary(self) -> None:
        node = self.pick()
        other = self.pick(shapes=[shape_of(node)]) if node is not None else None
        if other is not None:
            target = self.draw(st.sampled_from([aten.add.Tensor, aten.sub.Tensor]))
            self.values.append(self.emit(target, (node, other), node.meta["val"]))

    def view(self) -> None:
        node = self.pick()
        if node is not None:
            target, args, shape = self.draw(st.sampled_from(VIEWS[shape_of(node)]))
            random = target is aten.dropout.default  # it would draw if it were told to train
            self.values.append(self.emit(target, (node, *args), FAKES[shape], like=node, random=random))

    def split(self) -> None:
        node = self.pick(shapes=[(4,)])
        if node is not None:
            parts = self.emit(aten.split.Tensor, (node, 2), [FAKES[(2,)]] * 2, like=node)
            for index in self.draw(st.lists(st.integers(0, 1), min_size=1, max_size=2)):
                self.values.append(self.emit(operator.getitem, (parts, index), FAKES[(2,)], like=node))

    def two_results(self) -> None:
        node = self.pick(shapes=[(2, 2)])
        if node is not None:
            pair = self.emit(aten.aminmax.default, (node,), (FAKES[(2,)],) * 2, kwargs={"dim": 0})
            self.values += [self.emit(operator.getitem, (pair, index), FAKES[(2,)]) for index in (0, 1)]

    def write(self) -> None:
        node = self.pick(written=True)
        if node is not None:
            writes = frozenset({self.memory[node]})
            other = self.pick(shapes=[shape_of(node)], apart=[node])
            target, args = self.draw(
                st.sampled_from(
                    [(aten.add_.Tensor, (1.5,)), (aten.mul_.Tensor, (0.5,))]
                    + ([(aten.copy_.default, (other,)), (aten.add_.Tensor, (other,))] if other is not None else [])
                )
            )
            self.values.append(self.emit(target, (node, *args), node.meta["val"], like=node, writes=writes))

    def write_list(self) -> None:
        one = self.pick(written=True)
        two = self.pick(written=True, apart=[one]) if one is not None else None
        if two is not None:
            writes = frozenset({self.memory[one], self.memory[two]})
            self.emit(aten._foreach_add_.Scalar, ([one, two], 2.5), None, writes=writes)

    def random(self) -> None:
        node = self.pick()
        if node is not None:
            self.values.append(self.emit(aten.rand_like.default, (node,), node.meta["val"], random=True))

    def random_write(self) -> None:
        node = self.pick(written=True)
        if node is not None:
            writes = frozenset({self.memory[node]})
            value = node.meta["val"]
            self.values.append(self.emit(aten.uniform_.default, (node,), value, like=node, writes=writes, random=True))

    def start(self) -> None:
        group = self.draw(st.sampled_from(self.groups))
        kind = self.draw(st.sampled_from(["reduce", "gather", "reduce_", "gather_out", "coalesced", "coalesced_"]))
        in_place = kind in ("reduce_", "coalesced_")
        node = self.pick(written=in_place, shapes=[(2,), (4,)])
        if node is None:
            return
        twice = (2 * shape_of(node)[0],)
        if kind == "reduce":
            result = self.emit(c10d.all_reduce.default, (node, "sum", group), node.meta["val"], group=group)
            self.launch([result], [node], [])
        elif kind == "gather":
            args = (node, GROUP_SIZE, group)
            self.launch([self.emit(c10d.all_gather_into_tensor.default, args, FAKES[twice], group=group)], [node], [])
        elif kind == "reduce_":
            writes = frozenset({self.memory[node]})
            args = (node, "sum", group)
            value = node.meta["val"]
            result = self.emit(c10d.all_reduce_.default, args, value, like=node, writes=writes, group=group)
            self.launch([result], [node], [node])
        elif kind == "gather_out":
            out = self.pick(written=True, shapes=[twice], apart=[node])
            if out is not None:
                target, writes = c10d.all_gather_into_tensor_out.default, frozenset({self.memory[out]})
                args, value, kwargs = (node, GROUP_SIZE, group), FAKES[twice], {"out": out}
                result = self.emit(target, args, value, like=out, writes=writes, group=group, kwargs=kwargs)
                self.launch([result], [node, out], [out])
        else:
            self.start_coalesced(node, group, in_place)

    def start_coalesced(self, node: fx.Node, group: str, in_place: bool) -> None:
        other = self.pick(written=in_place, apart=[node], shapes=[(2,), (4,), (2, 2)])
        if other is None:
            return
        pair = [node, other]
        writes = frozenset(self.memory[one] for one in pair) if in_place else frozenset()
        target = c10d.all_reduce_coalesced_.default if in_place else c10d.all_reduce_coalesced.default
        both = self.emit(target, (pair, "sum", group), [one.meta["val"] for one in pair], writes=writes, group=group)
        elements = [
            self.emit(operator.getitem, (both, i), one.meta["val"], like=one if in_place else None)
            for i, one in enumerate(pair)
        ]
        self.lists[both] = elements
        self.launch(elements, pair, pair if in_place else [])

    def launch(self, results: list[fx.Node], read: list[fx.Node], written: list[fx.Node]) -> None:
        reads = frozenset(self.memory[node] for node in read)
        for result in results:
            arriving = frozenset({self.memory[result]}) if written else frozenset()
            self.in_flight.append(_Flight(result, reads, arriving))

    def wait(self) -> None:
        if self.in_flight:
            flight = self.draw(st.sampled_from(self.in_flight))
            self.in_flight.remove(flight)
            self.landed.append(flight)
            self.wait_for(flight)

    def wait_again(self) -> None:
        busy = {number for flight in self.in_flight for number in flight.writes}
        again = [flight for flight in self.landed if self.memory[flight.result] not in busy]
        if again:
            self.wait_for(self.draw(st.sampled_from(again)))

    def wait_for(self, flight: _Flight) -> None:
        result, value = flight.result, flight.result.meta["val"]
        effects = {"writes": flight.writes, "also_reads": flight.reads}
        self.values.append(self.emit(c10d.wait_tensor.default, (result,), value, like=result, **effects))

    def add_rewriting(self, start: fx.Node, elements: list[fx.Node]) -> None:
        """If a node writes a result of a list, every wait of that list writes what is behind all of them."""
        numbers = frozenset(self.memory[element] for element in elements)
        waits = {user for element in elements for user in element.users if user.target is c10d.wait_tensor.default}
        writers = {node for node, effects in self.effects.items() if effects.writes & numbers}
        if all(node is start or node.target is c10d.wait_tensor.default for node in writers):
            return
        behind = frozenset({-1 - len(self.memory) - list(self.lists).index(start)})
        for node, effects in self.effects.items():
            if (effects.reads | effects.writes) & numbers:
                writes = effects.writes | behind if node in waits else effects.writes
                self.effects[node] = replace(effects, reads=effects.reads | behind, writes=writes)

    def program(self, steps: int) -> Sampled:
        for index, shape in enumerate(self.draw(st.lists(st.sampled_from(list(FAKES)), min_size=1, max_size=3))):
            node = self.graph.placeholder(f"input_{index}")
            node.meta["val"] = FAKES[shape]
            self.memory[node] = len(self.memory)
            self.values.append(node)
        kinds = [self.pointwise, self.binary, self.view, self.split, self.two_results, self.write, self.write_list]
        kinds += [self.random, self.random_write, self.start, self.start, self.wait, self.wait, self.wait_again]
        for _ in range(steps):
            self.draw(st.sampled_from(kinds))()
        while self.in_flight:
            self.wait()
        for start, elements in self.lists.items():
            self.add_rewriting(start, elements)
        self.graph.output(tuple(self.values))
        inputs = tuple(Input(InputKind.INPUT, node.name) for node in self.graph.find_nodes(op="placeholder"))
        outputs = tuple(Output(OutputKind.OUTPUT, str(index)) for index in range(len(self.values)))
        groups = dict.fromkeys(self.groups, GROUP_SIZE)
        return Sampled(Program(self.graph, inputs, outputs, groups=groups), self.effects)


def shape_of(node: fx.Node) -> Shape:
    return tuple(node.meta["val"].shape)


@st.composite
def sampled_programs(draw: Callable) -> Sampled:
    """Programs of about 5 to 60 nodes."""
    groups = draw(st.sampled_from([("dp",), ("dp", "tp"), ("dp", "tp", "pp")]))
    return _Sampler(draw, groups).program(draw(st.integers(4, 45)))


@dataclass
class Machine:
    """Runs nodes one by one. A collective moves its data at its wait, and what it is writing reads as NaN before.

    A coalesced one moves the data of all its results at the wait of each, as gloo's reduce-scatter does.
    """

    pending: dict[int, Callable[[], None]] = field(default_factory=dict)
    started: dict[str, list[str]] = field(default_factory=dict)

    def run(self, program: Program, nodes: Sequence[fx.Node]) -> tuple[list[bytes], dict[str, list[str]]]:
        """The bytes of every input and result at the end, and the collectives that each group started, in order."""
        torch.manual_seed(0)
        values: dict[fx.Node, Any] = {}
        for index, node in enumerate(program.placeholders):
            values[node] = torch.linspace(0.1, 0.9, FAKES[shape_of(node)].numel()).view(shape_of(node)) + index
        for node in nodes:
            if node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = self.call(node, args, kwargs)
        seen = [*program.placeholders, *program.results]
        return [values[node].contiguous().numpy().tobytes() for node in seen], self.started

    def call(self, node: fx.Node, args: tuple, kwargs: dict[str, Any]) -> Any:
        target = node.target
        if target is c10d.wait_tensor.default:
            self.pending.pop(args[0].data_ptr(), lambda: None)()
            return args[0]
        if getattr(target, "namespace", "") != "_c10d_functional":
            return target(*args, **kwargs)
        self.started.setdefault(args[-1], []).append(node.name)
        if target is c10d.all_gather_into_tensor.default:
            return self.gather(args[0], torch.empty(2 * len(args[0])))
        if target is c10d.all_gather_into_tensor_out.default:
            return self.gather(args[0], kwargs["out"])
        if target is c10d.all_reduce_.default:
            return self.reduce(args[0].clone(), args[0])
        if target is c10d.all_reduce_coalesced_.default:
            return self.reduce_list([one.clone() for one in args[0]], args[0])
        if target is c10d.all_reduce_coalesced.default:
            return self.reduce_list(args[0], [torch.empty_like(one) for one in args[0]])
        return self.reduce(args[0], torch.empty_like(args[0]))

    def gather(self, source: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        self.pending[buffer.data_ptr()] = lambda: buffer.copy_(torch.cat([source, source * 3]))
        return buffer.fill_(float("nan"))

    def reduce(self, source: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        self.pending[buffer.data_ptr()] = lambda: buffer.copy_(source * 2)
        return buffer.fill_(float("nan"))

    def reduce_list(self, sources: list[torch.Tensor], buffers: list[torch.Tensor]) -> list[torch.Tensor]:
        def move() -> None:
            for source, buffer in zip(sources, buffers, strict=True):
                buffer.copy_(source * 2)

        for buffer in buffers:
            self.pending[buffer.data_ptr()] = move
        return [buffer.fill_(float("nan")) for buffer in buffers]
