"""Sampled programs made of what simplifications look for, and of what only looks like it.

A program is drawn from a `random.Random`, made from a seed: drawing it once more gives the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

from crossfade.graph.effects import memory_of
from crossfade.graph.private import statically_equal
from crossfade.graph.program import Input, InputKind, Output, OutputKind, Program
from tests.properties.simplify_steps import Steps
from tests.properties.simplify_values import BF16, BOOL, C64, F16, F32, F64, I32, I64, Unfit, aten, input_like, quiet


class Sampler(Steps):
    """Draws inputs, steps and results."""

    def inputs(self) -> list[fx.Node]:
        nodes = []
        for index in range(self.random.randint(2, 4)):
            node = self.graph.placeholder(f"input_{index}")
            nodes.append(self.describe(node, self.input_value(index)))
        self.values += nodes
        return nodes

    def input_value(self, index: int) -> Any:
        shape = self.random.choice([(2, 3), (3, 2), (3, 3), (4,), (2, 2, 2), (6,), (1, 4), (2, 4), (), (0, 3), (3, 1)])
        dtype = self.random.choice([F32] * 6 + [F64, F16, BF16, I64, I64, I32, BOOL, C64]) if index else F32
        strides = torch.empty(shape).stride()
        if len(shape) == 2 and self.chance(0.2):
            strides = (1, shape[0])
        elif len(shape) == 1 and self.chance(0.2):
            strides = (2,)
        value = input_like(torch.empty_strided(shape, strides, dtype=dtype))
        if not self.symbolic:
            return value
        dynamic = [DimDynamic.DYNAMIC if size > 1 else DimDynamic.STATIC for size in shape]
        context: Any = StatelessSymbolicContext(dynamic_sizes=dynamic)
        return self.mode.from_tensor(value, symbolic_context=context)

    def program(self, steps: int) -> Program:
        inputs = self.inputs()
        frequent = [self.slice, self.untouched, self.undone, self.conversions, self.shapes, self.again, self.binary]
        frequent += [self.taken_apart, self.put_together, self.pointwise, self.matmul, self.reductions, self.softmax]
        rare = [self.slice_scatter, self.neutral, self.stacked, self.batched, self.linears, self.integer_matmul]
        rare += [self.whole_softmax, self.filled, self.scattered, self.counted, self.constant, self.drawn]
        rare += [self.asserted, self.truths, self.chosen]
        kinds = [*frequent, *frequent, *rare]
        if self.chance(0.3):
            kinds += [self.write] * 3
        for _ in range(steps):
            try:
                self.random.choice(kinds)()
            except Unfit:
                continue
        return self.returned(inputs)

    def returned(self, inputs: Sequence[fx.Node]) -> Program:
        """Some values as results, some of them twice, or inputs; new values for some inputs."""
        outputs, results = [], []
        for node in inputs:
            fits = [v for v in self.values[len(inputs) :] if _interchangeable(node.meta["val"], v.meta["val"])]
            if fits and memory_of(node) not in self.written and self.chance(0.2):
                outputs.append(Output(OutputKind.UPDATE, node.name))
                results.append(self.random.choice(fits))
        some = self.random.sample(self.values, min(len(self.values), self.random.randint(0, 3)))
        some += [self.seen(node) for node in self.values if not node.users and self.chance(0.7)]
        some += [self.random.choice(some)] if some and self.chance(0.1) else []
        outputs += [Output(OutputKind.OUTPUT, str(index)) for index in range(len(some))]
        self.graph.output((*results, *some))
        described = tuple(Input(InputKind.INPUT, node.name) for node in inputs)
        return Program(self.graph, described, tuple(outputs), constants=self.constants)

    def seen(self, node: fx.Node) -> fx.Node:
        """What shows a value among the results, mostly without its memory being a result's."""
        if self.chance(0.2):
            return node
        return self.emit(aten.logical_not.default if node.meta["val"].dtype == BOOL else aten.neg.default, node)


def _interchangeable(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and statically_equal(one.shape, other.shape)


def sample(seed: int) -> Program:
    """One program of about 5 to 60 nodes; one of 50 has symbolic sizes."""
    random = Random(seed)
    with quiet():
        return Sampler(random, symbolic=random.random() < 0.02).program(random.randint(3, 22))
