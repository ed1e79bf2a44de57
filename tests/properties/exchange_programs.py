"""Sampled programs full of collectives, for real ranks: several groups, dtypes, reductions, shapes and spellings.

A program is made from a list of numbers, each one choice, so that hypothesis shrinks it by dropping choices, and every
rank makes the same one. All values are small multiples of a quarter: their sums are exact in any order, so that what
regroups collectives must keep every bit.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import fx

from crossfade.communicate.add_before_reducing import AddBeforeReducing
from crossfade.communicate.bucket_all_gathers import BucketAllGathers
from crossfade.communicate.bucket_all_reduces import BucketAllReduces
from crossfade.communicate.bucket_plan import MB
from crossfade.communicate.bucket_reduce_scatters import BucketReduceScatters
from crossfade.communicate.lower_reduce_scatters import LowerReduceScatters
from crossfade.communicate.merge_duplicate_collectives import MergeDuplicateCollectives
from crossfade.communicate.raise_launches import RaiseLaunches
from crossfade.communicate.scatter_sliced_reductions import ScatterSlicedReductions
from crossfade.communicate.sink_waits import SinkWaits
from crossfade.graph.passes import Pass
from crossfade.graph.private import FakeTensorMode
from crossfade.graph.program import Input, InputKind, Output, OutputKind, Program

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
F32, BF16, F64, I64 = torch.float32, torch.bfloat16, torch.float64, torch.int64
DTYPES = (F32, F32, F32, BF16, F64, I64)
FLOATS = (F32, BF16, F64)
SHAPES = ((4,), (8,), (4, 3), (8, 1), (4, 2, 2), (5,), (12,), (1, 4), (16,))
LARGEST = 8.0
"""Values stay within this before they are summed: 8 in quarters, times four ranks, fits bf16's eight bits."""

Item = TypeVar("Item")


