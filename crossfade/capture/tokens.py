"""What a value that a capture has read is known by: equal tokens mean that the same would be captured."""

from __future__ import annotations

import enum
import hashlib
import weakref
from collections.abc import Hashable
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch

Token = Hashable

_BY_VALUE = (type(None), bool, int, str, bytes, torch.dtype, torch.layout, torch.memory_format, torch.device)
_NUMBERS = (float, complex, np.generic)
_BASES = (str, bytes, int, float, complex)


def plain_token(value: Any) -> Token | None:
    """The token of a value that cannot change: numbers, words, dtypes and tuples of them; None for any other.

    Numbers of different types differ, and so do 0.0 and -0.0; a NaN is equal to itself.

        >>> plain_token(1) == plain_token(True), plain_token(0.0) == plain_token(-0.0)
        (False, False)
        >>> plain_token((1, "word")) == plain_token((1, "word")), plain_token([1])
        (True, None)
    """
    kind = type(value)
    if kind in _BY_VALUE:
        return kind, value
    if isinstance(value, enum.Enum):
        return kind, value.name
    if isinstance(value, _NUMBERS):
        return kind, repr(value)
    if isinstance(value, tuple | frozenset):
        return _plain_members(value)
    return (kind, repr(value)) if isinstance(value, _BASES) else None


def _plain_members(value: tuple[Any, ...] | frozenset[Any]) -> Token | None:
    members = [plain_token(member) for member in value]
    return (type(value), *members) if None not in members else None


class ObjectToken(NamedTuple):
    """The token of what is not plain: in a few words, and what must be the same."""

    words: str
    facts: tuple[Hashable, ...]


def shown(token: Token) -> str:
    """What a token stands for, in a few words.

    >>> shown(plain_token(0.5)), shown(plain_token(("fast", 2))), shown(ObjectToken("a list of 2", ()))
    ('0.5', "('fast', 2)", 'a list of 2')
    """
    text = token.words if isinstance(token, ObjectToken) else _plain_words(token)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _plain_words(token: Any) -> str:
    kind, *rest = token
    if issubclass(kind, enum.Enum):
        return f"{kind.__name__}.{rest[0]}"
    if issubclass(kind, tuple | frozenset):
        return f"({', '.join(map(_plain_words, rest))})"
    return repr(rest[0]) if kind in _BY_VALUE else str(rest[0])


class Serials:
    """A number for each object, never given again to another: `id` is, once an object has died.

    >>> serials = Serials()
    >>> first, second = torch.ones(1), torch.ones(1)
    >>> serials.of(first) == serials.of(first), serials.of(first) == serials.of(second)
    (True, False)
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, int]] = {}
        self._next = count()

    def of(self, value: Any) -> int:
        """The object's number."""
        place = id(value)
        known = self._known.get(place)
        if known is None:
            self._known[place] = known = (self._held(value, place), next(self._next))
        return known[1]

    def _held(self, value: Any, place: int) -> Any:
        """A weak reference that takes the number with it, or the object itself where there can be none."""
        try:
            return weakref.ref(value, lambda _: self._known.pop(place, None))
        except TypeError:
            return value


def memory_of(value: torch.Tensor | np.ndarray) -> np.ndarray | None:
    """The numbers of an array, or of a tensor on the CPU, as a live view; None where they cannot be read as bytes.

    >>> tensor = torch.zeros(2)
    >>> view = memory_of(tensor)
    >>> tensor.data.add_(1)
    tensor([1., 1.])
    >>> view.view(np.float32)
    array([1., 1.], dtype=float32)
    """
    if isinstance(value, np.ndarray):
        return None if value.dtype.hasobject else value
    plain = type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if not plain or value.device.type != "cpu" or value.layout is not torch.strided or not value.is_contiguous():
        return None
    if value.is_quantized or value.is_conj() or value.is_neg() or not value.numel():
        return None
    return value.detach().reshape(-1).view(torch.uint8).numpy()


def digest(memory: np.ndarray) -> bytes:
    """A hash of an array's contents."""
    return hashlib.blake2b(memory.tobytes(), digest_size=16).digest()
