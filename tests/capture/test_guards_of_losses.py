"""Whatever a capture has read of a loss function is seen to have changed at the next step."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.capture.changed_models import Case, check


class Weighted(nn.Module):
    """A loss with an attribute, a buffer, and a config object."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = 1.0
        self.config = types.SimpleNamespace(power=2)
        self.register_buffer("rows", torch.tensor([1.0, 1.0]))

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        return ((y - target).abs().pow(self.config.power) * self.rows).mean() * self.weight

    def doubled(self, y: Tensor, target: Tensor) -> Tensor:
        return 2 * self(y, target)


def weighted_loss(y: Tensor, target: Tensor, weight: float = 1.0) -> Tensor:
    return F.mse_loss(y, target) * weight


def on_loss(
    change: Callable[[Weighted], Any], use: Callable[[Weighted], Any] = lambda loss: loss
) -> Callable[[], Case]:
    def case() -> Case:
        loss = Weighted()
        return nn.Linear(3, 2), use(loss), lambda: change(loss)

    return case


def _partial() -> Case:
    loss = functools.partial(weighted_loss, weight=1.0)
    return nn.Linear(3, 2), loss, lambda: loss.keywords.update(weight=3.0)


def _defaults() -> Case:
    def loss(y: Tensor, target: Tensor, weight: float = 1.0) -> Tensor:
        return F.mse_loss(y, target) * weight

    return nn.Linear(3, 2), loss, lambda: setattr(loss, "__defaults__", (3.0,))


def _free_variable() -> Case:
    weight = 1.0

    def change() -> None:
        nonlocal weight
        weight = 3.0

    return nn.Linear(3, 2), lambda y, target: F.mse_loss(y, target) * weight, change


def _free_list() -> Case:
    weights = [1.0]
    return nn.Linear(3, 2), lambda y, target: F.mse_loss(y, target) * weights[0], lambda: weights.insert(0, 3.0)


def _free_tensor() -> Case:
    weight = torch.tensor([1.0, 2.0])
    return nn.Linear(3, 2), lambda y, target: F.mse_loss(y * weight, target), lambda: weight.mul_(3.0)


def _function_attribute() -> Case:
    def loss(y: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(y, target) * loss.weight  # type: ignore[attr-defined]

    loss.weight = 1.0  # type: ignore[attr-defined]
    return nn.Linear(3, 2), loss, lambda: setattr(loss, "weight", 3.0)


ON_LOSSES: dict[str, Callable[[], Case]] = {
    "an attribute": on_loss(lambda loss: setattr(loss, "weight", 3.0)),
    "a buffer replaced": on_loss(lambda loss: setattr(loss, "rows", torch.tensor([3.0, 1.0]))),
    "a buffer changed in place": on_loss(lambda loss: loss.rows.mul_(3.0)),
    "a config": on_loss(lambda loss: setattr(loss.config, "power", 3)),
    "a hook": on_loss(lambda loss: loss.register_forward_hook(lambda module, args, out: 3 * out)),
    "an attribute behind a bound method": on_loss(lambda loss: setattr(loss, "weight", 3.0), lambda loss: loss.doubled),
    "an attribute behind a lambda": on_loss(
        lambda loss: setattr(loss, "weight", 3.0), lambda loss: lambda y, target: loss(y, target)
    ),
    "an attribute behind a partial": on_loss(
        lambda loss: setattr(loss, "weight", 3.0), lambda loss: functools.partial(loss)
    ),
    "a keyword of a partial": _partial,
    "a default": _defaults,
    "a free variable": _free_variable,
    "a list in a free variable": _free_list,
    "a tensor in a free variable": _free_tensor,
    "an attribute of a function": _function_attribute,
}


@pytest.mark.parametrize("make", ON_LOSSES.values(), ids=ON_LOSSES)
def test_a_change_of_the_loss_is_seen(make: Callable[[], Case]) -> None:
    check(make)


class Tempered(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(y * self.temperature, target)


def test_a_frozen_parameter_of_the_loss_is_watched() -> None:
    def make() -> Case:
        loss = Tempered().requires_grad_(False)
        return nn.Linear(3, 2), loss, lambda: loss.temperature.fill_(3.0)

    check(make)
