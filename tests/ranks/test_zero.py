"""Parameters and optimizer state in parts: trained on ranks equals trained on one device, whatever is split."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossfade as cf
from crossfade.errors import CrossfadeError
from tests.models.choice import some
from tests.ranks.cases import CASES, PLANNED, batches, start, train_crossfade_on_ranks, train_eager
from tests.ranks.test_training_on_ranks import TOLERANCE, differences

MODES = ["zero1", "zero2", "zero3"]


OFTEN = {
    2: {"zero1": ("mlp", "cnn with batch norm"), "zero2": ("tied weights", "unused parameter"), "zero3": tuple(CASES)},
    4: {"zero1": ("tied weights",), "zero2": ("mlp",), "zero3": ("tied weights", "cnn with batch norm")},
}
"""By the number of ranks and the mode: zero3 splits all that the others do."""


SPLIT = [
    pytest.param(name, count, mode, marks=() if name in OFTEN[count][mode] else (pytest.mark.models,))
    for name, count, mode in itertools.product(CASES, (2, 4), MODES)
]


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "count", "mode"), SPLIT)
def test_split_ranks_equal_one_device(ranks: Any, name: str, count: int, mode: str) -> None:
    """On 4 ranks the rows of nearly every parameter do not divide: 5 classes, 3 channels, biases of 4 and 3."""
    rtol, atol = TOLERANCE.get(name, PLANNED)
    eager = train_eager(name)
    options = {"data_parallel": mode} | ({"loss_is": "sum"} if name == "summed loss" else {})
    everywhere = ranks(count).run(train_crossfade_on_ranks, name, count, options)
    for trained in everywhere:
        assert differences(eager, trained, rtol, atol) == []
        assert differences(everywhere[0], trained, 0, 0) == []
        assert trained.extra["captures"] == 1


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["replicate", "zero1"])
def test_gradients_of_embeddings_travel_as_rows_in_planned_steps(ranks: Any, mode: str) -> None:
    eager = train_eager("many words")
    options = {"data_parallel": mode, "machine": "ethernet-1gbit"}
    for trained in ranks(2).run(train_crossfade_on_ranks, "many words", 2, options):
        assert differences(eager, trained, *PLANNED) == []
        reduced = [size for kind, (_, size) in trained.extra["collectives"].items() if kind != "all_gather"]
        assert sum(reduced) < 10_000  # the other gradients; the table's has a million bytes


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["replicate", "zero1"])
def test_gradients_of_embeddings_travel_as_rows_beside_a_plan_for_others(ranks: Any, mode: str) -> None:
    eager = train_eager("many words")
    plan = {"mesh": {"dp": 2, "tp": 2}, "tensor_parallel": {"head": "rowwise"}}
    options = {"data_parallel": mode, "machine": "ethernet-1gbit", **plan}
    for trained in ranks(4).run(train_crossfade_on_ranks, "many words", 4, options):
        assert trained.losses == pytest.approx(eager.losses, rel=1e-4)
        torch.testing.assert_close(trained.model["embedding.weight"], eager.model["embedding.weight"])
        reduced = [size for kind, (_, size) in trained.extra["collectives"].items() if kind != "all_gather"]
        assert sum(reduced) < 10_000


@pytest.mark.ranks
@pytest.mark.parametrize("mode", some(MODES, often=["zero1", "zero3"]))
def test_factors_of_gradients_travel_in_planned_steps(ranks: Any, mode: str) -> None:
    eager = train_eager("wide")
    options = {"data_parallel": mode, "machine": "ethernet-1gbit"}
    for trained in ranks(2).run(train_crossfade_on_ranks, "wide", 2, options):
        assert differences(eager, trained, *PLANNED) == []
        exchanged = trained.extra["collectives"]["all_to_all"][1]
        assert exchanged < 100_000  # the first factors, and small gradients; the gradients have a million bytes


@pytest.mark.ranks
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options",
    [{"clip_grad_norm": 0.1, "batch": "local"}, {"accumulate": 2, "optimizer": "adam, amsgrad"}],
    ids=lambda options: " and ".join(options),
)
def test_split_ranks_equal_one_device_with(ranks: Any, options: dict[str, Any], mode: str) -> None:
    reference = {"clip": options.get("clip_grad_norm"), "accumulate": options.get("accumulate", 1)}
    eager = train_eager("mlp", optimizer=options.get("optimizer", ""), **reference)
    for trained in ranks(2).run(train_crossfade_on_ranks, "mlp", 2, {**options, "data_parallel": mode}):
        assert differences(eager, trained, *PLANNED) == []


@pytest.mark.ranks
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", some(["mlp", "gpt with dropout", "cnn with batch norm"], often=["mlp"]))
def test_hybrid_ranks_equal_one_device(ranks: Any, name: str, mode: str) -> None:
    """Rows split over two ranks, and the two parts copied on two pairs of ranks."""
    eager = train_eager(name, clip=0.1)
    options = {"data_parallel": mode, "clip_grad_norm": 0.1, "mesh": {"dp_replicate": 2, "dp_shard": 2}}
    for trained in ranks(4).run(train_crossfade_on_ranks, name, 4, options):
        assert differences(eager, trained, *PLANNED) == []


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
        assert whole.startswith("parameter 0.weight as a DTensor: expected whole parameters")
        assert inside.startswith(replaced[:40]) and replaced.startswith(
            "parameter 0.weight was replaced after it was split"
        )


def half_precision(mode: str) -> tuple[float, bool]:
    """The norm of gradients in half precision that is more than 256, and whether a clipped step moves the weights."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False, dtype=torch.float16)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = cf.compile_step(
        model, lambda y, t: (y * 8).sum(), optimizer, {"dp": 2}, data_parallel=mode, clip_grad_norm=1.0, timeout=20
    )
    ones = torch.ones(4, 64, dtype=torch.float16)
    step(ones, ones)
    after = model.weight.detach()
    return float(step.outputs["grad_norm"]), not torch.equal(before, after.full_tensor() if mode == "zero3" else after)


@pytest.mark.ranks
def test_a_large_norm_in_half_precision_does_not_overflow(ranks: Any) -> None:
    (expected, moved), _ = ranks(2).run(half_precision, "replicate")
    assert expected > 256 and moved
    for norm, moved in [*ranks(2).run(half_precision, "zero1"), *ranks(2).run(half_precision, "zero3")]:
        assert norm == pytest.approx(expected, rel=1e-2) and moved


class OneNumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def only_single_numbers() -> float:
    model = OneNumber()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"data_parallel": "zero3", "clip_grad_norm": 1.0, "timeout": 20}
    step = cf.compile_step(model, nn.functional.mse_loss, optimizer, {"dp": 2}, **options)
    step(torch.ones(4, 2), torch.zeros(4, 2))
    return float(step.outputs["grad_norm"])


@pytest.mark.ranks
def test_the_norm_of_single_numbers_alone(ranks: Any) -> None:
    assert ranks(2).run(only_single_numbers) == [4.0, 4.0]


def splits_nothing() -> str:
    case, model, optimizer = start("mlp", "")
    try:
        mesh = {"dp_replicate": 2, "dp_shard": 1}
        cf.compile_step(model, case.loss, optimizer, mesh, data_parallel="zero3", timeout=20)
    except CrossfadeError as error:
        return str(error)
    return "no error"


@pytest.mark.ranks
def test_a_mesh_without_an_axis_to_split_over_is_refused(ranks: Any) -> None:
    for message in ranks(2).run(splits_nothing):
        assert message.startswith("data_parallel='zero3' on a mesh that splits nothing")
