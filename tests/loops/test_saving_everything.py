"""`torch.save` of model, optimizer, scheduler and random state, and training on from it: equal to not stopping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import crossfade as cf
from tests.loops.plain import batches, same


def with_dropout() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))


class Run:
    """A model and all that belongs to it, as a script has them."""

    def __init__(self, kind: type[torch.optim.Optimizer], **options: Any) -> None:
        self.model = with_dropout()
        self.optimizer = kind(self.model.parameters(), **options)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)
        self.step = cf.compile_step(self.model, F.mse_loss, self.optimizer)

    def train(self, data: list[Any]) -> list[float]:
        losses = []
        for x, y in data:
            losses.append(self.step(x, y).item())
            self.scheduler.step()
        return losses

    def save(self, path: Path, loss: float) -> None:
        saved = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": torch.get_rng_state(),
            "loss": loss,
        }
        torch.save(saved, path)

    def load(self, path: Path) -> None:
        saved = torch.load(path)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scheduler.load_state_dict(saved["scheduler"])
        torch.set_rng_state(saved["rng"])


KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.05}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trained_before", [0, 2])
def test_training_goes_on_from_a_file_as_if_it_had_not_stopped(tmp_path: Path, kind: str, trained_before: int) -> None:
    optimizer, options = KINDS[kind]
    unbroken = Run(optimizer, **options)
    losses = unbroken.train(batches(3))
    unbroken.save(tmp_path / "checkpoint.pt", losses[-1])
    expected = unbroken.train(batches(6)[3:])
    resumed = Run(optimizer, **options)
    resumed.train(batches(trained_before))  # a step that has run finds what was loaded, too
    resumed.load(tmp_path / "checkpoint.pt")
    assert resumed.train(batches(6)[3:]) == expected
    same(resumed.model, unbroken.model)


def test_a_file_saved_by_plain_torch_goes_on_compiled(tmp_path: Path) -> None:
    plain = Run(torch.optim.AdamW, lr=0.05)
    for x, y in batches(3):
        plain.optimizer.zero_grad()
        F.mse_loss(plain.model(x), y).backward()
        plain.optimizer.step()
        plain.scheduler.step()
    plain.save(tmp_path / "checkpoint.pt", 0.0)
    resumed = Run(torch.optim.AdamW, lr=0.05)
    resumed.load(tmp_path / "checkpoint.pt")
    losses = resumed.train(batches(6)[3:])
    torch.set_rng_state(torch.load(tmp_path / "checkpoint.pt")["rng"])
    plain.optimizer.zero_grad()
    expected = []
    for x, y in batches(6)[3:]:
        plain.optimizer.zero_grad()
        loss = F.mse_loss(plain.model(x), y)
        loss.backward()
        plain.optimizer.step()
        plain.scheduler.step()
        expected.append(loss.item())
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)


def test_a_steps_own_state_is_saved_by_torch_too(tmp_path: Path) -> None:
    unbroken, resumed = Run(torch.optim.AdamW, lr=0.05), Run(torch.optim.AdamW, lr=0.05)
    unbroken.train(batches(3))
    torch.save(unbroken.step.state_dict(), tmp_path / "step.pt")
    rate = unbroken.scheduler.state_dict()
    expected = unbroken.train(batches(6)[3:])
    resumed.step.load_state_dict(torch.load(tmp_path / "step.pt"))
    resumed.scheduler.load_state_dict(rate)
    assert resumed.step.steps == 3
    assert resumed.train(batches(6)[3:]) == expected
    same(resumed.model, unbroken.model)
