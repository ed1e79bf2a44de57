"""A loss function may return other numbers too: what a loop logs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import crossfade as cf


def with_accuracy(logits: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    right = logits.argmax(-1) == labels
    return F.cross_entropy(logits, labels), {"accuracy": right.float().mean(), "right": right}


def train(ranks: int = 1) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    step = cf.compile_step(model, with_accuracy, torch.optim.SGD(model.parameters(), lr=0.5), {"dp": ranks})
    losses, accuracies = [], []
    for seed in range(3):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        labels = x.argmax(-1) % 3
        with torch.no_grad():
            own = slice(None) if ranks == 1 else slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
            expected = with_accuracy(model(x[own]), labels[own])[1]
        losses.append(float(step(x, labels)))
        assert {name: value.tolist() for name, value in step.outputs.items()} == {
            name: value.tolist() for name, value in expected.items()
        }
        accuracies.append(float(step.outputs["accuracy"]))
    return losses, accuracies


def test_on_one_device() -> None:
    train()


@pytest.mark.ranks
def test_on_ranks_each_has_the_numbers_of_its_part(ranks: Any) -> None:
    (losses, first), (_, second) = ranks(2).run(train, 2)
    alone = train()
    assert losses == pytest.approx(alone[0], rel=1e-5)
    assert [(a + b) / 2 for a, b in zip(first, second, strict=True)] == pytest.approx(alone[1])


def test_micro_batches_return_the_loss_alone() -> None:
    model = nn.Linear(4, 3)
    step = cf.compile_step(model, with_accuracy, torch.optim.SGD(model.parameters()), accumulate=2)
    with pytest.raises(cf.NotYetError, match="accuracy, right beside the loss of 2 micro-batches"):
        step(torch.ones(4, 4), torch.zeros(4, dtype=torch.long))
