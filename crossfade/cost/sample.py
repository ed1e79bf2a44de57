"""Samples: operators called by themselves on made-up tensors of the right kind, and timed."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.cost.keys import TensorDescription, described
from crossfade.graph.effects import written_inputs
from crossfade.graph.private import device_sleep
from crossfade.graph.program import size_hint

_CUDA_CALLS = 8
"""Calls in one sample on a GPU: their kernels follow each other, as in a step whose host runs ahead."""

_CYCLES = 2e9
"""A GPU's clock cycles in a second, about: at a lower clock the device is busy for longer, which does no harm."""

_LONGEST_SLEEP = 0.05
"""Seconds to keep a device busy at most: of calls that compile something, only the first takes longer."""


@dataclass
class TimedCall:
    """One operator, called by itself on arguments that lie elsewhere each time."""

    node: fx.Node
    function: Callable[..., Any]
    device: str
    samples: list[float] = field(default_factory=list)

    def sample(self, memory: SampleMemory) -> None:
        """Call once, on a GPU several times in a row, and note the mean time."""
        written = set(written_inputs(self.node))
        count = _CUDA_CALLS if self.device == "cuda" else 1
        sets = [self._arguments(memory, written) for _ in range(count)]
        self.samples.append(seconds_of(self.function, sets, self.device))

    def _arguments(self, memory: SampleMemory, written: set[fx.Node]) -> _Arguments:
        inputs = self.node.all_input_nodes
        values = {source: memory.value(source.meta.get("val"), source in written) for source in inputs}
        return fx.map_arg((self.node.args, self.node.kwargs), values.__getitem__)


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def seconds_of(function: Callable[..., Any], sets: list[_Arguments], device: str) -> float:
    """The mean seconds of a function's calls with these arguments, one after the other.

    >>> seconds_of(torch.neg, [((torch.ones(2),), {})], "cpu") > 0
    True
    """
    if device == "cuda":
        return _on_cuda(function, sets)
    return sum(_on_cpu(function, given) for given in sets) / len(sets)


def _on_cpu(function: Callable[..., Any], given: _Arguments) -> float:
    args, kwargs = given
    start = time.perf_counter()
    function(*args, **kwargs)
    return time.perf_counter() - start


def _on_cuda(function: Callable[..., Any], sets: list[_Arguments]) -> float:
    """Seconds on the stream, from the first call to the end of the last.

    The device is kept busy until the host has launched all: in a step the host is ahead of it, or not there at all.
    """
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    args, kwargs = sets[0]
    torch.cuda.synchronize()
    began = time.perf_counter()
    function(*args, **kwargs)
    launching = (time.perf_counter() - began) * len(sets)
    torch.cuda.synchronize()
    device_sleep(round(min(_LONGEST_SLEEP, 1.5 * launching + 1e-4) * _CYCLES))
    start.record()
    for args, kwargs in sets:
        function(*args, **kwargs)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / len(sets)


class SampleMemory:
    """Where arguments lie: in arenas, one behind the other, and at the end from the start.

    An arena has `size` bytes, or as many as the largest argument: what a program holds need not be held to measure it.

    On the CPU, floating-point numbers lie between a half and one, so that whatever is computed from them stays a normal
    number for a while. What is written has an arena of its own. Integers are zeros, which are valid indices into
    anything; truth values are true.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._arenas: dict[tuple[torch.dtype, str, bool], _Arena] = {}

    def value(self, like: Any, written: bool = False) -> Any:
        """What a node of this value may give: tensors like its own, sizes by their hint, a half for other numbers."""
        if isinstance(like, Tensor):
            return self._tensor(described(like)[0], like.device.type, written)
        if isinstance(like, (tuple, list)):
            return [self.value(item, written) for item in like]
        if isinstance(like, torch.SymInt):
            return size_hint(like)
        return 0.5 if isinstance(like, (float, torch.SymFloat)) else like

    def _tensor(self, like: TensorDescription, device: str, written: bool) -> Tensor:
        key, extent = (like.dtype, device, written), _extent(like)
        arena = self._arenas.get(key)
        if arena is None or extent > arena.memory.numel():
            elements = max(extent, self.size // like.dtype.itemsize)
            arena = self._arenas[key] = _Arena(_filled(elements, like.dtype, device))
        return arena.next(like, extent)


@dataclass
class _Arena:
    memory: Tensor
    at: int = 0

    def next(self, like: TensorDescription, extent: int) -> Tensor:
        """A tensor behind the one before."""
        start = self.at if self.at + extent <= self.memory.numel() else 0
        self.at = start + -(-extent // 64) * 64  # as allocators do, on a line of the cache
        return self.memory.as_strided(like.sizes, like.strides, start)


def made_up(like: Tensor) -> Tensor:
    """A tensor like another in memory of its own, with numbers as `SampleMemory` has them."""
    described_like = described(like)[0]
    memory = _filled(_extent(described_like), described_like.dtype, like.device.type)
    return memory.as_strided(described_like.sizes, described_like.strides)


def written_over(tensor: Tensor) -> Tensor:
    """A tensor with one such number everywhere: memory that was never written may be none, and is read for nothing."""
    floating = tensor.is_floating_point() or tensor.is_complex()
    return tensor.fill_(0.75 if floating else int(tensor.dtype is torch.bool))


def _extent(like: TensorDescription) -> int:
    """Elements of memory from the first to the last."""
    if 0 in like.sizes:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(like.sizes, like.strides, strict=True))


def _filled(elements: int, dtype: torch.dtype, device: str) -> Tensor:
    """Zeros, truths, or random numbers, a few thousand over and over: drawing all would take longer than measuring.

    On a GPU they have both signs: the fewer bits change in its wires, the higher it can clock, and numbers that are
    alike were multiplied a seventh faster than a model's. Numbers too small to be normal are no slower there.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.full((elements,), int(dtype is torch.bool), dtype=dtype, device=device)
    pattern = _pattern(dtype, device)
    if elements <= pattern.numel():
        return pattern[:elements].clone()
    return pattern.repeat(math.ceil(elements / pattern.numel()))[:elements]


@functools.cache
def _pattern(dtype: torch.dtype, device: str) -> Tensor:
    plain = torch.rand(2**14) / 2 + 0.5 if device == "cpu" else torch.randn(2**14)
    return plain.to(device=device, dtype=dtype)
