"""Parameters and optimizer state in parts: trained on ranks equals trained on one device, whatever is split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import crossfade as cf
from crossfade.errors import CrossfadeError
from tests.ranks.cases import CASES, batches, start, train_crossfade_on_ranks, train_eager
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


def misused() -> list[str]:
    """What a model in parts says to those who take it for a whole one, or give it other parameters."""
    case, model, optimizer = start("mlp", "")
    batch = batches(case, 1)[0]
    step = cf.compile_step(model, case.loss, optimizer, {"dp": 2}, data_parallel="zero3", timeout=20)
    messages = []

    def attempt(what: Callable[[], Any]) -> None:
        try:
            what()
        except CrossfadeError as error:
            messages.append(str(error))

    attempt(lambda: cf.compile_step(model, case.loss, optimizer, {"dp": 2}, timeout=20))
    with step.gathered():
        attempt(lambda: step(*batch))
    again = cf.compile_step(model, case.loss, optimizer, {"dp": 2}, data_parallel="zero2", timeout=20)
    again(*batch)
    attempt(lambda: step(*batch))
    return messages


@pytest.mark.ranks
def test_a_model_in_parts_is_not_taken_for_a_whole_one(ranks: Any) -> None:
    for whole, inside, replaced in ranks(2).run(misused):
        assert whole.startswith("found parameter 0.weight as a DTensor; expected whole parameters")
        assert inside.startswith(replaced[:40]) and replaced.startswith("found another parameter 0.weight than the one")
