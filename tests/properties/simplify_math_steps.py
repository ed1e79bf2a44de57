"""The steps of sampled programs that compute numbers: products and reductions, as rules look for them, and nearly."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from crossfade.graph.private import statically_equal
from tests.properties.simplify_values import BF16, F32, F64, I32, Unfit, Values, aten


class MathSteps(Values):
    """One method for each kind of step; what does not fit raises `Unfit`."""

    def comparison(self, x: fx.Node) -> fx.Node:
        target = self.random.choice([aten.gt.Scalar, aten.eq.Scalar, aten.ne.Scalar])
        return self.emit(target, x, self.random.choice([0, 1]))

    # -------------------------------------------------------------------------------------------- numbers computed

    def pointwise(self) -> None:
        x = self.pick()
        target = self.random.choice([aten.neg, aten.abs, aten.relu, aten.sgn, aten.sin, aten.tanh, aten.exp])
        self.keep(target.default, x)

    def binary(self) -> None:
        x = self.pick()
        target = self.random.choice([aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.maximum.default])
        kwargs = {"alpha": 3} if target is aten.add.Tensor and self.chance(0.2) else {}
        self.keep(target, x, self.like(x) if self.chance(0.7) else self.pick(), **kwargs)

    def again(self) -> None:
        """A call that was made before."""
        calls = [node for node in self.values if node.op == "call_function" and node.target is not operator.getitem]
        if not calls:
            raise Unfit("no call yet")
        node = self.random.choice(calls)
        self.keep(node.target, *node.args, **node.kwargs)

    def matmul(self) -> None:
        """Products, sums of products, products with biases of all shapes."""
        a, b = self.factors()
        mm = self.emit(aten.mm.default, a, b)
        match self.random.randrange(7):
            case 0:
                other = self.emit(
                    aten.mm.default, *(self.factors() if self.chance(0.3) else (self.like(a), self.like(b)))
                )
                mm = self.emit(aten.add.Tensor, *self.random.sample([mm, other], 2), **self.alpha())
            case 1 | 2:
                rows, columns = self.sizes(mm)
                shape = self.random.choice([[columns], [columns], [1, columns], [rows, 1], [rows, columns], [1], []])
                bias = self.vector(shape, mm.meta["val"].dtype)
                pair = [mm, bias] if self.chance(0.5) else [bias, mm]
                mm = self.emit(aten.add.Tensor, *pair, **self.alpha())
            case 3:
                bias = self.vector([self.size(mm, 1)], mm.meta["val"].dtype)
                numbers = {"beta": self.random.choice([1, 2, 0]), "alpha": self.random.choice([1, 2])}
                mm = self.emit(aten.addmm.default, bias, a, b, **(numbers if self.chance(0.3) else {}))
                below = self.keep(self.random.choice([aten.relu.default, aten.neg.default]), mm)
                mm = below if self.chance(0.6) else mm
            case 4:
                mm = self.emit(
                    aten.mm.default, mm, self.emit(aten.t.default, self.like(mm) if self.chance(0.3) else mm)
                )
            case 5:
                narrow = self.emit(aten.slice.Tensor, self.emit(aten.t.default, mm), 1, 0, 1)
                other = self.emit(aten.mm.default, a, b)
                mm = self.emit(aten.mm.default, other, self.emit(aten.clone.default, narrow))
        self.values.append(mm)

    def alpha(self) -> dict[str, int]:
        return {"alpha": 2} if self.chance(0.1) else {}

    def factors(self) -> tuple[fx.Node, fx.Node]:
        a = self.matrix()
        inner, dtype = a.meta["val"].shape[1], a.meta["val"].dtype
        if self.chance(0.5):
            return a, self.emit(aten.t.default, self.like(a))
        return a, self.pick(lambda v: v.dim() == 2 and v.dtype == dtype and statically_equal(v.shape[0], inner))

    def matrix(self) -> fx.Node:
        try:
            return self.pick(lambda value: value.dim() == 2 and value.dtype in (F32, F64))
        except Unfit:
            return self.keep(aten.reshape.default, self.pick(lambda value: value.dtype == F32), [2, -1])

    def vector(self, shape: list[Any], dtype: torch.dtype) -> fx.Node:
        """A value of that shape, from what there is."""
        x = self.real()
        flat = self.emit(aten.reshape.default, x, [-1])
        one = self.emit(aten.select.int, flat, 0, 0)
        whole = self.emit(aten.expand.default, one, shape)
        if self.chance(0.5):
            whole = self.emit(aten.add.Tensor, whole, self.emit(aten.full.default, shape, 1.0))
        return self.emit(aten._to_copy.default, whole, dtype=dtype)

    def batched(self) -> None:
        a, b = self.factors()
        one = self.random.choice([0, 0, 1])
        a, b = (self.emit(aten.unsqueeze.default, x, one) for x in (a, b))
        self.keep(aten.bmm.default, a, b)

    def linears(self) -> None:
        """Several products of one value, or of the same shapes."""
        a, b = self.factors()
        weights = [self.like(b) for _ in range(self.random.randint(2, 3))]
        if self.chance(0.5):
            self.values += [self.emit(aten.mm.default, a, weight) for weight in weights]
        else:
            turned = [self.emit(aten.t.default, weight) for weight in weights]
            self.values += [self.emit(aten.linear.default, a, weight) for weight in turned]

    def integer_matmul(self) -> None:
        a, b = self.factors()
        dense = {"dtype": torch.int8, "memory_format": torch.contiguous_format}  # torch reads expanded ones wrongly
        a, b = (self.emit(aten._to_copy.default, x, **dense) for x in (a, b))
        product = self.emit(aten._int_mm.default, a, b)
        dtype = self.random.choice([F32, F32, BF16, I32])
        scaled = self.emit(aten._to_copy.default, product, dtype=dtype)
        scale = self.vector([self.size(product, 1)], dtype if self.chance(0.8) else F32)
        self.keep(aten.mul.Tensor, *self.random.sample([scaled, scale], 2))

    def truths(self) -> None:
        """`any` and `all` over some dims and over more."""
        x = self.comparison(self.pick(lambda value: value.dim() > 0))
        some, every = self.random.choice([(aten.any.dim, aten.any.default), (aten.all.dim, aten.all.default)])
        self.keep(some, x, self.dim(x), self.chance(0.5))
        self.keep(every, x)

    # ------------------------------------------------------------------------------------------------- reductions

    def reductions(self) -> None:
        """One over some dims, and one over more of them."""
        x = self.pick(lambda value: value.dim() > 0 and value.numel() != 0)
        if self.chance(0.6):
            x = self.emit(self.random.choice([aten.abs.default, aten.exp.default]), x)
        dims = x.meta["val"].dim()
        target = self.random.choice([aten.amax.default, aten.amin.default])
        some = self.random.sample(range(dims), self.random.randint(1, dims))
        self.keep(target, x, some, self.chance(0.6))
        other = target if self.chance(0.8) else self.random.choice([aten.amin.default, aten.sum.dim_IntList])
        more = self.random.choice([[], [], list(range(dims)), some, self.random.sample(range(dims), 1)])
        self.keep(other, x, more, self.chance(0.4))
        if self.chance(0.2):
            self.keep(self.random.choice([aten.max.default, aten.min.default, aten.sum.default]), x)

    def softmax(self) -> None:
        """The pieces of a softmax, sometimes not quite."""
        x = self.real()
        source = x
        if self.chance(0.3):
            x = self.emit(aten._to_copy.default, x, dtype=F32)
        if self.chance(0.3):
            x = self.emit(aten.mul.Tensor, x, self.random.choice([2, 0.5, -1.0]))
        dims = [self.dim(x)]
        most = self.emit(aten.amax.default, x, dims, self.chance(0.9))
        off = self.emit(aten.sub.Tensor, x if self.chance(0.9) else source, most)
        exp = self.emit(aten.exp.default, off)
        total = self.emit(aten.sum.dim_IntList, exp, dims if self.chance(0.9) else [0], self.chance(0.9))
        if self.chance(0.6):
            self.keep(aten.div.Tensor, exp, total)
        else:
            self.keep(aten.sub.Tensor, off, self.emit(aten.log.default, total))
        if self.chance(0.2):
            self.values.append(self.random.choice([most, exp, total]))

    def whole_softmax(self) -> None:
        x = self.real()
        self.keep(self.random.choice([aten._softmax.default, aten._log_softmax.default]), x, self.dim(x), False)
