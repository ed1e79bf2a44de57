"""Compiled regions and CUDA graphs on a GPU: the numbers of eager torch, whatever changes between replays."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import crossfade as cf
from crossfade.execute.cuda_graph import Replay
from tests.ranks.cases import train_crossfade, train_eager
from tests.ranks.test_training_on_ranks import differences

pytestmark = pytest.mark.gpu

CASES = ["mlp", "gpt with dropout", "cnn with batch norm", "tied weights", "unused parameter"]
OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 1e-2}),
    (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-2}),
    (torch.optim.RMSprop, {"lr": 1e-3}),
    (torch.optim.Adagrad, {"lr": 1e-2}),
    (torch.optim.NAdam, {"lr": 1e-3}),
]


class Small(nn.Module):
    """Two layers with everything that makes replays hard: dropout, a buffer that changes, a norm."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        # No bias before a norm: its gradient is noise, which Adam makes as large as any other.
        self.first, self.norm = nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32)
        self.drop, self.last = nn.Dropout(dropout), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


def pair(dropout: float = 0.0) -> tuple[Small, Small]:
    torch.manual_seed(0)
    model = Small(dropout).cuda()
    return model, copy.deepcopy(model)


def eager(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def data(size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 16, device="cuda"), torch.randint(0, 4, (size,), device="cuda")


def apart(ours: nn.Module, theirs: nn.Module) -> float:
    states = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
    return max((mine.double() - other.double()).abs().max().item() for mine, other in states)


def replays(step: Any) -> list[Replay]:
    names = step._last.executable.compiled.function.__globals__
    return [value for value in names.values() if isinstance(value, Replay)]


@pytest.mark.parametrize("execute", ["auto", "exact", "eager"])
@pytest.mark.parametrize("name", CASES)
def test_one_gpu_equals_eager(name: str, execute: str) -> None:
    ours = train_crossfade(name, device="cuda", execute=execute)
    assert differences(train_eager(name, device="cuda"), ours, 1e-4, 1e-5) == []


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=[kind.__name__ for kind, _ in OPTIMIZERS])
def test_a_step_is_recorded_once_whatever_rates_change(
    kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    ours, theirs = pair()
    mine, other = kind(ours.parameters(), **options), kind(theirs.parameters(), **options)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.7) for each in (mine, other)]
    step = cf.compile_step(ours, nn.functional.cross_entropy, mine)
    for _ in range(8):
        x, y = data()
        loss, expected = step(x, y), eager(theirs, other, x, y)
        torch.testing.assert_close(loss.detach(), expected, rtol=1e-4, atol=1e-5)
        for schedule in schedules:
            schedule.step()
    assert apart(ours, theirs) < 1e-4
    gradients_then_update = [(1, ""), (1, "")]  # the host computes its numbers meanwhile
    assert [(replay.recordings, replay.failed) for replay in replays(step)] == gradients_then_update
    assert step.captures == 1


def test_draws_are_those_of_eager_torch() -> None:
    ours, theirs = pair(dropout=0.5)
    mine, other = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs))
    step = cf.compile_step(ours, nn.functional.cross_entropy, mine)
    for seed in range(5):
        x, y = data()
        torch.manual_seed(seed)
        loss = step(x, y)
        torch.manual_seed(seed)
        torch.testing.assert_close(loss.detach(), eager(theirs, other, x, y), rtol=1e-4, atol=1e-5)


def test_losses_that_are_kept_stay() -> None:
    ours, _ = pair()
    step = cf.compile_step(ours, nn.functional.cross_entropy, torch.optim.SGD(ours.parameters(), lr=0.1))
    losses, numbers = [], []
    for _ in range(6):
        losses.append(step(*data()))
        numbers.append(float(losses[-1]))
    assert [float(loss) for loss in losses] == numbers
    assert len(set(numbers)) == 6


def test_parameters_that_move_are_found() -> None:
    ours, theirs = pair()
    mine, other = (torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (ours, theirs))
    step = cf.compile_step(ours, nn.functional.cross_entropy, mine)
    for number in range(8):
        if number == 4:
            ours.first.weight.data = ours.first.weight.data.clone()
        if number == 6:
            state = copy.deepcopy(mine.state_dict())
            mine.load_state_dict(state)
        x, y = data()
        step(x, y)
        eager(theirs, other, x, y)
    assert apart(ours, theirs) < 1e-4


def test_sizes_in_turns_and_evaluation_between() -> None:
    ours, theirs = pair()
    mine, other = (torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (ours, theirs))
    step = cf.compile_step(ours, nn.functional.cross_entropy, mine, dynamic=False)
    for number in range(9):
        x, y = data(8 if number % 3 else 12)
        step(x, y)
        eager(theirs, other, x, y)
        ours.eval(), theirs.eval()
        with torch.no_grad():
            torch.testing.assert_close(ours(x), theirs(x), rtol=1e-3, atol=1e-4)
        ours.train(), theirs.train()
    assert apart(ours, theirs) < 1e-4


def test_gradients_are_kept_until_they_are_used() -> None:
    ours, theirs = pair()
    mine, other = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs))
    gradients = cf.compile_gradients(ours, nn.functional.cross_entropy)
    for _ in range(5):
        x, y = data()
        mine.zero_grad()
        gradients(x, y).backward()
        mine.step()
        eager(theirs, other, x, y)
    assert apart(ours, theirs) < 1e-5
