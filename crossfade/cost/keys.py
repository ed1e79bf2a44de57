"""What a node computes on, by hint where sizes are symbolic, and the key under which its time is remembered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from crossfade.graph.operators import remembered
from crossfade.graph.private import OperatorBase
from crossfade.graph.program import size_hint
from crossfade.graph.text import DTYPES

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorDescription(NamedTuple):
    """A tensor's dtype, sizes and strides as plain numbers, and the bytes of memory behind its elements.

    An expanded dim has one element in memory, however often it is read.
    """

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    bytes: int

    @property
    def dense(self) -> bool:
        """Whether its elements lie in order and without gaps."""
        return self.strides == dense_strides(self.sizes)

    def __str__(self) -> str:
        name = _DTYPE_NAMES.get(self.dtype, str(self.dtype).removeprefix("torch."))
        strides = "" if self.dense else f"/{_commas(self.strides)}"
        return f"{name}[{_commas(self.sizes)}]{strides}"


def described(value: Any) -> tuple[TensorDescription, ...]:
    """The tensors of a node's value.

    >>> [str(tensor) for tensor in described([torch.empty(2, 3), torch.empty(2, 3).t(), 5])]
    ['f32[2,3]', 'f32[3,2]/1,3']
    >>> described(torch.empty(4, 1).expand(4, 8))[0].bytes
    16
    """
    if isinstance(value, torch.Tensor):
        return (_described(value),)
    if isinstance(value, (tuple, list)):
        return tuple(_described(item) for item in value if isinstance(item, torch.Tensor))
    return ()


def _described(value: torch.Tensor) -> TensorDescription:
    if value.layout is not torch.strided:  # has no strides to ask for
        sizes = _numbers(value.shape)
        return TensorDescription(value.dtype, sizes, dense_strides(sizes), math.prod(sizes) * value.dtype.itemsize)
    sizes, strides = _numbers(value.shape), _numbers(value.stride())
    held = sizes if 0 not in strides else [size for size, stride in zip(sizes, strides, strict=True) if stride]
    elements = math.prod(held) if 0 not in sizes else 0
    return TensorDescription(value.dtype, sizes, strides, elements * value.dtype.itemsize)


def dense_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor.

    >>> dense_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


class Keys:
    """Writes keys for the nodes of one program; describes each value once.

    `threads` is how many threads torch computes with; on other devices than the CPU it does not matter and is left out.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = torch.get_num_threads() if threads is None else threads
        self._values: dict[fx.Node, tuple[TensorDescription, ...]] = {}
        self._texts: dict[fx.Node, str] = {}

    def tensors(self, node: fx.Node) -> tuple[TensorDescription, ...]:
        """The tensors that a node makes."""
        found = self._values.get(node)
        if found is None:
            found = self._values[node] = described(node.meta.get("val"))
        return found

    def of(self, node: fx.Node) -> str:
        """The key of a call: operator, arguments, device, threads."""
        arguments = [self._text(argument) for argument in node.args]
        arguments += [f"{name}={self._text(value)}" for name, value in node.kwargs.items()]
        return f"{_operator_name(node.target)}({', '.join(arguments)}) {self._place(node)}"

    def _place(self, node: fx.Node) -> str:
        device = device_of(node)
        return f"{device} x{self.threads}" if device == "cpu" else device

    def _text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            found = self._texts.get(value)
            if found is None:
                found = self._texts[value] = self._value_text(value)
            return found
        if isinstance(value, (list, tuple)):
            return f"[{', '.join([self._text(item) for item in value])}]"
        if isinstance(value, torch.device):  # the same key on every rank, whichever device is its own
            return value.type
        return repr(value)

    def _value_text(self, node: fx.Node) -> str:
        value = node.meta.get("val")
        tensors = self.tensors(node)
        if tensors or isinstance(value, (tuple, list)):
            inside = ",".join(map(str, tensors))
            return inside if isinstance(value, torch.Tensor) else f"[{inside}]"
        if isinstance(value, torch.SymInt):
            return str(size_hint(value))
        return type(value).__name__ if isinstance(value, (float, torch.SymFloat, torch.SymBool)) else repr(value)


def key_of(node: fx.Node, threads: int | None = None) -> str:
    """Under which key the time of a call is remembered: equal for calls that do equal work, on every rank.

    It has the operator, what its tensors are like (strides too, where they are not contiguous), its other arguments,
    the type of device, and on the CPU the number of threads. Sizes that are symbolic count by their hint; the value of
    a number that arrives when the program runs, such as a learning rate, does not count.

        >>> from crossfade.graph.text import parse
        >>> program = parse('''
        ... x: f32[4, 8] = input("x")
        ... w: f32[5, 8] = input("w")
        ... t: f32[8, 5] = aten.t(w)
        ... y: f32[4, 5] = aten.mm(x, t)
        ... z: f32[4, 5] = aten.mul.Tensor(y, 0.5)
        ... return output("z", z)
        ... ''')
        >>> *_, y, z, _ = program.graph.nodes
        >>> key_of(y, threads=2)
        'aten.mm.default(f32[4,8], f32[8,5]/1,8) cpu x2'
        >>> key_of(z, threads=2)
        'aten.mul.Tensor(f32[4,5], 0.5) cpu x2'
    """
    return Keys(threads).of(node)


def device_of(node: fx.Node) -> str:
    """The type of device that a call computes on: that of its first tensor."""
    for source in (node, *node.all_input_nodes):
        value = source.meta.get("val")
        first = next(iter(value), None) if isinstance(value, (tuple, list)) else value
        if isinstance(first, torch.Tensor):
            return first.device.type
    return "cpu"


def _numbers(sizes: Any) -> tuple[int, ...]:
    plain = tuple(sizes)
    return plain if all(type(size) is int for size in plain) else tuple(map(size_hint, plain))


def _commas(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


@remembered
def _operator_name(target: Any) -> str:
    return str(target) if isinstance(target, OperatorBase) else f"{target.__module__}.{target.__name__}"
