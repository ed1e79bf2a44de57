"""Training on CUDA equals eager torch: on one device, and on two gloo ranks that share the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import crossfade as cf
from tests.ranks.cases import train_crossfade, train_crossfade_on_ranks, train_eager
from tests.ranks.test_training_on_ranks import differences

CASES = ["mlp", "gpt with dropout", "cnn with batch norm", "tied weights", "unused parameter"]
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", CASES)
def test_one_gpu_equals_eager(name: str) -> None:
    assert differences(train_eager(name, device="cuda"), train_crossfade(name, device="cuda"), 1e-5, 1e-6) == []


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
def test_updates_in_few_calls_are_those_of_single_ones_to_the_last_bit(optimizer: type[torch.optim.Optimizer]) -> None:
    def model() -> torch.nn.Sequential:
        torch.manual_seed(0)
        return torch.nn.Sequential(*(torch.nn.Linear(48, 48) for _ in range(12))).cuda()

    ours, theirs = model(), model()
    options: dict[str, Any] = {"lr": 0.01, "foreach": False}
    mine, other = (optimizer(one.parameters(), **options) for one in (ours, theirs))
    step = cf.compile_step(ours, torch.nn.functional.mse_loss, mine, execute="eager")
    for _ in range(4):
        x, y = torch.randn(8, 48, device="cuda"), torch.randn(8, 48, device="cuda")
        step(x, y)
        other.zero_grad()
        torch.nn.functional.mse_loss(theirs(x), y).backward()
        other.step()
    assert str(step.program).count("aten._foreach_addcdiv_") <= 2
    for one, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, expected)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["mlp", "cnn with batch norm", "tied weights"])
def test_two_ranks_on_one_gpu_equal_one_device(ranks: Any, name: str) -> None:
    eager = train_eager(name, device="cuda")
    for trained in ranks(2).run(train_crossfade_on_ranks, name, 2, {"device": "cuda"}):
        assert differences(eager, trained, 1e-4, 1e-5) == []
