"""Real architectures split over real gloo ranks equal one device; `make models` runs all of them in all forms."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models import zoo
from tests.models.sharded import minimum, shard_on_ranks

CHOSEN = [
    # Its heads and sequences are one dim, split in an open number of blocks.
    pytest.param("qwen3", "dynamic, decomposed", 4, marks=pytest.mark.models),
    ("gpt2", "dynamic", 2),
    ("mixtral", "static", 2),
    ("mamba2", "static", 2),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "variant", "count"), CHOSEN, ids=str)
def test_split_architectures_equal_one_device(ranks: Any, name: str, variant: str, count: int) -> None:
    row = shard_on_ranks(ranks(count), zoo.architecture(name), variant)
    assert not row.refused
    assert row.error < 1e-5
    assert row.split == row.planned > 0
    assert row.flops <= 1 / count + (0.05 if count == 2 else 0.1), (
        "keys and values of two heads are whole on four ranks"
    )
    assert row.counts == minimum(name, count)
