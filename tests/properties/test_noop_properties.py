"""Sampled programs of views, copies and conversions: the simplifications change no bit, and no memory that is seen."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from crossfade.graph.passes import Pass, run_passes
from crossfade.graph.private import FakeTensorMode
from crossfade.graph.program import Input, InputKind, Output, OutputKind, Program, from_graph_module
from crossfade.simplify.canonicalize_views import CanonicalizeViews
from crossfade.simplify.collapse_conversions import CollapseConversions
from crossfade.simplify.collapse_views import CollapseViews
from crossfade.simplify.remove_noops import RemoveNoops
from tests.simplify.holds import sharing

aten, prims = torch.ops.aten, torch.ops.prims
PASSES: tuple[Pass, ...] = (RemoveNoops(), CanonicalizeViews(), CollapseViews(), CollapseConversions())
WAYS: list[Sequence[Pass]] = [*([one] for one in PASSES), PASSES, PASSES[::-1]]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int8, torch.float64, torch.bool]
SHAPES = [(4, 6), (6,), (2, 1, 3), (1, 4), (), (0, 3), (2, 3, 2)]
SPECIAL = [-0.0, 0.0, float("inf"), float("-inf"), float("nan"), 1.0, -1.5, 300.0, 1e-40]


ONLY_SAMPLED = settings(
    phases=[Phase.explicit, Phase.reuse, Phase.generate], max_examples=max(settings().max_examples // 5, 50)
)
"""A smaller seed is no smaller program: nothing to shrink."""


@dataclass
class Sampler:
    """Adds one random op after another; what torch refuses is not added."""

    random: Random
    graph: fx.Graph = field(default_factory=fx.Graph)
    mode: FakeTensorMode = field(default_factory=FakeTensorMode)
    values: list[fx.Node] = field(default_factory=list)

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node | None:
        fakes = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        try:
            with self.mode:
                value = target(*fakes[0], **fakes[1])
        except (RuntimeError, ValueError, IndexError, NotImplementedError):
            return None
        if isinstance(value, Tensor) and value.numel() > 300:
            return None
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = value
        if isinstance(value, Tensor):
            self.values.append(node)
        return node

    def pick(self) -> fx.Node:
        """A value; recent ones more often, so that chains grow."""
        return self.random.choice(self.values[-2:] if self.random.random() < 0.7 else self.values)

    def like(self, node: fx.Node) -> fx.Node:
        shape = node.meta["val"].shape
        return self.random.choice([other for other in self.values if other.meta["val"].shape == shape])

    def shape(self, value: Tensor) -> list[int]:
        """A shape of as many elements."""
        sizes = [int(size) for size in value.shape]
        for _ in range(self.random.randint(0, 2)):
            match self.random.randrange(4):
                case 0:
                    sizes.insert(self.random.randint(0, len(sizes)), 1)
                case 1 if sizes:
                    place = self.random.randrange(len(sizes))
                    size = sizes[place]
                    sizes[place : place + 1] = [2, size // 2] if size % 2 == 0 else [size, 1]
                case 2 if len(sizes) > 1:
                    place = self.random.randrange(len(sizes) - 1)
                    sizes[place : place + 2] = [sizes[place] * sizes[place + 1]]
                case 3 if 1 in sizes:
                    sizes.remove(1)
        if sizes and 0 not in sizes and self.random.random() < 0.3:
            sizes[self.random.randrange(len(sizes))] = -1
        return sizes

    def view(self) -> None:
        x, choose = self.pick(), self.random.choice
        value = x.meta["val"]
        rank, sizes = value.dim(), list(value.shape)
        dim = self.random.randrange(-rank, rank) if rank else 0
        size = sizes[dim] if rank else 1
        order = self.random.sample(range(rank), rank)
        calls: list[tuple[Any, ...]] = [
            *((target, self.shape(value)) for target in (aten.view.default, aten.reshape.default)),
            (aten._unsafe_view.default, self.shape(value)),
            (
                aten.slice.Tensor,
                dim,
                choose([0, None, 1, -size]),
                choose([size, None, 2**63 - 1, -1]),
                choose([1, 1, 2]),
            ),
            (aten.expand.default, choose([sizes, [-1] * rank, [2, *sizes], [3 if s == 1 else -1 for s in sizes]])),
            (aten.permute.default, choose([order, list(range(rank)), [d - rank for d in order]])),
            (aten.transpose.int, dim, choose([0, -1, dim])),
            (aten.t.default,),
            (aten.unsqueeze.default, choose([0, -1, rank])),
            (aten.squeeze.default,),
            (aten.squeeze.dim, dim),
            (aten.flatten.using_ints, 0, choose([0, -1, 1])),
            (aten.unflatten.int, dim, choose([[size], [-1, 1], [2, -1]])),
            (aten.view.dtype, choose([value.dtype, torch.int32])),
            (aten.alias.default,),
            (aten.contiguous.default,),
        ]
        target, *args = choose(calls)
        self.emit(target, x, *args)

    def copy(self) -> None:
        x, choose = self.pick(), self.random.choice
        value = x.meta["val"]
        rank = value.dim()
        dim = self.random.randrange(rank) if rank else 0
        calls: list[Callable[[], Any]] = [
            lambda: self.emit(aten.clone.default, x, memory_format=choose([None, torch.contiguous_format])),
            lambda: self.emit(aten.contiguous.default, x),
            lambda: self.emit(aten.repeat.default, x, [1] * choose([rank, rank, rank + 1])),
            lambda: self.emit(aten.constant_pad_nd.default, x, choose([[0, 0], [1, -1], [0, 1]])),
            lambda: self.emit(aten.cat.default, choose([[x], [x, x], [self.like(x)]]), dim),
            lambda: self.emit(aten.cat.default, [self.graph_empty(value.dtype), x], dim),
            lambda: self.emit(aten.copy.default, self.like(x), self.like(x)),
            lambda: self.emit(aten.slice_scatter.default, x, self.like(x), dim, choose([0, None]), choose([None, 9])),
            lambda: self.emit(aten.lift_fresh_copy.default, x),
            lambda: self.emit(aten.where.self, self.emit(aten.gt.Scalar, x, 0), x, choose([x, self.like(x)])),
            lambda: self.emit(aten.dropout.default, x, choose([0.0, 0.5]), choose([False, False, True])),
            self.split,
        ]
        choose(calls)()

    def graph_empty(self, dtype: torch.dtype) -> fx.Node | None:
        return self.emit(aten.full.default, [0], 0, dtype=dtype)

    def split(self) -> None:
        x = self.pick()
        parts = self.emit(aten.split.Tensor, x, self.random.choice([2, 100]), 0)
        if parts is not None:
            self.emit(operator.getitem, parts, 0)

    def conversion(self) -> None:
        x, dtype = self.pick(), self.random.choice(DTYPES)
        match self.random.randrange(3):
            case 0:
                self.emit(aten._to_copy.default, x, dtype=dtype)
            case 1:
                self.emit(aten.to.dtype, x, dtype, False, self.random.random() < 0.3)
            case 2:
                self.emit(prims.convert_element_type.default, x, dtype)

    def arithmetic(self) -> None:
        x, choose = self.pick(), self.random.choice
        number = choose([0, 1, 1.0, 0.0, -0.0, 2])
        targets = [aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.pow.Tensor_Scalar]
        unary = [aten.floor.default, aten.round.default, aten.neg.default, aten.abs.default]
        choose([lambda: self.emit(choose(targets), x, number), lambda: self.emit(choose(unary), x)])()

    def write(self) -> None:
        x = self.pick()
        match self.random.randrange(3):
            case 0:
                self.emit(aten.neg_.default, x)
            case 1:
                self.emit(aten.copy_.default, x, self.like(x))
            case 2:
                self.emit(aten.fill_.Scalar, x, 1)

    def program(self, steps: int) -> Program:
        inputs = []
        for index in range(self.random.randint(1, 2)):
            node = self.graph.placeholder(f"x{index}")
            with self.mode:
                whole = torch.empty(self.random.choice(SHAPES), dtype=self.random.choice(DTYPES))
                node.meta["val"] = whole.mT if whole.dim() > 1 and self.random.random() < 0.3 else whole
            self.values.append(node)
            inputs.append(node)
        kinds = [self.view] * 5 + [self.copy] * 3 + [self.conversion] * 3 + [self.arithmetic]
        kinds += [self.write] if self.random.random() < 0.3 else []
        for _ in range(steps):
            self.random.choice(kinds)()
        results = self.random.choices(self.values, k=self.random.randint(1, 3)) + self.values[-1:]
        self.graph.output(tuple(results))
        names = [Output(OutputKind.OUTPUT, str(index)) for index in range(len(results))]
        return Program(self.graph, tuple(Input(InputKind.INPUT, node.name) for node in inputs), tuple(names))


def special(value: Tensor, random: Random) -> Tensor:
    """Real numbers of a fake tensor's layout, with those that arithmetic treats unlike others."""
    numbers = [random.choice(SPECIAL) if random.random() < 0.5 else random.gauss(0, 3) for _ in range(value.numel())]
    if not value.dtype.is_floating_point:
        numbers = [random.randint(-3, 3) for _ in numbers]
    filled = torch.tensor(numbers, dtype=torch.float64).reshape(value.shape)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(filled)


