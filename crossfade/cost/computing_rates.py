"""What a device computes in a second, measured on all ranks at once, in rounds until two in a row agree.

A machine that others use as well computes now at one pace and now at another: rounds that lie apart in time show it.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from crossfade.cost.machine_parts import rounded
from crossfade.cost.products import Products
from crossfade.cost.ranks_clock import CalibratingRanks, Clock

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_CONVOLVED = {"cpu": (torch.float32,), "cuda": (torch.float32, torch.bfloat16, torch.float16)}
"""A GPU convolves float32 by TF32, unless it is told not to, which products of float32 do not use."""

_PRODUCT_SECONDS = 5e-3
_STEADY = 1.1
"""By which factor products of two rounds in a row may differ at the most."""
_MOST_ROUNDS = 4


@dataclass(frozen=True)
class ComputingRates:
    """What was measured in a round, or what several say."""

    flops: Mapping[str, float]
    """Operations a second of a layer's products: of its result, and of the gradients of its input and weight."""
    convolutions: Mapping[str, float]
    """The shares of these that a convolution and both of its gradients reach."""
    memory_bandwidth: float
    overhead: float


@dataclass
class RatesClock(Clock):
    """Measures rounds, of which each takes about half of `seconds`."""

    device: str
    ranks: CalibratingRanks
    seconds: float
    _sizes: dict[torch.dtype, int] = field(default_factory=dict, init=False)
    """Of square products that take long enough to be timed."""

    def round(self) -> ComputingRates:
        """Everything once, on all ranks."""
        flops = {dtype: self._flops(dtype) for dtype in DTYPES}
        convolutions = {dtype: self._convolved(dtype) / flops[dtype] for dtype in _CONVOLVED[self.device]}
        return ComputingRates(
            {_name(dtype): rate for dtype, rate in flops.items()},
            {_name(dtype): share for dtype, share in convolutions.items()},
            self._memory_bandwidth(),
            self._overhead(),
        )

    @property
    def tiles(self) -> Products:
        """How a GPU cuts products."""
        return Products(torch.cuda.get_device_properties(self.device).multi_processor_count)

    def _flops(self, dtype: torch.dtype) -> float:
        if dtype not in self._sizes:
            self._sizes[dtype] = self._size(dtype)
        size = self._sizes[dtype]
        return 3 * self._operations(size) / self.agreed(self._layer(dtype, size), self.seconds / len(DTYPES) / 4)

    def _size(self, dtype: torch.dtype) -> int:
        size = 128
        while size < 8192 and self.agreed(self._layer(dtype, size), 0.0) <= 3 * _PRODUCT_SECONDS:
            size *= 2
        return size

    def _layer(self, dtype: torch.dtype, size: int) -> Callable[[], None]:
        x, weight, gradient = (self.numbers(size, size, seed=seed).to(dtype) for seed in range(3))
        return functools.partial(_products_of_layer, x, weight, gradient)

    def _operations(self, size: int) -> float:
        """Of a square product; on a GPU those at the rate of full waves that take as long."""
        return 2.0 * size**3 if self.device == "cpu" else self.tiles.seconds(1, size, size, size, rate=1.0)

    def _convolved(self, dtype: torch.dtype) -> float:
        """Operations a second of a convolution of 3 x 3 and both of its gradients."""
        images, channels, pixels = (8, 64, 32) if self.device == "cpu" else (64, 256, 56)
        x, gradient = (self.numbers(images, channels, pixels, pixels, seed=seed).to(dtype) for seed in (0, 1))
        weight = self.numbers(channels, channels, 3, 3, seed=2).to(dtype)
        how: tuple[Any, ...] = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)

        def layer() -> None:
            torch.ops.aten.convolution(x, weight, None, *how)
            torch.ops.aten.convolution_backward(gradient, x, weight, None, *how, [True, True, False])

        operations = 3 * 2 * images * pixels**2 * 9 * channels**2
        return operations / self.agreed(layer, self.seconds / 32)

    def _memory_bandwidth(self) -> float:
        elements = 2**20 if self.device == "cpu" else 2**26
        tensors = [torch.full((elements,), 0.5, device=self.device) for _ in range(18)]
        turn = itertools.count()

        def add() -> None:
            start = 3 * (next(turn) % 6)
            torch.add(tensors[start], tensors[start + 1], out=tensors[start + 2])

        return 3 * 4 * elements / self.agreed(add, self.seconds / 16)

    def _overhead(self) -> float:
        left = torch.ones(8, device=self.device)

        def adds() -> None:
            for _ in range(100):
                torch.add(left, left)

        if self.device == "cuda":
            return self.ranks.slowest([statistics.median(self.behind(adds) for _ in range(9))])[0] / 100
        return self.agreed(adds, self.seconds / 16) / 100


def steady(
    rounds: Sequence[ComputingRates], another: Callable[[], ComputingRates]
) -> tuple[ComputingRates, float | None]:
    """What the last two rounds say that agree on products; else what most say, with the factor they differ by.

    >>> fast, slow = (ComputingRates({"float32": rate}, {}, 1e9, 1e-6) for rate in (2e9, 1e9))
    >>> steady([slow], iter([fast, fast]).__next__)[0].flops
    {'float32': 2000000000.0}
    """
    rounds = list(rounds)
    while len(rounds) < _MOST_ROUNDS:
        rounds.append(another())
        if _apart(rounds[-2:]) <= _STEADY:
            return _middle(rounds[-2:]), None
    return _middle(rounds), _apart(rounds)


def _apart(rounds: Sequence[ComputingRates]) -> float:
    """The factor by which rounds differ in the products that most models compute."""
    rates = [found.flops["float32"] for found in rounds]
    return max(rates) / min(rates)


def _middle(rounds: Sequence[ComputingRates]) -> ComputingRates:
    """The medians of some rounds."""

    def middle(values: Iterable[float]) -> float:
        return rounded(statistics.median(values))

    return ComputingRates(
        {name: middle(found.flops[name] for found in rounds) for name in rounds[0].flops},
        {name: middle(found.convolutions[name] for found in rounds) for name in rounds[0].convolutions},
        middle(found.memory_bandwidth for found in rounds),
        middle(found.overhead for found in rounds),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _products_of_layer(x: Tensor, weight: Tensor, gradient: Tensor) -> None:
    """What a layer multiplies in a step: some of the matrices are transposed, which libraries do slower."""
    for left, right in ((x, weight.t()), (gradient, weight), (gradient.t(), x)):
        torch.mm(left, right)