class Choices:
    """Numbers read as choices; when they run out, the first of everything."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self._numbers: Iterator[int] = iter(numbers)
        self.left = True

    def below(self, end: int) -> int:
        number = next(self._numbers, None)
        self.left = number is not None
        return (number or 0) % end

    def of(self, items: Sequence[Item]) -> Item:
        return items[self.below(len(items))]

    def chance(self, one_in: int) -> bool:
        return self.below(one_in) == one_in - 1


@dataclass
class Sampler:
    """Adds one operation a choice; `positions` is this rank's place in each group, of the sizes `groups`."""

    choices: Choices
    groups: Mapping[str, int]
    positions: Mapping[str, int]
    graph: fx.Graph = field(default_factory=fx.Graph)
    mode: FakeTensorMode = field(default_factory=FakeTensorMode)
    values: list[fx.Node] = field(default_factory=list)
    results: list[fx.Node] = field(default_factory=list)
    in_flight: list[fx.Node] = field(default_factory=list)
    launched: list[tuple[Any, tuple[Any, ...]]] = field(default_factory=list)
    largest: dict[fx.Node, float] = field(default_factory=dict)

    def emit(self, target: Any, *args: Any, largest: float, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        fakes = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = target(*fakes[0], **fakes[1])
        self.largest[node] = largest
        return node

    def keep(self, target: Any, *args: Any, largest: float, **kwargs: Any) -> fx.Node:
        self.values.append(self.emit(target, *args, largest=largest, **kwargs))
        return self.values[-1]

    def pick(self, where: Any = lambda value: True) -> fx.Node | None:
        found = [node for node in self.values if where(node.meta["val"])]
        return found[-1 - self.choices.below(len(found))] if found else None

    def like(self, node: fx.Node) -> fx.Node:
        one = node.meta["val"]
        return self.pick(lambda value: value.shape == one.shape and value.dtype == one.dtype) or node

    def small(self, node: fx.Node) -> fx.Node:
        """The value, limited if sums of it could lose a bit: mostly left as it is, so that waits feed collectives."""
        wide = node.meta["val"].dtype is not BF16 and self.largest[node] <= 512
        if self.largest[node] <= LARGEST or (wide and not self.choices.chance(4)):
            return node
        return self.emit(aten.clamp.default, node, -2, 2, largest=2.0)

    def limited(self, node: fx.Node) -> fx.Node:
        """The value, in the range that every dtype holds exactly."""
        return node if self.largest[node] <= LARGEST else self.emit(aten.clamp.default, node, -2, 2, largest=2.0)

    # computation

    def negate(self) -> None:
        if (x := self.pick()) is not None:
            self.keep(self.choices.of([aten.neg, aten.abs]).default, x, largest=self.largest[x])

    def add(self) -> None:
        if (x := self.pick()) is not None:
            x, y = self.small(x), self.small(self.like(x))
            self.keep(self.choices.of([aten.add, aten.sub]).Tensor, x, y, largest=self.largest[x] + self.largest[y])

    def convert(self) -> None:
        if (x := self.pick(lambda value: value.dtype.is_floating_point)) is not None:
            self.keep(aten._to_copy.default, self.limited(x), dtype=self.choices.of(FLOATS), largest=LARGEST)

    def view(self) -> None:
        if (x := self.pick(lambda value: value.dim() > 0)) is None:
            return
        kinds: list[tuple[Any, ...]] = [(aten.reshape.default, [-1]), (aten.unsqueeze.default, 0)]
        kinds += [(aten.t.default,)] if x.meta["val"].dim() == 2 else []
        rows = x.meta["val"].shape[0]
        # never a rank's own part of a group, which ScatterSlicedReductions is promised to be sliced on every rank
        kinds += [(aten.slice.Tensor, 0, 0, rows - 1)] if rows > 2 else []
        target, *args = self.choices.of(kinds)
        self.keep(target, x, *args, largest=self.largest[x])

    def write(self) -> None:
        if (x := self.pick(lambda value: value.dtype.is_floating_point)) is not None:
            x = self.limited(x)
            itself = not self.in_flight and self.largest[x] > 4 and self.choices.chance(2)  # nobody is reading it now
            copy = x if itself else self.keep(aten.clone.default, x, largest=LARGEST + 1)
            self.largest[copy] = LARGEST + 1
            self.emit(aten.add_.Tensor, copy, 1, largest=LARGEST + 1)

    # communication

    def launch(self, target: Any, *args: Any) -> None:
        self.launched.append((target, args))
        self.in_flight.append(self.emit(target, *args, largest=4 * self.largest[args[0]]))
        if not self.choices.chance(3):
            self.wait()

    def wait(self) -> None:
        if self.in_flight:
            started = self.in_flight.pop(self.choices.below(len(self.in_flight)))
            self.keep(c10d.wait_tensor.default, started, largest=self.largest[started])

    def burst(self) -> None:
        """Several alike, as gradients are: what they give is handed out, now and then used early, not computed with."""
        group, kind = self.group(), self.choices.of((0, 1, 2))
        size = self.groups[group]
        for _ in range(2 + self.choices.below(4)):
            x = self.operand()
            if x is None or not x.meta["val"].is_contiguous() or (kind == 2 and x.meta["val"].shape[0] % size):
                continue
            calls = [
                (c10d.all_reduce.default, x, "sum", group),
                (c10d.all_gather_into_tensor.default, x, size, group),
                (c10d.reduce_scatter_tensor.default, x, "sum", size, group),
            ]
            target, *args = calls[kind]
            most = 4 * self.largest[x]
            started = self.emit(target, *args, largest=most)
            done = self.emit(c10d.wait_tensor.default, started, largest=most)
            handed = [done, done, self.emit(aten.neg.default, done, largest=most)]
            handed.append(self.emit(aten.unsqueeze.default, done, 0, largest=most))
            self.results.append(self.choices.of(handed))

    def operand(self) -> fx.Node | None:
        """What to communicate: as it is, divided or converted just for that."""
        x = self.pick(lambda value: value.dim() > 0)
        if x is None:
            return None
        x = self.small(x)
        floating = x.meta["val"].dtype.is_floating_point
        if floating and self.choices.chance(3):
            halved = self.emit(aten.clamp.default, x, -2, 2, largest=2.0)
            whole = self.emit(aten.round.default, halved, largest=2.0)  # quarters stay quarters
            x = self.emit(aten.div.Tensor, whole, self.choices.of([2, 4]), largest=1.0)
        if floating and self.choices.chance(3):
            x = self.emit(aten._to_copy.default, self.limited(x), dtype=self.choices.of(FLOATS), largest=LARGEST)
        return x

    def all_reduce(self) -> None:
        if (x := self.operand()) is not None:
            reduce_op = self.choices.of(["sum", "sum", "sum", "max", "min"])
            self.launch(c10d.all_reduce.default, x, reduce_op, self.group())

    def all_gather(self) -> None:
        if (x := self.operand()) is not None and x.meta["val"].is_contiguous():
            group = self.group()
            self.launch(c10d.all_gather_into_tensor.default, x, self.groups[group], group)

    def reduce_scatter(self) -> None:
        group = self.group()
        size = self.groups[group]
        x = self.operand()
        if x is not None and x.meta["val"].shape[0] % size == 0 and x.meta["val"].is_contiguous():
            reduce_op = self.choices.of(["sum", "sum", "max"])
            self.launch(c10d.reduce_scatter_tensor.default, x, reduce_op, size, group)

    def again(self) -> None:
        if self.launched:
            target, args = self.choices.of(self.launched)
            self.launch(target, *args)

    def in_place(self) -> None:
        if (x := self.operand()) is not None:
            most = self.largest[x]
            copy = self.emit(aten.clone.default, x, memory_format=torch.contiguous_format, largest=most)
            self.in_flight.append(self.emit(c10d.all_reduce_.default, copy, "sum", self.group(), largest=4 * most))
            self.wait()

    def coalesced(self) -> None:
        x = self.operand()
        if x is not None and x.meta["val"].is_contiguous():
            most = 4 * self.largest[x]
            pair = self.emit(c10d.all_reduce_coalesced.default, [x, x], "sum", self.group(), largest=most)
            self.in_flight += [self.emit(operator.getitem, pair, index, largest=most) for index in (0, 1)]

    def own_slice(self) -> None:
        group = self.group()
        size = self.groups[group]
        x = self.operand()
        if x is not None and x.meta["val"].shape[0] % size == 0:
            part, place = x.meta["val"].shape[0] // size, self.positions[group]
            most = 4 * self.largest[x]
            started = self.emit(c10d.all_reduce.default, x, "sum", group, largest=most)
            whole = self.emit(c10d.wait_tensor.default, started, largest=most)
            self.keep(aten.slice.Tensor, whole, 0, place * part, (place + 1) * part, largest=most)

    def sum_of_sums(self) -> None:
        if (x := self.operand()) is None:
            return
        y, group, waits = self.small(self.like(x)), self.group(), []
        for one in (x, y):
            started = self.emit(c10d.all_reduce.default, one, "sum", group, largest=4 * self.largest[one])
            waits.append(self.emit(c10d.wait_tensor.default, started, largest=4 * self.largest[one]))
        self.keep(aten.add.Tensor, *waits, largest=4 * (self.largest[x] + self.largest[y]))

    def group(self) -> str:
        return self.choices.of(list(self.groups))

    def kinds(self) -> list[Callable[[], None]]:
        kinds = [self.all_reduce, self.all_gather, self.reduce_scatter, self.burst, self.burst]
        kinds += [self.negate, self.add, self.convert, self.view, self.write, self.wait]
        return [*kinds, self.again, self.in_place, self.coalesced, self.own_slice, self.sum_of_sums]

    def returned(self, inputs: list[fx.Node]) -> list[fx.Node]:
        return [node for node in self.values if node.op == "call_function"][-12:] + self.results or inputs

    def program(self) -> Program:
        inputs = []
        for index in range(1 + self.choices.below(5)):
            node = self.graph.placeholder(f"x{index}")
            with self.mode:
                node.meta["val"] = torch.empty(self.choices.of(SHAPES), dtype=self.choices.of(DTYPES))
            self.largest[node] = 2.0
            inputs.append(node)
        self.values += inputs
        kinds = self.kinds()
        while self.choices.left:
            self.choices.of(kinds)()
        while self.in_flight:
            self.wait()
        results = self.returned(inputs)
        self.graph.output(tuple(results))
        signature = tuple(Input(InputKind.INPUT, node.name) for node in inputs)
        outputs = tuple(Output(OutputKind.OUTPUT, str(index)) for index in range(len(results)))
        return Program(self.graph, signature, outputs, groups=dict(self.groups))


def sampled_passes(choices: Choices, groups: Mapping[str, int], positions: Mapping[str, int]) -> list[Pass]:
    """Every communication pass, each with options of its own, in the order of the pipeline."""
    buckets = (BucketAllGathers, BucketReduceScatters, BucketAllReduces)
    options: list[dict[str, Any]] = [
        {
            "cap_mb": choices.of([1.0, 64 / MB, (32 / MB, 128 / MB)]),
            "packing": choices.of(["program", "reversed", "largest-first"]),
            "mode": choices.of(["auto", "concat", "copy-kernel", "coalesced"]),
            "fold": not choices.chance(4),
        }
        for _ in buckets
    ]
    gathers, scatters, reductions = (one(**given) for one, given in zip(buckets, options, strict=True))
    mixed = BucketAllGathers(**options[0], mixed_dtypes=True)
    return [
        MergeDuplicateCollectives(hold=choices.chance(2)),
        AddBeforeReducing(),
        ScatterSlicedReductions(positions=tuple(positions.items())),
        mixed if choices.chance(2) else gathers,
        scatters,
        reductions,
        LowerReduceScatters(groups=tuple(groups), piece_mb=choices.of([1.0, 16 / MB])),
        RaiseLaunches(gathers=choices.chance(2)),
        SinkWaits(),
    ]


def inputs_for(program: Program, rank: int) -> list[torch.Tensor]:
    """Whole numbers from -2 to 2, different on every rank."""
    generator = torch.Generator().manual_seed(rank)
    values = [node.meta["val"] for node in program.placeholders]
    return [torch.randint(-2, 3, tuple(v.shape), generator=generator).to(v.dtype) for v in values]
