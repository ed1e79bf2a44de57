"""Sampled functional programs with updates of inputs, and a reference that runs them, as unkind as a machine may be.

A program is drawn from a `random.Random`, made from a seed, so that ranks can draw the same one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph.private import FakeTensorMode
from crossfade.graph.program import Input, InputKind, Output, OutputKind, Program

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
F32, I16 = torch.float32, torch.int16
GROUP_SIZE = 2

POINTWISE = [aten.neg, aten.abs, aten.relu, aten.clone, aten.sgn]
SMOOTH = [aten.sin, aten.tanh, aten.sigmoid]
BINARY = [aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.copy.default]
IN_THREE = [aten.addcmul.default, aten.lerp.Tensor]


@dataclass
class Sampler:
    """Adds one random operation after another; values are described by fake tensors as torch computes them."""

    random: Random
    groups: Sequence[str] = ("dp", "tp")
    only_all_reduce: bool = False
    graph: fx.Graph = field(default_factory=fx.Graph)
    mode: FakeTensorMode = field(default_factory=FakeTensorMode)
    values: list[fx.Node] = field(default_factory=list)
    in_flight: list[fx.Node] = field(default_factory=list)
    for_later: list[fx.Node] = field(default_factory=list)

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        fakes = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = target(*fakes[0], **fakes[1])
        return node

    def keep(self, target: Any, *args: Any, **kwargs: Any) -> None:
        self.values.append(self.emit(target, *args, **kwargs))

    def pick(self, where: Callable[[Tensor], bool] = lambda value: True) -> fx.Node | None:
        """A value; recent ones more often, so that chains grow."""
        found = [node for node in self.values if where(node.meta["val"])]
        if not found:
            return None
        return self.random.choice(found[-3:] if self.random.random() < 0.5 else found)

    def like(self, node: fx.Node) -> fx.Node | None:
        shape, dtype = node.meta["val"].shape, node.meta["val"].dtype
        return self.pick(lambda value: value.shape == shape and value.dtype == dtype)

    def pointwise(self) -> None:
        if (x := self.pick()) is not None:
            smooth = SMOOTH if x.meta["val"].dtype == F32 else []
            self.keep(self.random.choice(POINTWISE + smooth).default, x)

    def binary(self) -> None:
        if (x := self.pick()) is None:
            return
        other = self.random.choice([self.like(x), 2, x])
        target = self.random.choice(BINARY if isinstance(other, fx.Node) else BINARY[:3])
        kwargs = {"alpha": 3} if target is aten.add.Tensor and self.random.random() < 0.3 else {}
        self.keep(target, x, other, **kwargs)

    def three(self) -> None:
        if (x := self.pick(lambda value: value.dtype == F32)) is not None:
            self.keep(self.random.choice(IN_THREE), x, self.like(x), self.like(x))

    def broadcast_arithmetic(self) -> None:
        row = self.pick(lambda value: value.dim() == 1 and value.dtype == F32)
        x = row and self.pick(lambda v: v.dim() == 2 and v.shape[1:] == row.meta["val"].shape and v.dtype == F32)
        if x is not None:
            self.keep(aten.add.Tensor, x, row)

    def view(self) -> None:
        if (x := self.pick(lambda value: value.dim() > 0)) is None:
            return
        value = x.meta["val"]
        size = value.shape[0]
        kinds: list[tuple] = [(aten.alias.default,), (aten.detach.default,), (aten.unsqueeze.default, 0)]
        kinds += [(aten.slice.Tensor, 0, size // 2, size), (aten.slice.Tensor, 0, 0, max(size // 2, 1))]
        kinds += [(aten.reshape.default, [-1]), (aten.dropout.default, 0.5, False)]
        if value.dim() == 2:
            kinds += [(aten.t.default,), (aten.select.int, 1, 0), (aten.t.default,)]
        if value.is_contiguous() and value.dim() == 1:
            kinds += [(aten.view.default, [1, -1])]
            kinds += [(aten.expand.default, [2, size])]
            kinds += [(aten.view.default, [2, size // 2])] if size % 2 == 0 else []
            kinds += [(aten.view.dtype, I16)] if self.may_reinterpret(value) else []
            kinds += [(aten.unfold.default, 0, 2, 1)] if size >= 2 else []
        if value.numel() <= 64 and value.dim() <= 3:
            target, *args = self.random.choice(kinds)
            self.keep(target, x, *args)

    def may_reinterpret(self, value: Tensor) -> bool:
        return value.dtype == F32 and value.stride(-1) == 1 and not self.only_all_reduce

    def reduce(self) -> None:
        if (x := self.pick(lambda value: value.dim() > 0 and value.dtype == F32)) is not None:
            target = self.random.choice([aten.sum.dim_IntList, aten.mean.dim, aten.amax.default])
            self.keep(target, x, [0], self.random.random() < 0.5)

    def matmul(self) -> None:
        x = self.pick(lambda value: value.dim() == 2 and value.dtype == F32)
        if x is None:
            return
        inner, rows = x.meta["val"].shape[1], x.meta["val"].shape[0]
        y = self.pick(lambda v: v.dim() == 2 and v.shape[0] == inner and v.dtype == F32)
        if y is None:
            return
        bias = self.pick(lambda v: tuple(v.shape) == (rows, y.meta["val"].shape[1]) and v.dtype == F32)
        if bias is not None and self.random.random() < 0.6:
            self.keep(aten.addmm.default, bias, x, y)
        else:
            self.keep(aten.mm.default, x, y)

    def not_pointwise(self) -> None:
        if (x := self.pick(lambda value: value.dim() > 0 and value.dtype == F32)) is not None:
            self.keep(aten.cumsum.default, x, 0)

    def split(self) -> None:
        x = self.pick(lambda value: value.dim() > 0 and value.shape[0] >= 2)
        if x is not None:
            size = x.meta["val"].shape[0]
            parts = self.emit(aten.split_with_sizes.default, x, [1, size - 1])
            for index in self.random.choices([0, 1], k=self.random.randint(1, 3)):
                self.keep(operator.getitem, parts, index)

    def two_results(self) -> None:
        x = self.pick(lambda value: value.dim() > 0 and value.dtype == F32 and value.numel() > 1)
        if x is not None:
            pair = self.emit(aten.aminmax.default, x, dim=0)
            self.values += [self.emit(operator.getitem, pair, index) for index in (0, 1)]

    def concatenate(self) -> None:
        found = [self.pick(lambda value: value.dtype == F32) for _ in range(self.random.randint(1, 3))]
        found = [x for x in found if x is not None]
        if not found:
            return
        flat = [self.emit(aten.reshape.default, x, [-1]) for x in found]
        cat = self.emit(aten.cat.default, flat)
        if self.random.random() < 0.6:
            scaled = self.emit(aten.mul.Tensor, cat, 0.5) if self.random.random() < 0.5 else cat
            self.launch(c10d.all_reduce.default, scaled, "sum", self.random.choice(self.groups))
        else:
            self.values.append(cat)

    def rand(self) -> None:
        if (x := self.pick(lambda value: value.dtype == F32)) is not None:
            self.keep(aten.rand_like.default, x)

    def start(self) -> None:
        group = self.random.choice(self.groups)
        if (x := self.pick(lambda value: value.dtype == F32)) is None:
            return
        kind = self.random.random()
        if kind < 0.75 or self.only_all_reduce:
            op = self.random.choice(["sum", "sum", "sum", "max"] + ([] if self.only_all_reduce else ["avg"]))
            self.launch(c10d.all_reduce.default, x, op, group)
        elif kind < 0.85 and x.meta["val"].dim() > 0:
            self.launch(c10d.all_gather_into_tensor.default, x, GROUP_SIZE, group)
        elif kind < 0.92:
            self.launch(c10d.broadcast.default, x, 0, group)
        elif x.meta["val"].is_contiguous():  # torch's own metadata is wrong for others
            pair = [x, x]
            both = self.emit(c10d.all_reduce_coalesced.default, pair, "sum", group)
            self.in_flight += [self.emit(operator.getitem, both, index) for index in (0, 1)]

    def launch(self, target: Any, *args: Any) -> None:
        self.in_flight.append(self.emit(target, *args))
        if self.random.random() < 0.6:
            self.wait()

    def wait(self) -> None:
        if self.in_flight:
            result = self.in_flight.pop(self.random.randrange(len(self.in_flight)))
            where = self.for_later if self.random.random() < 0.7 else self.values  # as gradients are: used at the end
            where.append(self.emit(c10d.wait_tensor.default, result))
            if self.random.random() < 0.1:
                where.append(self.emit(c10d.wait_tensor.default, result))

    def program(self, steps: int) -> Program:
        shapes = [(4,), (2, 2), (4, 2), (6,), (3,)]
        inputs = []
        for index in range(self.random.randint(1, 4)):
            node = self.graph.placeholder(f"input_{index}")
            with self.mode:
                node.meta["val"] = torch.empty(self.random.choice(shapes))
            self.values.append(node)
            inputs.append(node)
        kinds = [self.pointwise, self.pointwise, self.binary, self.binary, self.three, self.view, self.view]
        kinds += [
            self.reduce,
            self.matmul,
            self.split,
            self.two_results,
            self.concatenate,
            self.start,
            self.start,
            self.start,
        ]
        kinds += [self.wait, self.not_pointwise, self.broadcast_arithmetic, self.rand]
        kinds += [self.start] * 6 if self.only_all_reduce else []
        for _ in range(steps):
            self.random.choice(kinds)()
        while self.in_flight:
            self.wait()
        self.values += self.for_later
        for _ in range(self.random.randint(0, 6)):
            self.random.choice([self.pointwise, self.binary, self.view, self.split])()
        return self.returned(inputs)

    def returned(self, inputs: list[fx.Node]) -> Program:
        """Some values as results, and new values for some inputs: often the end of a chain from the input itself."""
        outputs, results = [], []
        for node in inputs:
            if self.random.random() < 0.7:
                for _ in range(self.random.randint(0, 2)):
                    self.binary_from(node)
                shape, dtype = node.meta["val"].shape, node.meta["val"].dtype
                fits = [v for v in self.values if v.meta["val"].shape == shape and v.meta["val"].dtype == dtype]
                outputs.append(Output(OutputKind.UPDATE, node.name))
                results.append(fits[-1] if self.random.random() < 0.5 else self.random.choice(fits))
        some = self.random.sample(self.values, min(len(self.values), self.random.randint(0, 4)))
        some += [self.values[-1], *self.for_later]
        outputs += [Output(OutputKind.OUTPUT, str(index)) for index in range(len(some))]
        self.graph.output((*results, *some))
        signature = tuple(Input(InputKind.PARAMETER, node.name) for node in inputs), tuple(outputs)
        return Program(self.graph, *signature, groups=dict.fromkeys(self.groups, GROUP_SIZE))

    def binary_from(self, node: fx.Node) -> None:
        shape, dtype = node.meta["val"].shape, node.meta["val"].dtype
        same = [v for v in self.values if v.meta["val"].shape == shape and v.meta["val"].dtype == dtype]
        last = next((v for v in reversed(same) if v.args and v.args[0] is node), node)
        self.keep(self.random.choice([aten.add.Tensor, aten.mul.Tensor]), last, self.random.choice(same))


def sample(random: Random, *, groups: Sequence[str] = ("dp", "tp"), only_all_reduce: bool = False) -> Program:
    """One program of about 5 to 60 nodes."""
    chosen = groups[: random.randint(1, len(groups))]
    return Sampler(random, chosen, only_all_reduce).program(random.randint(3, 40))


def first_inputs(program: Program) -> dict[str, Tensor]:
    """Values for the inputs; workspaces hold garbage."""
    made = {}
    for index, (item, node) in enumerate(program.named_inputs()):
        value = node.meta["val"]
        steps = torch.linspace(-0.9, 0.8, max(value.numel(), 2))[: value.numel()].view(value.shape).clone()
        made[item.name] = steps + index / 8 if item.kind is not InputKind.WORKSPACE else steps.fill_(float("nan"))
    return made


@dataclass
class Ran:
    """What one step left: results as returned, and which of them share memory with what."""

    results: list[Tensor]
    shared: set[tuple[str, str]]

    def bytes(self) -> list[bytes]:
        return [result.contiguous().numpy().tobytes() for result in self.results]


@dataclass
class Machine:
    """Runs a program on one process. Collectives read and move their data at the wait; before, results read as NaN."""

    pending: dict[int, Callable[[], Any]] = field(default_factory=dict)

    def step(self, program: Program, inputs: dict[str, Tensor], seed: int) -> Ran:
        """One run; updates that the program returns are applied by hand after it."""
        torch.manual_seed(seed)
        values: dict[fx.Node, Any] = {node: inputs[item.name] for item, node in program.named_inputs()}
        for node in program.graph.nodes:
            if node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = self.call(node.target, args, kwargs)
        assert not self.pending
        pairs = [(out, values[value]) for out, value in program.named_results()]
        results = {out.name: value for out, value in pairs if out.kind is not OutputKind.UPDATE}
        updates = {out.name: value.clone() for out, value in pairs if out.kind is OutputKind.UPDATE}
        shared = _shared(results, inputs)
        frozen = [_detached(name, value, shared) for name, value in results.items()]
        for name, value in updates.items():
            inputs[name].copy_(value)
        return Ran(frozen, shared)

    def call(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if target is c10d.wait_tensor.default:
            self.pending.pop(_key(args[0]), lambda: None)()
            return args[0]
        if getattr(target, "namespace", "") != "_c10d_functional":
            return target(*args, **kwargs)
        name = target._schema.name.split("::")[1]
        if name == "all_gather_into_tensor":
            buffer = args[0].new_empty(GROUP_SIZE * args[0].shape[0], *args[0].shape[1:])
            return self.start(buffer, lambda: torch.cat([args[0], args[0] * 3]))
        if name.startswith("all_reduce_coalesced"):
            return [self.exchange(one, args[1], name.endswith("_")) for one in args[0]]
        return self.exchange(args[0], args[1], name.endswith("_"))

    def exchange(self, source: Tensor, op: Any, in_place: bool) -> Tensor:
        factor = {"sum": 2, "avg": 1.5, "max": 1}.get(op, 4)
        if in_place:
            assert source.is_contiguous()
            before = source.clone()
            return self.start(source, lambda: before * factor)
        return self.start(torch.empty(source.shape, dtype=source.dtype), lambda: source * factor)

    def start(self, buffer: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        self.pending[_key(buffer)] = lambda: buffer.copy_(compute())
        return buffer.fill_(float("nan"))


def _key(tensor: Tensor) -> int:
    return tensor.data_ptr() or id(tensor)


def _detached(name: str, value: Tensor, shared: set[tuple[str, str]]) -> Tensor:
    """Results that are inputs would change with them when updates are applied: keep what was returned."""
    return value.clone() if any(a == name and b.startswith("input") for a, b in shared) else value


def _shared(results: dict[str, Tensor], inputs: dict[str, Tensor]) -> set[tuple[str, str]]:
    everything = [*results.items(), *inputs.items()]
    pairs = set()
    for index, (name, value) in enumerate(results.items()):
        for other, tensor in everything[index + 1 :]:
            if _overlap(value, tensor):
                pairs.add((name, other))
    return pairs


def _overlap(a: Tensor, b: Tensor) -> bool:
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr() or not a.numel() or not b.numel():
        return False
    (a_start, a_end), (b_start, b_end) = _span(a), _span(b)
    return a_start < b_end and b_start < a_end


def _span(tensor: Tensor) -> tuple[int, int]:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()
