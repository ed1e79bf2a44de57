"""Bytes that are alive while a program runs, counted by watching every operator."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from torch import Tensor

from crossfade.graph.private import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all memory that a tensor made in here still holds; `seen` is told of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.holders: Counter[int] = Counter()
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor) and self.counts(tensor):
                self._hold(tensor)
        self.seen(func._schema.name.split("::")[1])
        return result

    def counts(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is to be counted."""
        return True

    def seen(self, operator: str) -> None:
        """An operator has run."""

    @property
    def live(self) -> int:
        return sum(self.sizes.values())

    def _hold(self, tensor: Tensor) -> None:
        place = tensor.untyped_storage().data_ptr()
        self.holders[place] += 1
        self.sizes[place] = tensor.untyped_storage().nbytes()
        weakref.finalize(tensor, self._release, place)

    def _release(self, place: int) -> None:
        self.holders[place] -= 1
        if not self.holders[place]:
            del self.sizes[place]
