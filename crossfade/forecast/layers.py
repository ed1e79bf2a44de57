"""Equal layers of a model: where they are, and the model with few of them, its layers marked, for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from crossfade.forecast.marks import BEGINS, ENDS, mark
from crossfade.graph.private import own_modules

_OWN_INDEX = ("idx", "index", "layer", "layer_id", "number", "i")
"""How names of a layer's own index end."""
_LONGEST_PERIOD = 8
"""Layers of different kinds that take turns, at most."""


@dataclass(frozen=True)
class Layers:
    """Equal layers in a model: those of `owner` from `start` on repeat every `period` layers, `count` times."""

    owner: str
    start: int
    period: int
    count: int

    @property
    def captured(self) -> int:
        """How many periods are captured: the second stands for all that follow it."""
        return min(self.count, 2)

    @property
    def left_out(self) -> int:
        """How many periods are not captured."""
        return self.count - self.captured


def find_layers(model: nn.Module) -> Layers | None:
    """The longest run of equal layers in a list of a model's; None if there is none to gain from.

    Layers are equal whose modules, shapes and settings are; numbers that are the layer's own index do not count.

        >>> find_layers(nn.Sequential(nn.Linear(2, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(6))))
        Layers(owner='1', start=0, period=1, count=6)
    """
    best: Layers | None = None
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 2:
            found = _run([_signature(child, index) for index, child in enumerate(module)], name)
            if found is not None and (best is None or found.period * found.count > best.period * best.count):
                best = found
    return best


def _run(signatures: list[Any], owner: str) -> Layers | None:
    best: Layers | None = None
    for period in range(1, min(_LONGEST_PERIOD, len(signatures) // 3) + 1):
        start = 0
        while start < len(signatures):
            end = start + period
            while end < len(signatures) and signatures[end] == signatures[end - period]:
                end += 1
            count = (end - start) // period
            longer = best is None or count * period > best.count * best.period
            if count > 2 and longer:
                best = Layers(owner, start, period, count)
            start = max(start + 1, end - period + 1)
    return best


def _signature(layer: nn.Module, index: int) -> Any:
    """What must be alike in layers that count as equal."""
    found: list[Any] = [type(layer)]
    for name, module in layer.named_modules():
        plain = sorted(
            (key, "index" if value == index and type(value) is int and key.endswith(_OWN_INDEX) else repr(value))
            for key, value in vars(module).items()
            if isinstance(value, (bool, int, float, str)) or value is None
        )
        found.append((name, type(module), tuple(plain)))
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    return (*found, *((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors))


@contextlib.contextmanager
def shortened(model: nn.Module, layers: Layers | None) -> Iterator[nn.Module]:
    """The model with two periods of its equal layers, each period marked; as it was afterwards."""
    if layers is None:
        yield model
        return
    owner = model.get_submodule(layers.owner)
    children = own_modules(owner)
    whole = dict(children)
    kept = [str(index) for index in range(layers.start + layers.period * layers.captured)]
    tail = [str(index) for index in range(layers.start + layers.period * layers.count, len(whole))]
    hooks = []
    try:
        children.clear()
        for position, name in enumerate([*kept, *tail]):
            children[str(position)] = whole[name]
        for number in range(layers.captured):
            first = layers.start + number * layers.period
            begins, ends = children[str(first)], children[str(first + layers.period - 1)]
            hooks.append(begins.register_forward_pre_hook(_Entry(number), with_kwargs=True))
            hooks.append(ends.register_forward_hook(_Exit(number)))
        yield model
    finally:
        for hook in hooks:
            hook.remove()
        children.clear()
        children.update(whole)


@dataclass(frozen=True)
class _Entry:
    """Marks what a layer is given first."""

    number: int

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (mark(args[0], BEGINS, self.number), *args[1:]), kwargs
        name = next(key for key, value in kwargs.items() if isinstance(value, Tensor) and value.is_floating_point())
        return args, {**kwargs, name: mark(kwargs[name], BEGINS, self.number)}


@dataclass(frozen=True)
class _Exit:
    """Marks what a layer returns first."""

    number: int

    def __call__(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return (mark(output[0], ENDS, self.number), *output[1:])
        return mark(output, ENDS, self.number)
