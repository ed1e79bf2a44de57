"""Training on CUDA equals eager torch: on one device, and on two gloo ranks that share the GPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.cases import train_crossfade, train_crossfade_on_ranks, train_eager
from tests.ranks.test_training import differences

CASES = ["mlp", "gpt with dropout", "cnn with batch norm", "tied weights", "unused parameter"]
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", CASES)
def test_one_gpu_equals_eager(name: str) -> None:
    assert differences(train_eager(name, device="cuda"), train_crossfade(name, device="cuda"), 1e-5, 1e-6) == []


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["mlp", "cnn with batch norm", "tied weights"])
def test_two_ranks_on_one_gpu_equal_one_device(ranks: Any, name: str) -> None:
    eager = train_eager(name, device="cuda")
    for trained in ranks(2).run(train_crossfade_on_ranks, name, 2, {"device": "cuda"}):
        assert differences(eager, trained, 1e-4, 1e-5) == []