def outcome(program: Program, inputs: list[Tensor]) -> list[Any]:
    """Results, and the inputs as the program left them."""
    own = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x) for x in inputs]
    torch.manual_seed(0)
    known: dict[fx.Node, Any] = dict(zip(program.placeholders, own, strict=True))
    for node in program.graph.nodes:
        if node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*args, **kwargs)
    return [*(known[value] for value in program.results), *own]


def steps_in_memory(value: Tensor) -> list[int]:
    """Strides that are ever taken; torch's fake tensors guess the others."""
    steps = zip(value.shape, value.stride(), strict=True)
    return [stride for size, stride in steps if size > 1] if value.numel() else []


def assert_same(expected: list[Any], actual: list[Any]) -> None:
    """The same bits (NaNs are all one), layout and shared memory."""
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)
        assert steps_in_memory(one) == steps_in_memory(other)
        if one.dtype.is_floating_point:
            number = ~one.isnan()
            assert torch.equal(torch.signbit(one)[number], torch.signbit(other)[number])
    assert sharing(expected) == sharing(actual)


@ONLY_SAMPLED
@given(st.integers(0, 2**32), st.integers(1, 12))
def test_sampled_programs_stay_the_same(seed: int, steps: int):
    random = Random(seed)
    program = Sampler(random).program(steps)
    inputs = [special(node.meta["val"], random) for node in program.placeholders]
    try:
        expected = outcome(program, inputs)
    except (
        RuntimeError,
        IndexError,
    ):  # fake tensors let through what real ones refuse, such as a write to overlapping memory
        assume(False)
    way = random.choice(WAYS)
    done = run_passes(program, way)
    try:
        assert_same(expected, outcome(done, inputs))
    except (AssertionError, RuntimeError) as error:
        raise AssertionError(f"{error}\n{[one.name for one in way]}\n{program}\n----\n{done}") from error
    assert not run_passes(done, way[-1:]).history[-1].changed, f"not a fixed point of {way[-1].name}\n{done}"


