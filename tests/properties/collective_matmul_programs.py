"""Sampled programs of gathers, matmuls and scatters in many spellings, for real ranks and for those done by hand.

A program is made from a list of numbers, each one choice, so that hypothesis shrinks it by dropping choices, and every
rank makes the same one. All values are small multiples of a power of two, which are summed exactly in any order: what
travels in pieces must keep every bit.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.communicate.compute_before_gathering import ComputeBeforeGathering
from crossfade.communicate.fuse_gathers_into_matmuls import FuseGathersIntoMatmuls
from crossfade.communicate.fuse_scatters_into_matmuls import FuseScattersIntoMatmuls
from crossfade.communicate.scatter_between_blocks import ScatterBetweenBlocks
from crossfade.graph.passes import Pass
from crossfade.graph.private import FakeTensorMode, fake_tensor
from crossfade.graph.program import Input, InputKind, Output, OutputKind, Program
from tests.properties.exchange_programs import Choices

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
GROUP = "tp"
DTYPES = {torch.float32: 2.0**24, torch.float64: 2.0**53, torch.bfloat16: 2.0**8}
"""With the number of steps from 0 up to which each is exact."""
SIZES = (4, 2, 3, 6, 1, 5, 8)


@dataclass
class Sampler:
    """Adds calls to a graph, one choice each; `most` and `step` say what values can be, so that sums stay exact."""

    choices: Choices
    ranks: int
    graph: fx.Graph = field(default_factory=fx.Graph)
    mode: FakeTensorMode = field(default_factory=FakeTensorMode)
    values: list[fx.Node] = field(default_factory=list)
    inputs: list[fx.Node] = field(default_factory=list)
    gathered: list[fx.Node] = field(default_factory=list)
    most: dict[fx.Node, float] = field(default_factory=dict)
    step: dict[fx.Node, float] = field(default_factory=dict)
    bare: dict[fx.Node, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    # nodes

    def call(self, target: Any, *args: Any, most: float = 0.0, step: float = 0.0, **kwargs: Any) -> Any:
        """One more call; values stay in the range of the first argument's unless another is given."""
        node = self.graph.call_function(target, args, kwargs)
        given, named = fx.map_arg((args, kwargs), self.bare.__getitem__)
        self.describe(node, target(*given, **named))
        first = next((one for one in node.all_input_nodes if one in self.most), None)
        self.most[node] = most or (self.most[first] if first is not None else 1.0)
        self.step[node] = step or (self.step[first] if first is not None else 1.0)
        return node

    def describe(self, node: fx.Node, made: Any) -> None:
        """Tensors without data are several times faster than fake ones."""
        cpu = torch.device("cpu")
        self.bare[node] = made
        if isinstance(made, Tensor):
            node.meta["val"] = fake_tensor(self.mode, made, cpu)
        else:
            node.meta["val"] = [fake_tensor(self.mode, one, cpu) for one in made]

    def input(self, *shape: int, alike: bool = False) -> fx.Node:
        """One more input, above everything that is there."""
        number = len(self.inputs)
        last = self.inputs[-1] if self.inputs else None
        with self.graph.inserting_after(last) if last is not None else self.graph.inserting_before():
            node = self.graph.placeholder(f"{'w' if alike else 'x'}{number}")
        self.describe(node, torch.empty(shape, dtype=self.dtype, device="meta"))
        self.most[node], self.step[node] = 2.0 if self.dtype is not torch.bfloat16 else 1.0, 1.0
        self.inputs.append(node)
        return node

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        return tuple(node.meta["val"].shape)

    def keep(self, node: fx.Node) -> fx.Node:
        self.values.append(node)
        return node

    def size(self) -> int:
        return self.choices.of(SIZES)

    def parts(self) -> int:
        """A size that all ranks have equal parts of."""
        return self.ranks * self.choices.of((1, 2, 3))

    def pick(self, where: Callable[[tuple[int, ...]], bool] = lambda shape: True) -> fx.Node | None:
        """One of the values there are, mostly a late one."""
        found = [node for node in [*self.inputs, *self.values] if where(self.shape(node))]
        return found[-1 - self.choices.below(min(len(found), 6))] if found else None

    def operand(self, *shape: int) -> fx.Node:
        """A value of a shape: one that there is, a new input, or one made from such only now."""
        if self.choices.chance(3) and (found := self.pick(lambda one: one == shape)) is not None:
            return found
        kind = self.choices.below(8)
        if kind == 4 and len(shape) == 2:
            return self.call(aten.t.default, self.input(*reversed(shape), alike=True))
        made = self.input(*shape, alike=kind != 1)
        if kind == 7:  # what no collective matmul can have sooner
            started = self.call(c10d.all_reduce.default, made, "sum", GROUP, most=2 * self.ranks)
            return self.call(c10d.wait_tensor.default, started)
        return self.call(aten.relu.default, made) if kind == 3 else made

    def contiguous(self, x: fx.Node) -> fx.Node:
        if x.meta["val"].is_contiguous():
            return x
        return self.call(aten.clone.default, x, memory_format=torch.contiguous_format)

    def fits(self, most: float, step: float) -> bool:
        return most / step <= DTYPES[self.dtype]

    def small(self, x: fx.Node) -> fx.Node:
        """The value, limited to a few whole numbers if it is not among them already."""
        if self.most[x] <= 2 and self.step[x] >= 1:
            return x
        whole = x if self.step[x] >= 1 else self.call(aten.round.default, x, step=1.0)
        return self.call(aten.clamp.default, whole, -1, 1, most=1.0, step=1.0)

    # re-layouts

    def reshaped(self, x: fx.Node, *shape: int) -> fx.Node:
        dense = x.meta["val"].is_contiguous()
        names = [aten.view, aten.reshape, aten._unsafe_view] if dense else [aten.reshape]
        return self.call(self.choices.of(names).default, x, list(shape))

    def flat(self, x: fx.Node) -> fx.Node:
        """As a matrix with its last dim."""
        return self.reshaped(x, -1, self.shape(x)[-1])

    def moved(self, x: fx.Node, source: int, target: int) -> fx.Node:
        order = [dim for dim in range(len(self.shape(x))) if dim != source]
        order.insert(target, source)
        return x if order == sorted(order) else self.call(aten.permute.default, x, order)

    def pieces(self, x: fx.Node, dim: int) -> list[fx.Node]:
        """The parts of all ranks along a dim."""
        pieces = self.call(aten.split.Tensor, x, self.shape(x)[dim] // self.ranks, dim)
        return [self.call(operator.getitem, pieces, rank) for rank in range(self.ranks)]

    def joined(self, pieces: Sequence[fx.Node], dim: int) -> fx.Node:
        return self.call(aten.cat.default, list(pieces), dim)

    # collectives

    def waited(self, start: fx.Node) -> fx.Node:
        if self.choices.chance(5):
            self.pointwise()
        done = self.call(c10d.wait_tensor.default, start)
        return self.call(c10d.wait_tensor.default, done) if self.choices.chance(8) else done

    def all_gathered(self, x: fx.Node) -> fx.Node:
        return self.waited(
            self.call(c10d.all_gather_into_tensor.default, self.contiguous(x), self.ranks, GROUP, most=self.most[x])
        )

    def gather(self, x: fx.Node, dim: int) -> fx.Node:
        """All ranks' parts along a dim, in one of many spellings, with the last rows cut off now and then."""
        shape, kind = self.shape(x), self.choices.below(6)
        whole = [*shape[:dim], self.ranks * shape[dim], *shape[dim + 1 :]]
        if kind == 1:
            apart = self.reshaped(self.all_gathered(x), self.ranks, *shape)
            result = self.reshaped(self.moved(apart, 0, dim), *whole)
        elif kind == 2:
            result = self.moved(self.all_gathered(self.moved(x, dim, 0)), 0, dim)
        elif kind == 3 and self.bare[own := self.contiguous(x)].stride(-1) == 1:  # or it has no bytes to be seen as
            sent = self.call(aten.view.dtype, own, torch.uint8)
            back = self.call(aten.view.dtype, self.all_gathered(sent), self.dtype)
            result = back if dim == 0 else self.joined(self.pieces(back, 0), dim)
        elif kind == 4:
            back = self.reshaped(self.all_gathered(self.reshaped(self.contiguous(x), -1)), self.ranks, *shape)
            rows = [self.call(aten.select.int, back, 0, rank) for rank in range(self.ranks)]
            result = self.joined(rows, dim)
        else:
            back = self.all_gathered(x)
            result = back if dim == 0 else self.joined(self.pieces(back, 0), dim)
            if dim and self.choices.chance(6):  # twice, as graphs have it where nothing merges what is alike
                self.keep(self.joined(self.pieces(back, 0), dim))
        if self.choices.chance(6) and self.shape(result)[dim] > 1:
            result = self.call(aten.slice.Tensor, result, dim, 0, self.shape(result)[dim] - 1)
        self.gathered.append(result)
        return self.keep(result)

    def scatter(self, x: fx.Node, dim: int) -> fx.Node:
        """This rank's part along a dim of the sum or mean over ranks, in one of many spellings."""
        shape, kind = self.shape(x), self.choices.below(4)
        part = [*shape[:dim], shape[dim] // self.ranks, *shape[dim + 1 :]]
        mean = self.ranks != 3 and self.choices.chance(3)
        most, step = self.most[x] * self.ranks, self.step[x] / (self.ranks if mean else 1)
        if not self.fits(most, step):
            x = self.small(x)
            most, step = self.ranks, 1 / self.ranks

        def reduced(value: fx.Node) -> fx.Node:
            args = (self.contiguous(value), "avg" if mean else "sum", self.ranks, GROUP)
            return self.waited(self.call(c10d.reduce_scatter_tensor.default, *args, most=most, step=step))

        if dim == 0 and kind < 3:
            return self.keep(reduced(x))
        if kind == 1:
            split = self.reshaped(x, *shape[:dim], self.ranks, part[dim], *shape[dim + 1 :])
            return self.keep(self.reshaped(reduced(self.moved(split, dim, 0)), *part))
        if kind == 2:
            return self.keep(self.moved(reduced(self.moved(x, dim, 0)), 0, dim))
        if kind == 3:
            stacked = self.call(aten.stack.default, self.pieces(x, dim))
            return self.keep(self.reshaped(reduced(self.reshaped(stacked, -1)), *part))
        return self.keep(reduced(self.joined(self.pieces(x, dim), 0)))

    # matmuls

    def product(self, x: fx.Node) -> fx.Node:
        """One of the matmuls that can be made with a value."""
        kinds = {2: MATRICES, 3: STACKS}.get(len(self.shape(x)), WHOLES)
        return self.choices.of(kinds)(self, x)

    def multiplied(self, target: Any, left: fx.Node, right: fx.Node, bias: fx.Node | None = None) -> fx.Node:
        """A matmul (of a linear layer's weight for aten.linear) whose sums are exact."""
        inner = self.shape(left)[-1]

        def reach() -> tuple[float, float]:
            most = self.most[left] * self.most[right] * inner + (self.most[bias] if bias is not None else 0)
            return most, self.step[left] * self.step[right] * (min(1.0, self.step[bias]) if bias is not None else 1)

        if not self.fits(reach()[0] * self.ranks, reach()[1]):
            right = self.small(right)
        if not self.fits(reach()[0] * self.ranks, reach()[1]):
            left = self.small(left)
        if bias is not None and not self.fits(reach()[0] * self.ranks, reach()[1]):
            bias = self.small(bias)
        most, step = reach()
        if bias is None:
            args = [left, right]
        else:
            args = [left, right, bias] if target is aten.linear.default else [bias, left, right]
        return self.call(target, *args, most=most, step=step)

    def bias(self, *shape: int) -> fx.Node:
        """Something that is broadcast to a shape."""
        kinds = [shape[-1:], shape, tuple(1 for _ in shape[:-1]) + shape[-1:], (*shape[:-1], 1)]
        return self.operand(*self.choices.of(kinds))

    def mm(self, x: fx.Node) -> fx.Node:
        return self.multiplied(aten.mm.default, x, self.operand(self.shape(x)[1], self.parts()))

    def mm_after(self, x: fx.Node) -> fx.Node:
        """As the right operand: its rows are summed over."""
        return self.multiplied(aten.mm.default, self.operand(self.parts(), self.shape(x)[0]), x)

    def gradient(self, x: fx.Node) -> fx.Node:
        """All rows are summed over, as in a weight's gradient."""
        rows = self.flat(x)
        turned = self.call(aten.t.default, rows)
        other = self.operand(self.shape(rows)[0], self.parts())
        if self.choices.chance(2):
            return self.multiplied(aten.mm.default, turned, other)
        return self.multiplied(aten.mm.default, self.call(aten.t.default, other), rows)

    def addmm(self, x: fx.Node) -> fx.Node:
        rows, columns = self.shape(x)[0], self.parts()
        other = self.operand(self.shape(x)[1], columns)
        return self.multiplied(aten.addmm.default, x, other, self.bias(rows, columns))

    def linear(self, x: fx.Node) -> fx.Node:
        columns = self.parts()
        weight = self.operand(columns, self.shape(x)[-1])
        bias = self.operand(columns) if self.choices.chance(2) else None
        return self.multiplied(aten.linear.default, x, weight, bias)

    def flat_mm(self, x: fx.Node) -> fx.Node:
        """A matrix of all but the last dim, and back."""
        made = self.mm(self.flat(x)) if self.choices.chance(2) else self.addmm(self.flat(x))
        return self.reshaped(made, *self.shape(x)[:-1], self.shape(made)[-1])

    def turned(self, x: fx.Node) -> fx.Node:
        """As the right operand, transposed: the result is transposed too."""
        columns = self.parts()
        flat = self.call(aten.t.default, self.flat(x))
        made = self.multiplied(aten.mm.default, self.operand(columns, self.shape(flat)[0]), flat)
        return self.reshaped(self.call(aten.t.default, made), *self.shape(x)[:-1], columns)

    def bmm(self, x: fx.Node) -> fx.Node:
        batch, rows, inner = self.shape(x)
        kind, columns = self.choices.below(5), self.parts()
        if kind == 0:
            weight = self.call(aten.expand.default, self.operand(inner, columns), [batch, inner, columns])
            return self.multiplied(aten.bmm.default, x, weight)
        if kind == 1:
            return self.multiplied(aten.bmm.default, self.operand(batch, columns, rows), x)
        if kind == 2:
            other = self.operand(batch, rows, columns)
            return self.multiplied(aten.bmm.default, self.call(aten.transpose.int, x, 1, 2), other)
        if kind == 3:
            bias = self.bias(batch, rows, columns)
            return self.multiplied(aten.baddbmm.default, x, self.operand(batch, inner, columns), bias)
        return self.multiplied(aten.bmm.default, x, self.operand(batch, inner, columns))

    def matmul(self, x: fx.Node) -> fx.Node:
        *batches, _, inner = self.shape(x)
        shape = batches if self.choices.chance(2) else [1 for _ in batches] if self.choices.chance(2) else []
        return self.multiplied(aten.matmul.default, x, self.operand(*shape, inner, self.parts()))

    def by_another(self, x: fx.Node) -> fx.Node:
        """Both operands are gathered."""
        other = self.gather(self.input(self.shape(x)[1], self.size()), 1)
        if self.choices.chance(2):
            self.keep(self.multiplied(aten.mm.default, *(self.call(aten.t.default, one) for one in (other, x))))
        return self.multiplied(aten.mm.default, x, other)

    def by_itself(self, x: fx.Node) -> fx.Node:
        """By its own transpose, or by what was made of that."""
        turned = self.call(aten.t.default, x)
        return self.multiplied(
            aten.mm.default, x, self.call(aten.neg.default, turned) if self.choices.chance(2) else turned
        )

    # steps of a program

    def new(self, dims: int) -> fx.Node:
        """This rank's part, or what was made of one."""
        return self.input(*(self.size() for _ in range(dims)))

    def source(self, dims: int) -> fx.Node:
        """Something to gather or to multiply."""
        found = self.pick(lambda shape: len(shape) == dims) if self.choices.chance(2) else None
        found = found or self.new(dims)
        return self.call(aten.relu.default, found) if self.choices.chance(5) else found

    def dims(self) -> int:
        return self.choices.of((2, 3, 2, 3, 4))

    def gather_and_multiply(self) -> None:
        x = self.source(self.dims())
        dim = self.choices.below(len(self.shape(x)))
        self.multiply(self.gather(x, dim))

    def multiply(self, whole: fx.Node | None = None) -> None:
        """One or several matmuls of a value, with something else between them or before now and then."""
        whole = whole or self.pick(lambda shape: len(shape) > 1)
        if whole is None:
            return
        if self.choices.chance(4):
            whole = self.keep(self.call(self.choices.of([aten.relu, aten.neg]).default, whole))
        for _ in range(1 + self.choices.below(3)):
            if self.choices.chance(5):
                self.choices.of([self.pointwise, self.use, self.view])()
            self.keep(self.product(whole))

    def multiply_and_scatter(self) -> None:
        made = self.product(self.source(self.dims()))
        if self.choices.chance(6):
            self.keep(made)
        if self.choices.chance(6):
            self.keep(self.call(aten.neg.default, made))
        if self.choices.chance(4) and len(self.shape(made)) > 2:
            made = self.flat(made)
        self.scatter_some(made)

    def scatter_some(self, made: fx.Node) -> None:
        dims = [dim for dim, size in enumerate(self.shape(made)) if size % self.ranks == 0]
        if dims:
            self.scatter(made, self.choices.of(dims))
        else:
            self.keep(made)

    def block(self) -> None:
        """Gathered, multiplied, activated, multiplied, scattered."""
        x = self.source(3)
        dim = self.choices.below(2)
        hidden = self.flat_mm(self.gather(x, dim)) if self.choices.chance(2) else self.linear(self.gather(x, dim))
        if self.choices.chance(2):
            hidden = self.call(aten.relu.default, hidden)
        made = self.linear(hidden) if self.choices.chance(2) else self.flat_mm(hidden)
        self.scatter(made, dim if self.shape(made)[dim] % self.ranks == 0 else 2)

    def reduce_between(self) -> None:
        """An all-reduce between matmuls, and what a residual stream has."""
        made = self.product(self.source(self.choices.of((2, 3))))
        if not self.fits(self.most[made] * self.ranks, self.step[made]):
            return
        most = self.most[made] * self.ranks
        start = self.call(c10d.all_reduce.default, self.contiguous(made), "sum", GROUP, most=most)
        y = self.keep(self.waited(start))
        if self.choices.chance(2) and self.fits(2 * most, self.step[y]):
            y = self.keep(self.call(aten.add.Tensor, y, y, most=2 * most))
        self.keep(self.product(self.call(aten.relu.default, y)))

    def scatter_value(self) -> None:
        if (x := self.pick()) is not None:
            self.scatter_some(x)

    def gather_value(self) -> None:
        if (x := self.pick(lambda shape: len(shape) > 0)) is not None:
            self.gather(x, self.choices.below(len(self.shape(x))))

    def use(self) -> None:
        """What was gathered is used elsewhere."""
        if self.gathered:
            self.keep(self.call(aten.neg.default, self.choices.of(self.gathered)))

    def pointwise(self) -> None:
        if (x := self.pick()) is not None:
            self.keep(self.call(self.choices.of([aten.neg, aten.relu, aten.abs, aten.clone]).default, x))

    def view(self) -> None:
        if (x := self.pick(lambda shape: len(shape) > 1)) is None:
            return
        dims = len(self.shape(x))
        kind = self.choices.below(4)
        if kind == 0:
            self.keep(self.flat(x))
        elif kind == 1:
            self.keep(self.moved(x, 0, dims - 1))
        elif kind == 2:
            self.keep(self.call(aten.unsqueeze.default, x, self.choices.below(dims)))
        elif self.shape(x)[0] > 1:
            self.keep(self.call(aten.slice.Tensor, x, 0, 1, self.shape(x)[0]))

    def write(self) -> None:
        """In place, within the range that values are in; nothing is on its way now."""
        if (x := self.pick()) is not None:
            self.call(self.choices.of([aten.neg_, aten.relu_, aten.zero_]).default, x)

    def program(self) -> Program:
        """The program of all choices."""
        self.dtype = self.choices.of((*[torch.float32] * 4, torch.float64, torch.bfloat16))
        steps = [self.gather_and_multiply] * 4 + [self.multiply_and_scatter] * 4 + [self.block] * 2
        steps += [self.multiply, self.reduce_between, self.scatter_value, self.gather_value, self.use]
        steps += [self.pointwise, self.view]
        if self.choices.chance(3):
            steps += [self.write] * 4
        one_in, first = 1 + self.choices.below(6), self.choices.below(6)
        self.new(2)
        while self.choices.left:
            self.choices.of(steps)()
        handed = {node for index, node in enumerate(self.values) if (index + first) % one_in == 0}
        results = [node for node in self.values if node in handed or not node.users] or self.inputs
        self.graph.output(tuple(results))
        signature = tuple(Input(InputKind.INPUT, node.name) for node in self.inputs)
        outputs = tuple(Output(OutputKind.OUTPUT, str(index)) for index in range(len(results)))
        return Program(self.graph, signature, outputs, groups={GROUP: self.ranks})


MATRICES = [Sampler.mm, Sampler.addmm, Sampler.linear, Sampler.mm_after, Sampler.gradient, Sampler.turned]
MATRICES += [Sampler.mm, Sampler.matmul, Sampler.by_another, Sampler.by_itself]
STACKS = [Sampler.linear, Sampler.flat_mm, Sampler.bmm, Sampler.gradient, Sampler.turned, Sampler.matmul, Sampler.bmm]
WHOLES = [Sampler.linear, Sampler.flat_mm, Sampler.gradient, Sampler.matmul]


def sampled_passes(choices: Choices) -> list[Pass]:
    """The passes that make collective matmuls and those that make way for them, in the pipeline's order."""
    told = [{"form": choices.of(["chunked", "ring"]), "chunks": 1 + choices.below(3)} for _ in range(2)]
    alike = ("w*",)
    return [
        ComputeBeforeGathering(),
        ScatterBetweenBlocks(alike, max_growth=choices.of([0.25, 4.0])),
        FuseGathersIntoMatmuls(**told[0]),  # type: ignore[arg-type]
        FuseScattersIntoMatmuls(**told[1]),  # type: ignore[arg-type]
    ]


def inputs_for(program: Program, rank: int) -> list[Tensor]:
    """Whole numbers, different on every rank but for those that are alike."""
    given = []
    for index, (item, node) in enumerate(program.named_inputs()):
        generator = torch.Generator().manual_seed(index * 64 + (0 if item.name.startswith("w") else rank + 1))
        value: Tensor = node.meta["val"]
        most = 1 if value.dtype is torch.bfloat16 else 2
        given.append(torch.randint(-most, most + 1, tuple(value.shape), generator=generator).to(value.dtype))
    return given
