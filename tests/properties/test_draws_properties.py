"""Random models of layers, layouts and draws, trained on ranks: as by eager torch in one process.

6 models on two ranks by default; 400 by `make fuzz`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.properties.drawn_models import Drawn, train_eager, train_on_ranks

COUNT = 400 if settings.default.max_examples > 1000 else 6
TOLERANCE = 1e-3
"""A mask in another order changes losses by percents; gradients near zero leave the last bits to chance."""


def difference(found: list[torch.Tensor] | str, expected: list[torch.Tensor]) -> float | str:
    if isinstance(found, str):
        return found
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).abs().max() / (b.abs().max() + 1e-2)) for a, b in pairs)


@pytest.mark.ranks
@pytest.mark.parametrize("first", range(0, COUNT, 6))
def test_random_models_draw_on_ranks_as_on_one_device(ranks: Any, first: int) -> None:
    seeds = list(range(first, first + 6))
    for found in ranks(2).run(train_on_ranks, seeds, 2):
        for seed, result in zip(seeds, found, strict=True):
            off = difference(result, train_eager(seed, 2))
            assert isinstance(off, float) and off < TOLERANCE, f"{seed}: {Drawn(seed).names}: {off}"
