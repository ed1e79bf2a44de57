"""Parameters and optimizer state in parts: trained on ranks equals trained on one device, whatever is split."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.cases import CASES, train_crossfade_on_ranks, train_eager
from tests.ranks.test_training import TOLERANCE, differences

MODES = ["zero1", "zero2", "zero3"]


@pytest.mark.ranks
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_split_ranks_equal_one_device(ranks: Any, name: str, count: int, mode: str) -> None:
    """On 4 ranks the rows of nearly every parameter do not divide: 5 classes, 3 channels, biases of 4 and 3."""
    rtol, atol = TOLERANCE.get(name, TOLERANCE["default"])
    eager = train_eager(name)
    options = {"data_parallel": mode} | ({"loss_is": "sum"} if name == "summed loss" else {})
    everywhere = ranks(count).run(train_crossfade_on_ranks, name, count, options)
    for trained in everywhere:
        assert differences(eager, trained, rtol, atol) == []
        assert differences(everywhere[0], trained, 0, 0) == []
        assert trained.extra["captures"] == 1


@pytest.mark.ranks
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options",
    [{"clip_grad_norm": 0.1}, {"accumulate": 2}, {"batch": "local"}, {"optimizer": "adam, amsgrad"}],
    ids=lambda options: next(iter(options)),
)
def test_split_ranks_equal_one_device_with(ranks: Any, options: dict[str, Any], mode: str) -> None:
    reference = {"clip": options.get("clip_grad_norm"), "accumulate": options.get("accumulate", 1)}
    eager = train_eager("mlp", optimizer=options.get("optimizer", ""), **reference)
    for trained in ranks(2).run(train_crossfade_on_ranks, "mlp", 2, {**options, "data_parallel": mode}):
        assert differences(eager, trained, 2e-5, 2e-6) == []


@pytest.mark.ranks
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["mlp", "gpt with dropout", "cnn with batch norm"])
def test_hybrid_ranks_equal_one_device(ranks: Any, name: str, mode: str) -> None:
    """Rows split over two ranks, and the two parts copied on two pairs of ranks."""
    eager = train_eager(name, clip=0.1)
    options = {"data_parallel": mode, "clip_grad_norm": 0.1, "mesh": {"dp_replicate": 2, "dp_shard": 2}}
    for trained in ranks(4).run(train_crossfade_on_ranks, name, 4, options):
        assert differences(eager, trained, 2e-5, 2e-6) == []
