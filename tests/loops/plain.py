"""A small model with data, and training it as people do in plain torch, to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

STEPS = 4


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(count: int = STEPS, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 6, generator=generator), torch.randn(size, 3, generator=generator)) for _ in range(count)
    ]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: list[Any],
    loss: Callable[..., Tensor] = lambda model, x, y: F.mse_loss(model(x), y),
) -> list[float]:
    """The losses of a plain loop, which trains the model."""
    losses = []
    for batch in data:
        optimizer.zero_grad()
        value = loss(model, *batch)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def same(first: nn.Module, second: nn.Module) -> None:
    """That two models are equal, to the last bit."""
    for (name, left), right in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        torch.testing.assert_close(left, right, rtol=0.0, atol=0.0, msg=lambda text, name=name: f"{name}: {text}")
