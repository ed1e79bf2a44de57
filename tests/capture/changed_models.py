"""Models that training changes under a compiled step: what is captured again must train as eager torch does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from crossfade import Step, compile_step

X, Y = torch.arange(12.0).reshape(4, 3) / 12, torch.arange(8.0).reshape(4, 2) / 8

Change = Callable[[], Any]
Case = tuple[nn.Module, Any, Change]
"""A model, a loss function, and what the user changes after the first steps."""


class Holder(nn.Module):
    """Computes with something that it holds in a plain attribute."""

    flavour = 1.0

    def __init__(self, held: Any, read: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.held, self.read = held, read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.held, self.linear(x)) * self.flavour


@dataclasses.dataclass
class Settings:
    scale: float = 1.0
    inner: Any = None


def trained(case: Case, step: Callable[[], Any]) -> list[Tensor]:
    model, _, change = case
    for _ in range(2):
        step()
    change()
    for _ in range(2):
        step()
    return [p.detach().clone() for p in model.parameters()]


def compiled(case: Case) -> tuple[Step, list[Tensor]]:
    model, loss, _ = case
    step = compile_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    return step, trained(case, lambda: step(X, Y))


def eager(case: Case) -> list[Tensor]:
    model, loss, _ = case
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        loss(model(X), Y).backward()
        optimizer.step()

    return trained(case, step)


def check(make: Callable[[], Case]) -> None:
    torch.manual_seed(0)
    step, found = compiled(make())
    torch.manual_seed(0)
    torch.testing.assert_close(found, eager(make()))
    assert step.captures == 2
