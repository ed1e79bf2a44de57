"""Samples: operators called on made-up tensors of the right kind, one after another as in a step, and timed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from crossfade.cost.keys import Described, described
from crossfade.graph.effects import written_inputs
from crossfade.graph.program import size_hint

_CUDA_CALLS = 8
"""Calls in one sample on a GPU: their kernels follow each other, as in a step whose host runs ahead."""


@dataclass
class Call:
    """One operator and how its program meets it.

    Arguments in `near` were touched just before and lie in the cache, the others elsewhere each time. A `lasting`
    result stays alive in `kept` until the next sample, another one is freed at once; a GPU's allocator makes no
    difference between them.
    """

    node: fx.Node
    function: Callable[..., Any]
    device: str
    near: frozenset[fx.Node] = frozenset()
    lasting: bool = False
    samples: list[float] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)

    def arguments(self, memory: Memory) -> list[Arguments]:
        """Arguments for one sample: one set of them, on a GPU several."""
        written = set(written_inputs(self.node))
        return [self._arguments(memory, written) for _ in range(_CUDA_CALLS if self.device == "cuda" else 1)]

    def sample(self, sets: list[Arguments]) -> None:
        """Call once on each set of arguments and note the mean time."""
        for value in sets[-1].near:
            value.clone()  # reads it into the cache
        self.samples.append(_on_cuda(self, sets) if self.device == "cuda" else _on_cpu(self, sets[0]))

    def _arguments(self, memory: Memory, written: set[fx.Node]) -> Arguments:
        values = {one: memory.value(one.meta.get("val"), one in written) for one in self.node.all_input_nodes}
        args, kwargs = fx.map_arg((self.node.args, self.node.kwargs), values.__getitem__)
        return Arguments(args, kwargs, [values[one] for one in self.near if isinstance(values[one], Tensor)])


class Arguments(NamedTuple):
    """What an operator is called on, and which of that is to lie in the cache."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    near: list[Tensor]


def _on_cpu(call: Call, given: Arguments) -> float:
    function, args, kwargs = call.function, given.args, given.kwargs
    call.kept.clear()
    start = time.perf_counter()
    result = function(*args, **kwargs)
    seconds = time.perf_counter() - start
    if call.lasting:
        call.kept.append(result)
    return seconds


def _on_cuda(call: Call, sets: list[Arguments]) -> float:
    """Seconds on the stream, from the first call to the end of the last."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for args, kwargs, _ in sets:
        call.function(*args, **kwargs)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / len(sets)


class Memory:
    """Where arguments lie: in arenas, one behind the other, and at the end from the start.

    An arena has `size` bytes, or as many as the largest argument: together they are far less than a program's memory.

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
            return [self.value(one, written) for one in like]
        if isinstance(like, torch.SymInt):
            return size_hint(like)
        return 0.5 if isinstance(like, (float, torch.SymFloat)) else like

    def _tensor(self, like: Described, device: str, written: bool) -> Tensor:
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

    def next(self, like: Described, extent: int) -> Tensor:
        """A tensor behind the one before."""
        start = self.at if self.at + extent <= self.memory.numel() else 0
        self.at = start + -(-extent // 64) * 64  # as allocators do, on a line of the cache
        return self.memory.as_strided(like.sizes, like.strides, start)


def _extent(like: Described) -> int:
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
    plain = torch.rand(2**14) / 2 + 0.5 if device == "cpu" else torch.randn(2**14)
    pattern = plain.to(device=device, dtype=dtype)
    return pattern.repeat(math.ceil(elements / pattern.numel()))[:elements]