def symbolic_steps(x: Tensor, other: Tensor) -> list[Callable[[], Tensor]]:
    """What may be done next to a matrix of symbolic sizes, so that it stays one."""
    rows, columns = x.shape
    return [
        lambda: aten.slice.Tensor(x, 0, 0, rows),
        lambda: aten.slice.Tensor(x, 1, 1, None),
        lambda: aten.expand(x, [rows, -1]),
        lambda: aten.view(x.contiguous(), [columns, rows]),
        lambda: aten.view(aten.view(x.contiguous(), [-1]), [rows, columns]),
        lambda: aten.view(x.contiguous(), [1, rows, columns]).squeeze(0),
        lambda: aten.unsqueeze(x, 0).permute(1, 0, 2).squeeze(1),
        lambda: aten.reshape(aten.unsqueeze(x, -1), [rows, columns]),
        lambda: aten.squeeze.dim(aten.unsqueeze(x, 1), 1),
        lambda: aten.expand(aten.expand(x, [2, rows, columns]), [3, 2, -1, -1])[0, 1],
        lambda: aten.t(x),
        lambda: aten.permute(x, [-1, 0]),
        lambda: aten.clone(x, memory_format=torch.contiguous_format),
        lambda: aten.cat([x]),
        lambda: aten.flatten.using_ints(x).unflatten(0, (rows, columns)),
        lambda: aten.slice_scatter(other, other.neg(), 0, 0, other.shape[0]),
        lambda: aten.repeat(x, [1, 1]),
        lambda: aten._to_copy(aten._to_copy(x, dtype=torch.float64), dtype=torch.float32),
        lambda: x.neg(),
    ]


@settings(ONLY_SAMPLED, max_examples=max(settings().max_examples // 25, 10))
@given(st.integers(0, 2**32), st.integers(2, 6))
def test_symbolic_sizes_are_not_guessed(seed: int, steps: int):
    """Traced with some sizes, run with others: the same results, and no guard that the trace did not have."""
    random = Random(seed)
    choices = [random.random() for _ in range(steps)]

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        values = [x, y]
        for choice in choices:
            calls = symbolic_steps(values[-1], y)
            values.append(calls[int(choice * len(calls))]())
        return values[-1], values[-2].neg()

    traced = make_fx(function, tracing_mode="symbolic")(torch.ones(5, 7), torch.ones(11, 13))
    program = from_graph_module(traced)
    guards = len(program.fake_mode.shape_env.guards)
    for way in random.sample(WAYS, 2):
        done = run_passes(program, way)
        assert len(program.fake_mode.shape_env.guards) == guards
        for rows, columns in ((5, 7), (9, 8)):
            inputs = [torch.randn(rows, columns), torch.randn(columns, 6)]
            assert_same(outcome(program, inputs), outcome(done, inputs))
