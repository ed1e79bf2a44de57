"""Numbers in a program that are larger or smaller for a larger batch: arguments of calls, and constants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph.private import FakeTensor
from crossfade.graph.program import Program

NO_POWER = 2
"""Stands for the power of what grows in another way."""

FILLS = {"scalar_tensor": 0, "full": 1, "full_like": 1, "new_full": 2}
"""Operators that fill a value with a number, and which argument that is."""

SIZED = frozenset({"slice", "split", "native_group_norm"})
"""Operators that take sizes as numbers, which may be the batch's."""


def growing_numbers(
    small: tuple[Program, fx.Node], large: tuple[Program, fx.Node], times: int
) -> Iterator[tuple[int, int]]:
    """Places of arguments of a call, or 0 for a constant, with the power of the number that changes with the batch.

    A number of a batch `times` as large has the power 1 if it is divided by that, and -1 if it is multiplied.
    """
    if small[1].op == "get_attr":
        power = _power_of_constant(_constant(*small), _constant(*large), times)
        if power is not None:
            yield 0, power
        return
    here: Any
    there: Any
    for place, (here, there) in enumerate(zip(small[1].args, large[1].args, strict=False)):
        if is_number(here) and is_number(there) and here != there:
            yield place, _power_of(there / here if here else 0.0, times)


def is_number(value: Any) -> bool:
    """Whether an argument is a number, and no flag.

    >>> is_number(0.5), is_number(True)
    (True, False)
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _constant(program: Program, node: fx.Node) -> Tensor | None:
    """The value of a constant that has numbers."""
    value = program.constants.get(str(node.target))
    if not isinstance(value, Tensor) or isinstance(value, FakeTensor) or value.is_meta:
        return None
    return value if value.layout == torch.strided and not value.is_complex() else None


def _power_of_constant(small: Tensor | None, large: Tensor | None, times: int) -> int | None:
    """The power that all numbers of a constant have; None where none differs."""
    if small is None or large is None or small.shape != large.shape or torch.equal(small, large):
        return None
    here, there = small.reshape(-1).double(), large.reshape(-1).double()
    differs = (here != there) & ~(here.isnan() & there.isnan())
    if not differs.any():
        return None
    powers = {_power_of(ratio, times) for ratio in (there / here)[differs].tolist()}
    same = bool(here[~differs].any())
    return NO_POWER if same or len(powers) > 1 else powers.pop()


def _power_of(ratio: float, times: int) -> int:
    """The power of a number that is `ratio` as large on a batch `times` as large."""
    if abs(ratio * times - 1) < 1e-6:
        return 1
    return -1 if abs(ratio - times) < 1e-6 * times else NO_POWER
