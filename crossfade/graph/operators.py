"""Answers about operators, remembered."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Answer = TypeVar("Answer")


def remembered(question: Callable[[Any], Answer]) -> Callable[[Any], Answer]:
    """Ask once for each operator. Like `functools.cache`, but by identity: torch's operators hash in Python, slowly.

    >>> @remembered
    ... def overload(target):
    ...     return target._overloadname
    >>> import torch
    >>> overload(torch.ops.aten.add.Tensor)
    'Tensor'
    """
    known: dict[int, tuple[Any, Answer]] = {}

    @functools.wraps(question)
    def answer(target: Any) -> Answer:
        entry = known.get(id(target))
        if entry is None:
            entry = known[id(target)] = target, question(target)  # kept with its target, whose id is then its own
        return entry[1]

    return answer
