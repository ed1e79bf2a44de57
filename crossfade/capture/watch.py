"""Whether anything that was read has been replaced or changed since: asked at every step, so with the fewest calls."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import attrgetter, call, is_, itemgetter
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from crossfade.graph.private import HOOKS_OF_TENSOR, version_of

EVERY_STEP_AT_MOST = 1000
"""Entries of a container, and bytes of a tensor or an array, that are compared at every step."""

_of_parameter = attrgetter("requires_grad", "dtype")
_hooks_of_tensor = attrgetter(*HOOKS_OF_TENSOR)
_of_buffer = attrgetter("shape", "dtype")
_of_function = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_content = attrgetter("cell_contents")


@dataclass
class Watch:
    """Live views of what was read, and what was seen in them.

    A container is seen to be the same if the same objects stand in it; what these hold is watched on its own.

        >>> settings = {"scale": 1.0}
        >>> watch = Watch()
        >>> watch.mapping(settings)
        >>> watch.take()
        >>> watch.is_current()
        True
        >>> settings["scale"] = 2.0
        >>> watch.is_current()
        False
    """

    values: int = 0
    """How many are watched at every step."""
    seldom: dict[str, int] = field(default_factory=dict)
    """What is compared every so often only, by kind."""
    _worded: list[Mapping[str, Any]] = field(default_factory=list)
    """Their keys are compared as words, which takes half the time of comparing objects."""
    _live: list[Collection[Any]] = field(default_factory=list)
    _probes: list[Callable[[], Iterable[Any]]] = field(default_factory=list)
    _sized: list[Collection[Any]] = field(default_factory=list)
    _empty: list[Collection[Any]] = field(default_factory=list)
    _without_hooks: list[Collection[Any]] = field(default_factory=list)
    _handles: int = -1
    _hooks: list[Any] = field(default_factory=list)
    _typed: list[Any] = field(default_factory=list)
    _cells: list[types.CellType] = field(default_factory=list)
    _functions: list[types.FunctionType] = field(default_factory=list)
    _parameters: list[torch.Tensor] = field(default_factory=list)
    _buffers: list[torch.Tensor] = field(default_factory=list)
    _constants: list[torch.Tensor] = field(default_factory=list)
    _memory: list[np.ndarray] = field(default_factory=list)
    _words: list[str] = field(default_factory=list)
    _lengths: list[int] = field(default_factory=list)
    _seen: list[Any] = field(default_factory=list)
    _facts: tuple[list[Any], ...] = ()

    def mapping(self, mapping: Mapping[Any, Any]) -> None:
        """Its keys and its values."""
        if not isinstance(mapping, dict | types.MappingProxyType):  # what a scripted module keeps has no live views
            self._probes += [mapping.keys, mapping.values]
        elif not mapping:
            self._empty.append(mapping)
        elif self._is_small(mapping, "large dicts"):
            self._live.append(mapping.values())
            if all(type(key) is str for key in mapping):
                self._worded.append(mapping)
            else:
                self._live.append(mapping.keys())

    def members(self, members: Collection[Any]) -> None:
        """Of a list, a set or a deque."""
        if not members:
            self._empty.append(members)
        elif self._is_small(members, f"large {type(members).__name__}s"):
            self._live.append(members)

    def chosen(self, mapping: Mapping[str, Any], names: Iterable[str], *, sized: bool) -> None:
        """Some values of a mapping; if `sized`, also that it has as many entries."""
        names = tuple(names)
        self._sized += [mapping] if sized else []
        if names:
            self._probes.append(partial(itemgetter(*names, names[0]), mapping))  # of a single one it makes no tuple

    def slots(self, instance: Any, names: tuple[str, ...]) -> None:
        """Of an object without a dict."""
        self._probes.append(lambda: [getattr(instance, name, None) for name in names])

    def no_hooks(self, hooks: Collection[Any]) -> None:
        """Where hooks would be; looked at only when torch has given a handle of a hook to anyone."""
        self._without_hooks.append(hooks)

    def types_of(self, instance: Any) -> None:
        """Which class an object is of."""
        self._typed.append(instance)

    def function(self, function: types.FunctionType) -> None:
        """A function's code, defaults and free variables."""
        self._functions.append(function)
        self._cells += [cell for cell in function.__closure__ or () if is_filled(cell)]

    def parameter(self, tensor: torch.Tensor) -> None:
        """Whether and how it is trained; its values are an input of the program."""
        self._parameters.append(tensor)
        self._sized += [hooks for name in HOOKS_OF_TENSOR if (hooks := getattr(tensor, name)) is not None]

    def buffer(self, tensor: torch.Tensor) -> None:
        """What it is like; its values are an input of the program."""
        self._buffers.append(tensor)

    def constant(self, tensor: torch.Tensor) -> None:
        """A tensor whose values are a part of the program; what changes them is counted by torch."""
        self._constants.append(tensor)

    def memory(self, memory: np.ndarray, kind: str) -> None:
        """Numbers that may change without being counted."""
        if memory.nbytes <= EVERY_STEP_AT_MOST:
            self._memory.append(memory)
        else:
            self.later(kind)

    def later(self, kind: str) -> None:
        """Something that is compared every so often only."""
        self.seldom[kind] = self.seldom.get(kind, 0) + 1

    def take(self) -> None:
        """Remember how everything is now."""
        self._sized += self._live
        self._lengths = list(map(len, self._sized))
        self._words = list(chain.from_iterable(self._worded))
        self._seen = list(self._standing())
        self._handles = RemovableHandle.next_id
        self._hooks = list(map(_hooks_of_tensor, self._parameters))
        self._facts = self._facts_now()
        self.values = len(self._seen) + len(self._empty) + len(self._without_hooks) + sum(map(len, self._facts))

    def is_current(self) -> bool:
        """Whether everything is as it was taken."""
        try:
            return (
                (RemovableHandle.next_id == self._handles or self._has_the_same_hooks())
                and not any(self._empty)
                and list(map(len, self._sized)) == self._lengths
                and list(chain.from_iterable(self._worded)) == self._words
                and all(map(is_, self._standing(), self._seen))
                and self._facts_now() == self._facts
            )
        except (KeyError, ValueError):  # a name or a free variable that was deleted
            return False

    def _has_the_same_hooks(self) -> bool:
        handles = RemovableHandle.next_id
        same = not any(self._without_hooks) and list(map(_hooks_of_tensor, self._parameters)) == self._hooks
        self._handles = handles if same else -1
        return same

    def _standing(self) -> Iterable[Any]:
        lists = (*self._live, *map(call, self._probes), map(type, self._typed), map(_content, self._cells))
        return chain.from_iterable((*lists, *map(_of_function, self._functions)))

    def _facts_now(self) -> tuple[list[Any], ...]:
        return (
            list(map(_of_parameter, self._parameters)),
            list(map(_of_buffer, self._buffers)),
            list(map(state_of_constant, self._constants)),
            [memory.tobytes() for memory in self._memory],
        )

    def _is_small(self, container: Collection[Any], kind: str) -> bool:
        if len(container) > EVERY_STEP_AT_MOST:
            self._sized.append(container)
            self.later(kind)
            return False
        return True


def state_of_constant(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What torch says of a tensor's values, and of what it is like: cheap to ask, and never brought back by a change.

    >>> tensor = torch.ones(2)
    >>> before = state_of_constant(tensor)
    >>> tensor += 1
    >>> state_of_constant(tensor) == before
    False
    """
    version = -1 if tensor.is_inference() else version_of(tensor)
    return version, tensor.shape, tensor.dtype, tensor.requires_grad, _address(tensor)


def _address(tensor: torch.Tensor) -> int:
    """Where a tensor's numbers lie; 0 for those that do not say (sparse ones, subclasses)."""
    plain = tensor.layout is torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return tensor.data_ptr() if plain else 0


def is_filled(cell: types.CellType) -> bool:
    """Whether a free variable has a value."""
    try:
        cell.cell_contents  # noqa: B018 (asking is the only way to know)
    except ValueError:
        return False
    return True
