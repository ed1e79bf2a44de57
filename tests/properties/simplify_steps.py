"""The steps of sampled programs: each writes what some rule looks for, and as often a near miss of it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from crossfade.graph.effects import memory_of
from tests.properties.simplify_math_steps import MathSteps
from tests.properties.simplify_values import (
    BOOL,
    END,
    F32,
    I32,
    I64,
    Unfit,
    aten,
    overlaps,
    prims,
)


class Steps(MathSteps):
    """What changes shapes, dtypes and memory, and little else."""

    # ------------------------------------------------------------------------------------- nothing done, or hardly

    def slice(self) -> None:
        x = self.pick(lambda value: value.dim() > 0)
        dim = self.dim(x)
        size = self.size(x, dim)
        last = size - 1 if isinstance(size, int) else self.emit(operator.sub, size, 1)
        end = self.random.choice([size, END, size, last])
        start = self.random.choice([0, 0, 0, None, 1])
        self.keep(aten.slice.Tensor, x, dim, start, end, *([2] if self.chance(0.15) else []))

    def slice_scatter(self) -> None:
        x = self.pick(lambda value: value.dim() > 0)
        dim = self.dim(x)
        start, end = self.random.choice([(0, END), (0, self.size(x, dim)), (1, END), (None, None)])
        part = self.emit(aten.slice.Tensor, x, dim, start, end)
        self.keep(aten.slice_scatter.default, x, self.like(part) if self.chance(0.7) else part, dim, start, end)

    def untouched(self) -> None:
        """What may leave its input as it is."""
        x = self.pick()
        value = x.meta["val"]
        ones = [1] * value.dim()
        once = self.random.choice([1, 1, 1, 2])
        kinds: list[tuple[Any, ...]] = [
            (aten.alias.default, x),
            (aten.detach.default, x),
            (aten.clone.default, x),
            (aten.clone.default, x),
            (aten.repeat.default, x, [*ones[1:], once] if ones else []),
            (aten.constant_pad_nd.default, x, self.random.choice([[0, 0], [0, 0], [0, 1], [0]])),
            (aten.expand.default, x, self.sizes(x)),
            (aten.permute.default, x, self.random.sample(range(value.dim()), value.dim())),
            (aten.permute.default, x, list(range(value.dim()))),
            (aten.cat.default, [x]),
            (aten.copy.default, self.like(x), self.like(x)),
            (aten.round.default, x),
            (aten.ceil.default, x),
            (aten.pow.Tensor_Scalar, x, self.random.choice([1, 1, 2, 1.0])),
            (aten.lift_fresh_copy.default, x),
        ]
        self.keep(*self.random.choice(kinds))

    def chosen(self) -> None:
        """A choice, sometimes between the same."""
        x = self.pick(lambda value: not value.dtype.is_complex)
        self.keep(aten.where.self, self.comparison(x), x, x if self.chance(0.5) else self.like(x))

    def neutral(self) -> None:
        """Arithmetic with zeros and ones: exact for some dtypes and signs only."""
        x = self.pick(lambda value: value.dtype != BOOL)
        target, number = self.random.choice(
            [
                (aten.add.Tensor, 0),
                (aten.add.Tensor, 0.0),
                (aten.sub.Tensor, 0),
                (aten.mul.Tensor, 1),
                (aten.mul.Tensor, 1.0),
                (aten.div.Tensor, 1),
                (aten.mul.Tensor, 0),
                (aten.mul.Tensor, -1),
            ]
        )
        if self.chance(0.5):
            self.keep(target, x, number)
            return
        dtype = x.meta["val"].dtype if self.chance(0.7) else self.dtype()
        shape = self.random.choice([self.sizes(x), [], [1]])
        self.keep(target, x, self.emit(aten.full.default, shape, number, dtype=dtype))

    def undone(self) -> None:
        """A step and its inverse."""
        x = self.pick(lambda value: value.dim() > 0)
        value = x.meta["val"]
        dim = self.dim(x)
        match self.random.randrange(6):
            case 0:
                other = self.dim(x)
                first = self.keep(aten.transpose.int, x, dim, other)
                self.keep(aten.transpose.int, first, *((other, dim) if self.chance(0.7) else (0, -1)))
            case 1:
                first = self.keep(aten.unsqueeze.default, x, dim)
                self.keep(aten.squeeze.dim, first, dim if self.chance(0.7) else 0)
            case 2:
                self.keep(aten.neg.default, self.keep(aten.neg.default, x))
            case 3:
                order = self.random.sample(range(value.dim()), value.dim())
                back = [order.index(index) for index in range(value.dim())]
                self.keep(aten.permute.default, self.keep(aten.permute.default, x, order), back)
            case 4:
                self.keep(aten.t.default, self.keep(aten.t.default, x))
            case _:
                self.keep(aten.view.dtype, self.keep(aten.view.dtype, x, I32), value.dtype)

    def conversions(self) -> None:
        """Chains of dtypes."""
        x = self.pick(lambda value: not value.dtype.is_complex)
        if self.chance(0.3):
            there = self.keep(aten._to_copy.default, x, dtype=self.dtype())
            self.keep(aten._to_copy.default, there, dtype=x.meta["val"].dtype)
            return
        for _ in range(self.random.randint(1, 3)):
            dtype = x.meta["val"].dtype if self.chance(0.3) else self.dtype()
            match self.random.randrange(4):
                case 0:
                    x = self.keep(aten._to_copy.default, x, dtype=dtype)
                case 1:
                    x = self.keep(prims.convert_element_type.default, x, dtype)
                case 2:
                    x = self.keep(aten.to.dtype, x, dtype)
                case _:
                    x = self.keep(aten._to_copy.default, x, device=torch.device("cpu"))

    def shapes(self) -> None:
        """Chains of views, in all their spellings."""
        x = self.pick()
        for _ in range(self.random.randint(1, 3)):
            target = self.random.choice([aten.view.default, aten.reshape.default, aten._unsafe_view.default])
            x = self.keep(target, x, self.other_shape(x))

    def other_shape(self, x: fx.Node) -> list[Any]:
        value = x.meta["val"]
        shape = self.sizes(x)
        choices: list[list[Any]] = [shape, [-1], [1, *shape], [*shape, 1], [-1, *shape[1:]] if shape else [1]]
        if value.dim() >= 2:
            choices += [[-1, shape[-1]], [shape[0], -1], [*shape[:-2], -1]]
        if value.dim() == 1 and isinstance(shape[0], int) and shape[0] % 2 == 0:
            choices += [[2, -1], [-1, 2], [shape[0] // 2, 2]]
        return self.random.choice(choices)

    # --------------------------------------------------------------------------------------- cat, split and slice

    def pieces(self, x: fx.Node, dim: int) -> list[fx.Node]:
        """A value taken apart along a dim: all of it, and more rarely nearly all."""
        size = x.meta["val"].shape[dim]
        if not isinstance(size, int) or not size:
            raise Unfit("no size to split")
        if self.chance(0.3):
            step = self.random.randint(1, size)
            target = self.random.choice([aten.split.Tensor, aten.unsafe_split.Tensor])
            whole = self.emit(target, x, step, dim)
        elif self.chance(0.4):
            cuts = sorted(self.random.randint(0, size) for _ in range(self.random.randint(0, 2)))
            bounds = [0, *cuts, size]
            ends = [b if b < size or self.chance(0.5) else END for b in bounds[1:]]
            return [self.emit(aten.slice.Tensor, x, dim, a, b) for a, b in zip(bounds[:-1], ends, strict=True)]
        else:
            cut = self.random.randint(0, size)
            parts = self.random.choice([[cut, size - cut], [size], [1] * size, [cut, 0, size - cut]])
            whole = self.emit(aten.split_with_sizes.default, x, parts, dim)
        return [self.emit(operator.getitem, whole, index) for index in range(len(whole.meta["val"]))]

    def taken_apart(self) -> None:
        """Pieces put together again: in order, in another one, or not all."""
        x = self.pick(lambda value: value.dim() > 0)
        dim = self.dim(x)
        parts = self.pieces(x, dim)
        if self.chance(0.3):
            self.values += self.random.sample(parts, min(2, len(parts)))
        if self.chance(0.2):
            self.random.shuffle(parts)
        if self.chance(0.15):
            parts = parts[1:]
        elif self.chance(0.1):
            parts.append(self.random.choice(parts))
        elif self.chance(0.1):
            parts.append(self.pick(lambda value: value.dim() == x.meta["val"].dim()))
        self.keep(aten.cat.default, parts, dim if self.chance(0.85) else 0)

    def put_together(self) -> None:
        """Values put together, and taken apart where they meet, or beside it."""
        x = self.pick(lambda value: value.dim() > 0)
        dim = self.dim(x)
        parts = [
            x,
            *(
                self.like(x) if self.chance(0.8) else self.pick(lambda value: value.dim() == x.meta["val"].dim())
                for _ in range(self.random.randint(0, 2))
            ),
        ]
        whole = self.keep(aten.cat.default, parts, dim)
        sizes = [part.meta["val"].shape[dim] for part in parts]
        if not all(isinstance(size, int) for size in sizes):
            raise Unfit("no sizes to split")
        if self.chance(0.2) and sizes[0]:
            sizes = [sizes[0] - 1, *sizes[1:-1], sizes[-1] + 1] if len(sizes) > 1 else sizes
        match self.random.randrange(3):
            case 0:
                split = self.emit(aten.split_with_sizes.default, whole, sizes, dim)
                wanted = self.random.sample(range(len(sizes)), self.random.randint(1, len(sizes)))
                self.values += [self.emit(operator.getitem, split, index) for index in wanted]
            case 1:
                begin = sum(sizes[:-1]) if self.chance(0.5) else 0
                self.keep(aten.slice.Tensor, whole, dim, begin, begin + sizes[-1])
            case _:
                begin = self.emit(aten.slice.Tensor, whole, dim, 0, sizes[0])
                self.keep(aten.cat.default, [begin, self.like(begin), self.pick()], dim)

    def stacked(self) -> None:
        x = self.pick(lambda value: 0 < value.dim() <= 2)
        rows = [self.like(x) for _ in range(self.random.randint(1, 3))]
        whole = self.keep(aten.stack.default, rows, self.random.choice([0, -1]))
        self.keep(aten.select.int, whole, self.random.choice([0, -1]), self.random.choice([0, -1, 1]))

    # -------------------------------------------------------------------------------------------- filled and drawn

    def filled(self) -> None:
        """Values that are the same everywhere, and what is often made of them."""
        x = self.pick()
        number = self.random.choice([1, 1, 0, 2, -1, 0.5, True])
        dtype = self.random.choice([x.meta["val"].dtype, F32, I64, I32, BOOL])
        shape = self.sizes(x)
        kinds: list[tuple[Any, ...]] = [
            (aten.full.default, shape, number),
            (aten.full_like.default, x, number),
            (aten.ones.default, shape),
            (aten.zeros_like.default, x),
        ]
        full = self.keep(*self.random.choice(kinds), **({"dtype": dtype} if self.chance(0.8) else {}))
        match self.random.randrange(4):
            case 0 | 1:
                kwargs = {"dtype": self.random.choice([I64, F32, I32])} if self.chance(0.3) else {}
                self.keep(aten.cumsum.default, full, self.dim(full), **kwargs)
            case 2:
                self.keep(aten.add.Tensor, full, x)

    def scattered(self) -> None:
        """Numbers put into something that is the same everywhere."""
        index = self.pick(lambda value: value.dtype == I64 and value.dim() > 0)
        places = self.emit(aten.remainder.Scalar, index, self.random.choice([1, 2, 3]))
        dim = self.dim(places)
        if self.chance(0.6):
            places = self.emit(aten.slice.Tensor, places, dim, 0, 1)
        shape = self.sizes(places)
        shape[dim] = self.random.choice([3, 4])
        number, other = self.random.choice([0, 0, 1]), self.random.choice([1, 1, 2, -0.0, 0.5])
        dtype = self.random.choice([F32, F32, I64, BOOL])
        full = self.emit(aten.full.default, shape, number, dtype=dtype)
        if self.chance(0.7):
            self.keep(aten.scatter.value, full, dim, places, other)
        else:
            source = self.emit(aten.full.default, self.sizes(places), other, dtype=dtype)
            self.keep(self.random.choice([aten.scatter.src, aten.scatter_add.default]), full, dim, places, source)

    def counted(self) -> None:
        self.keep(aten.arange.start_step, self.random.choice([0, 1]), self.random.randint(1, 5), 1)

    def constant(self) -> None:
        """A tensor that the program owns."""
        name = self.random.choice(["table", "row"])
        if name not in self.constants:
            self.constants[name] = torch.arange(4.0).view(2, 2) if name == "table" else torch.tensor([1.0, -0.0, 2.0])
        value = self.constants[name]
        if self.symbolic:
            value = self.mode.from_tensor(value, static_shapes=True)
        self.values.append(self.describe(self.graph.get_attr(name), value))

    def drawn(self) -> None:
        x = self.pick(lambda value: value.is_floating_point() and value.numel() != 0)
        match self.random.randrange(4):
            case 0:
                self.keep(aten.rand_like.default, x)
            case 1:
                self.keep(aten.bernoulli.p, x, 0.5)
            case 2:
                pair = self.emit(aten.native_dropout.default, x, 0.5, self.chance(0.7))
                self.values += [self.emit(operator.getitem, pair, index) for index in (0, 1)]
            case _:
                self.keep(aten.randn.default, [2, 2])

    # ----------------------------------------------------------------------------------- what is seen from outside

    def write(self) -> None:
        """Writes the memory of an input, of a view of one, or of a value made here."""
        x = self.pick(lambda value: value.dtype != BOOL and not overlaps(value))
        if memory_of(x) in self.constants:
            raise Unfit("constants stay")
        if self.chance(0.3) and x.meta["val"].dim():
            x = self.emit(aten.select.int, x, 0, 0)
        match self.random.randrange(3):
            case 0:
                node = self.emit(aten.copy_.default, x, self.like(x))
            case 1:
                node = self.emit(aten.add_.Tensor, x, self.random.choice([1, self.like(x)]))
            case _:
                node = self.emit(aten.zero_.default, x)
        self.written.add(memory_of(x))
        if self.chance(0.5):
            self.values.append(node)

    def asserted(self) -> None:
        x = self.real(0)
        if self.chance(0.5):
            self.emit(aten._assert_tensor_metadata.default, x, dtype=x.meta["val"].dtype)
        else:
            self.emit(aten._assert_async.msg, self.emit(aten.full.default, [], True, dtype=BOOL), "never seen")
