"""Calls in a text that would cost more than the text: at the limit they are let through, above it refused."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

from crossfade.graph.bounded import MOST_BITS, MOST_RESULTS, why_too_large

aten = torch.ops.aten
BITS, NUMBERS = f"a number of at most {MOST_BITS} bits", "numbers or tensors as its arguments"
WIDE = torch.empty(MOST_RESULTS + 1, device="meta")


@pytest.mark.parametrize(
    ("target", "args", "reason"),
    [
        (operator.pow, (2, MOST_BITS // 2), None),
        (operator.pow, (2, MOST_BITS // 2 + 1), BITS),
        (operator.pow, (2.0, 10**9), None),
        (operator.lshift, (1, MOST_BITS - 1), None),
        (operator.lshift, (1, MOST_BITS), BITS),
        (operator.mul, (1 << (MOST_BITS // 2), 1 << (MOST_BITS // 2)), BITS),
        (operator.mul, ([0], 10**9), NUMBERS),
        (max, ([1, 2], 3), None),
        (operator.getitem, ([1], 0), None),
        (aten.unbind.int, (WIDE[1:],), None),
        (aten.unbind.int, (WIDE,), f"at most {MOST_RESULTS} results, not {MOST_RESULTS + 1}"),
        (aten.split.Tensor, (WIDE, 2), None),
        (aten.chunk.default, (WIDE, 10**9), f"at most {MOST_RESULTS} results, not {10**9}"),
    ],
)
def test_what_a_text_may_compute(target: Any, args: tuple[Any, ...], reason: str | None) -> None:
    assert why_too_large(target, args, {}) == reason
