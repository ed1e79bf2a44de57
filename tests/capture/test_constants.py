"""Tensors that a step would bake in, though eager training changes them: refused, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crossfade import compile_step
from crossfade.errors import CaptureError
from tests.capture.changed_models import X, Y


class Collected(nn.Module):
    """Reads its parameter from a list, which no module swaps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.all = [self.linear.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.all[0].sum()


class Writing(nn.Module):
    """Changes a plain tensor in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mean = nn.Linear(3, 2), torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
        return y - self.mean


class Tempered(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(y * self.temperature, target)


def _penalised() -> tuple[nn.Module, Any]:
    model = nn.Linear(3, 2)
    weight = model.weight
    return model, lambda y, target: F.mse_loss(y, target) + weight.square().sum()


REFUSED: dict[str, tuple[str, Callable[[], tuple[nn.Module, Any]]]] = {
    "a parameter in a list": (
        r"parameter linear.weight is read from model.all\[0\]",
        lambda: (Collected(), F.mse_loss),
    ),
    "a parameter in a closure": (r"parameter weight is read from loss_fn.weight: .* read model.weight", _penalised),
    "a plain tensor that is written": (
        r"shape \(2,\), neither parameter nor buffer, is changed in place by aten.mul_.Tensor at .*self.mean",
        lambda: (Writing(), F.mse_loss),
    ),
    "a parameter of the loss": (
        r"loss_fn.temperature requires a gradient .* Remedy: make it a part of the model",
        lambda: (nn.Linear(3, 2), Tempered()),
    ),
}


@pytest.mark.parametrize(("message", "make"), REFUSED.values(), ids=REFUSED)
def test_constants_that_eager_training_would_change_are_refused(message: str, make: Any) -> None:
    model, loss = make()
    step = compile_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    before = [value.clone() for value in model.state_dict().values()], getattr(model, "mean", torch.zeros(2)).clone()
    with pytest.raises(CaptureError, match=message):
        step(X, Y)
    after = list(model.state_dict().values()), getattr(model, "mean", torch.zeros(2))
    torch.testing.assert_close(after, before)
