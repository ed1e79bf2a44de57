"""Real architectures split over real gloo ranks equal one device; `make models` runs all of them in all forms."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models import zoo
from tests.models.sharded import MINIMUM, shard_on_ranks

CHOSEN = [
    ("llama", "static", 4),
    ("qwen3", "dynamic, decomposed", 2),
    ("gpt2", "dynamic", 2),
    ("mixtral", "static", 2),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "variant", "count"), CHOSEN, ids=str)
def test_split_architectures_equal_one_device(ranks: Any, name: str, variant: str, count: int) -> None:
    row = shard_on_ranks(ranks(count), zoo.architecture(name), variant)
    assert not row.refused
    assert row.error < 1e-5
    assert row.split == row.planned > 0
    if name in MINIMUM:
        assert row.flops <= 1 / count + 0.05
    if name in MINIMUM and name != "llama":  # whose two key heads do not divide by four ranks
        assert (row.collectives["all-reduce"], row.collectives["all-gather"]) == MINIMUM[name]
