"""What a capture bakes into a graph: when any of it changes, the program is captured anew."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, count
from operator import is_
from typing import Any

import torch
from torch import nn

_PLAIN = (bool, int, float, str)
_KEPT = 32
"""States of the modules that are known again when they come back."""


class BakedIn:
    """What the forwards of a model's modules bake into a graph: their own numbers, words and switches (dropout's p,
    training), which parameters they have, and the shapes of their buffers.

    Asked at every step: that nothing was replaced is seen without reading everything anew, nor walking the tree.

        >>> model = nn.Dropout(0.5)
        >>> baked_in = BakedIn([model])
        >>> first = baked_in.number()
        >>> model.p = 0.1
        >>> baked_in.number() == first
        False
        >>> model.p = 0.5
        >>> baked_in.number() == first
        True
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = tuple(modules)
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._new = count()
        self._number = -1
        self._registries: list[Mapping[str, Any]] = []
        self._lengths: list[int] = []
        self._values: list[Any] = []
        self._parameters: list[tuple[nn.Parameter, bool, torch.dtype]] = []
        self._buffers: list[tuple[torch.Tensor, torch.Size, torch.dtype]] = []

    def number(self) -> int:
        """A number for all of it: the same again whenever all is the same."""
        if self._number < 0 or not self._is_current():
            read = tuple(map(_read, self._modules))
            known = self._numbers.pop(read, None)
            self._number = self._numbers[read] = next(self._new) if known is None else known
            if len(self._numbers) > _KEPT:
                del self._numbers[next(iter(self._numbers))]  # what was longest not seen
            self._remember()
        return self._number

    def _is_current(self) -> bool:
        return (
            list(map(len, self._registries)) == self._lengths
            and all(map(is_, self._standing(), self._values))
            and all(p.requires_grad is trained and p.dtype is dtype for p, trained, dtype in self._parameters)
            and all(b.shape == shape and b.dtype is dtype for b, shape, dtype in self._buffers)
        )

    def _standing(self) -> Iterator[Any]:
        """Everything that the modules have, and what it is called."""
        names = [one.keys() for one in self._registries]
        return chain.from_iterable(chain(names, [one.values() for one in self._registries]))

    def _remember(self) -> None:
        """Keep what stands where now: as long as these are the same objects, only tensors can have changed."""
        self._registries = [held for one in self._modules for held in (vars(one), one._parameters, one._buffers)]
        self._lengths = list(map(len, self._registries))
        self._values = list(self._standing())
        parameters = [p for module in self._modules for p in module._parameters.values() if p is not None]
        buffers = [b for module in self._modules for b in module._buffers.values() if b is not None]
        self._parameters = [(p, p.requires_grad, p.dtype) for p in parameters]
        self._buffers = [(b, b.shape, b.dtype) for b in buffers]


def _read(module: nn.Module) -> tuple[Any, ...]:
    plain = [item for item in vars(module).items() if type(item[1]) in _PLAIN]
    parameters = [(id(p), p.requires_grad, p.dtype) for p in module._parameters.values() if p is not None]
    buffers = [(b.shape, b.dtype) for b in module._buffers.values() if b is not None]
    return tuple(plain), tuple(parameters), tuple(buffers)


def ambient() -> tuple[Any, ...]:
    """What torch itself bakes in: autocast and the default dtype."""
    autocast = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
    return (*autocast, torch.get_default_dtype())
