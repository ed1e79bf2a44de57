"""Which sizes of a batch are symbols: decided by the batches that were seen, and so alike on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from crossfade.capture.symbolic_sizes import Shape, SymbolicSizes
from crossfade.compile.options import Options
from crossfade.compile.place import Place

log = logging.getLogger("crossfade")

_SEEN = 8
"""Batches of a kind that are kept to tell which sizes vary together: each but the first has cost a capture."""


class Kind(NamedTuple):
    """What a program of symbolic sizes depends on beside these."""

    batches: Hashable
    """The structure and dtypes of the batches."""
    settings: Hashable = None
    """How batches are divided, the optimizer's options, and what torch bakes in."""
    baked_in: int = 0
    """What the model and the loss read, by a number."""


@dataclass
class Dynamic:
    """What a step knows about the sizes of its batches.

    `asked` is `compile_step`'s `dynamic`: None makes a size a symbol once two batches of a kind (structure, dtypes)
    differ in it, True makes all sizes symbols at once, False none. `why_not` says why none can be.

        >>> dynamic = Dynamic(None)
        >>> dynamic.sizes_for(Kind("words"), [(8, 16)], [(8, 16)], samples=False) is None
        True
        >>> dynamic.sizes_for(Kind("words"), [(8, 24)], [(8, 24)], samples=False).shapes
        ((8, 's0'),)
    """

    asked: bool | None
    why_not: str = ""
    _seen: dict[Hashable, list[Sequence[Shape]]] = field(default_factory=dict)
    _failed: set[Kind] = field(default_factory=set)

    @classmethod
    def of(cls, options: Options, place: Place) -> Dynamic:
        """What is possible for a step where it runs."""
        return cls(options.dynamic, _why_static(options, place))

    def sizes_for(
        self, kind: Kind, shapes: Sequence[Shape], part: Sequence[Shape], *, samples: bool
    ) -> SymbolicSizes | None:
        """The sizes to capture a part of a batch with that no program fits, or None to capture it as it is.

        `shapes` are the whole batch's. With `samples` their number is a symbol as soon as another size is.
        """
        if self.asked is False or kind in self._failed:
            return None
        if self.why_not:
            self._say_why_not(kind)
            return None
        seen = self._seen.setdefault(kind.batches, [])
        seen.append(tuple(shapes))
        del seen[1:-_SEEN]
        if len(seen) == 1 and not self.asked:
            return None
        sizes = SymbolicSizes.that_vary(seen, part, every=bool(self.asked), samples=samples)
        return sizes if sizes.hints else None

    def failed(self, kind: Kind) -> None:
        """Capture batches of a kind as they are from now on."""
        self._failed.add(kind)

    def _say_why_not(self, kind: Kind) -> None:
        """Once there are several sizes, or at once if symbols were asked for."""
        if self.asked or kind.batches in self._seen:
            log.warning("every size of batch is captured by itself: %s", self.why_not)
            self._failed.add(kind)
        self._seen.setdefault(kind.batches, [])


def _why_static(options: Options, place: Place) -> str:
    if place.tensor is not None:
        return "symbolic sizes are not possible yet with tensor_parallel"
    if place.experts is not None:
        return "symbolic sizes are not possible yet with experts over an axis"
    if place.machine is not None and place.everyone is not None:
        return f"symbolic sizes are not possible yet in steps that are planned, here for {place.machine.name}"
    if place.axes is not None and options.batch != "global" and options.check_every != 1:
        return f'batch="{options.batch}" with check_every={options.check_every}: ranks would not notice other sizes'
    return ""
