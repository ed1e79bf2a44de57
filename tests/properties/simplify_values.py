"""Values of sampled programs: computed as they are written down, and described by fake tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from random import Random
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from crossfade.graph.private import FakeTensorMode, statically_equal

aten, prims = torch.ops.aten, torch.ops.prims
F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
I64, I32, BOOL, C64 = torch.int64, torch.int32, torch.bool, torch.complex64
FLOATS = (F32, F64, F16, BF16)
DTYPES = (*FLOATS, I64, I32, BOOL)
END = 2**63 - 1
MOST_ELEMENTS = 96

MODE = FakeTensorMode()
"""One for all static programs: making one costs more than a program."""


_FAKES: dict[Any, Tensor] = {}
_DESCRIBED: dict[Any, Any] = {}


def described(mode: FakeTensorMode, target: Any, args: Any, kwargs: Any) -> Any:
    """What a fresh run on fake tensors says of a call; answers for static sizes are remembered."""
    key = call_key(target, args, kwargs) if mode is MODE else None
    if key is None or key not in _DESCRIBED:
        fakes = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with mode:
            value = target(*fakes[0], **fakes[1])
        if key is None:
            return value
        _DESCRIBED[key] = fx.node.map_aggregate(value, described_as)
    return _DESCRIBED[key]


def described_as(value: Any) -> Any:
    """A fake tensor for a tensor, one for all that are alike: making one costs more than a small computation."""
    if not isinstance(value, Tensor):
        return value
    key = (value.dtype, *value.shape, None, *value.stride())
    if key not in _FAKES:
        with MODE:
            _FAKES[key] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return _FAKES[key]


def call_key(target: Any, args: Any, kwargs: Any) -> Any:
    """Equal for calls of one operator with arguments that are alike; `1`, `1.0` and `True` are not."""
    return id(target), _frozen(args), _frozen(kwargs)


def _frozen(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return _frozen(value.meta["val"])
    if isinstance(value, (tuple, list)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((name, _frozen(item)) for name, item in value.items())
    if isinstance(value, Tensor):
        return value.dtype, str(value.shape), str(value.stride())
    return type(value), str(value)


class Unfit(Exception):
    """There is nothing here that the step could take, or torch refuses it."""


class Values:
    """Adds one step after another and computes it at once: what torch refuses is not in the program.

    With symbolic sizes, on fake tensors.
    """

    def __init__(self, random: Random, symbolic: bool = False) -> None:
        self.random, self.symbolic = random, symbolic
        self.graph = fx.Graph()
        self.mode = FakeTensorMode(shape_env=ShapeEnv()) if symbolic else MODE
        self.values: list[fx.Node] = []
        self.computed: dict[fx.Node, Any] = {}
        self.constants: dict[str, Any] = {}
        self.written: set[Any] = set()

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def emit(self, target: Any, /, *args: Any, **kwargs: Any) -> fx.Node:
        """One call; whether arguments fit, torch says."""
        if self.chance(0.06) and hasattr(target, "_schema") and len(args) > 1:
            names = [argument.name for argument in target._schema.arguments]
            by_name = self.random.randint(1, len(args) - 1)
            args, kwargs = args[:by_name], {**dict(zip(names[by_name:], args[by_name:], strict=False)), **kwargs}
        given, named = fx.map_arg((args, kwargs), self.computed.__getitem__)
        try:
            with self.mode if self.symbolic else nullcontext():
                value = target(*given, **named)
        except Exception as error:
            raise Unfit(str(error)) from error
        if isinstance(value, Tensor) and hint(value.numel()) > MOST_ELEMENTS:
            raise Unfit("too large")
        return self.describe(self.graph.call_function(target, args, kwargs), value)

    def describe(self, node: fx.Node, value: Any) -> fx.Node:
        """Remember a node's value, and describe it by a fake one if it is not."""
        self.computed[node] = value
        node.meta["val"] = value if self.symbolic else fx.node.map_aggregate(value, described_as)
        return node

    def keep(self, target: Any, /, *args: Any, **kwargs: Any) -> fx.Node:
        """One call whose result later steps may take."""
        node = self.emit(target, *args, **kwargs)
        self.values.append(node)
        return node

    def pick(self, where: Callable[[Tensor], bool] = lambda value: True) -> fx.Node:
        """A value; recent ones more often, so that chains grow."""
        found = [node for node in self.values if where(node.meta["val"])]
        if not found:
            raise Unfit("nothing fits")
        return self.random.choice(found[-3:] if self.chance(0.6) else found)

    def real(self, dims: int = 1) -> fx.Node:
        """A floating value of at least so many dims."""
        return self.pick(lambda value: value.dtype in FLOATS and value.dim() >= dims)

    def like(self, node: fx.Node) -> fx.Node:
        """A value of the same dtype and shape, perhaps the same."""
        old = node.meta["val"]
        return self.pick(lambda value: value.dtype == old.dtype and statically_equal(value.shape, old.shape))

    def size(self, node: fx.Node, dim: int) -> Any:
        """A size as an argument: a number, or the node that asks for it."""
        size = node.meta["val"].shape[dim]
        return size if isinstance(size, int) else self.emit(aten.sym_size.int, node, dim)

    def sizes(self, node: fx.Node) -> list[Any]:
        return [self.size(node, dim) for dim in range(node.meta["val"].dim())]

    def dim(self, node: fx.Node) -> int:
        """A dim, counted from either end."""
        dims = node.meta["val"].dim()
        if not dims:
            raise Unfit("no dims")
        return self.random.randrange(-dims, dims)

    def dtype(self) -> torch.dtype:
        return self.random.choice(DTYPES)


def overlaps(value: Tensor) -> bool:
    """Whether two elements may lie on one place: torch refuses to write those."""
    return any(stride == 0 for stride in value.stride())


def input_like(value: Tensor, seed: int = 0, special: bool = False) -> Tensor:
    """Small whole numbers and zeros of both signs: sums of them are exact in any order.

    With `special`, also fractions that narrow dtypes cannot hold, infinities and NaNs.
    """
    numbers = torch.randint(-3, 4, value.shape, generator=torch.Generator().manual_seed(seed))
    result = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    if not value.dtype.is_floating_point:
        return result.copy_(numbers.abs() if value.dtype != C64 else numbers)
    places = torch.arange(value.numel()).view(value.shape)
    floats = torch.where((numbers == 0) & (places % 2 == 0), -0.0, numbers.double())
    if special:
        floats = torch.where(numbers > 0, floats * (1 + 2**-12), floats)
        floats = torch.where(numbers == 3, _ODD[places % len(_ODD)], floats)
    return result.copy_(floats)


_ODD = torch.tensor([float("nan"), float("inf"), float("-inf"), 1e-30, 7e4, 0.1], dtype=F64)


def hint(size: Any) -> int:
    """The size that a possibly symbolic one was made with."""
    return size if isinstance(size, int) else int(size.node.hint)


@contextmanager
def quiet() -> Iterator[None]:
    """torch logs every call that it refuses with a trace of hundreds of lines; refusals are expected here."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.disabled, was_disabled = True, log.disabled
    try:
        yield
    finally:
        log.disabled = was_disabled
