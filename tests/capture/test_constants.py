"""Tensors that a step would bake in, though eager training changes them: refused, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crossfade import compile_step
from crossfade.capture.baked_in import BakedIn
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


class Centred(nn.Module):
    """A loss with a running mean, as DINO's, and a teacher that somebody changes between steps."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(2))
        self.teacher = nn.Linear(3, 2).requires_grad_(False)

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(y - self.centre, target) + F.mse_loss(y, self.teacher(X))
        with torch.no_grad():
            self.centre.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return loss


class Whole(nn.Module):
    """What the remedy says: a module that owns the model and the loss."""

    def __init__(self, model: nn.Module, loss: Centred) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.model(x), target)


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
        r"^model.mean, a tensor of shape \(2,\), neither parameter nor buffer of the model, is changed in place by "
        r"aten.mul_.Tensor at .*self.mean.* Remedy: register it with register_buffer",
        lambda: (Writing(), F.mse_loss),
    ),
    "a buffer of the loss that is written": (
        r"^loss_fn.centre, a tensor of shape \(2,\), .* Remedy: let one module own the model and what has the tensor",
        lambda: (nn.Linear(3, 2), Centred()),
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


def _taken_in(*, compiled: bool) -> tuple[list[Tensor], int]:
    torch.manual_seed(0)
    whole = Whole(student := nn.Linear(3, 2), loss := Centred())
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    step = compile_step(whole, None, optimizer) if compiled else None
    for _ in range(3):
        if step is not None:
            step(X, Y)
        else:
            optimizer.zero_grad()
            whole(X, Y).backward()
            optimizer.step()
        with torch.no_grad():
            loss.teacher.weight.lerp_(student.weight, 0.5)
    return [value.clone() for value in whole.state_dict().values()], step.captures if step is not None else 1


def test_a_module_that_owns_the_loss_trains_as_eagerly_and_is_captured_once() -> None:
    torch.testing.assert_close(_taken_in(compiled=True), _taken_in(compiled=False))


def test_a_tensor_of_the_loss_that_changes_at_each_step_is_told_of_with_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loss = Centred()
    baked_in = BakedIn([nn.Linear(3, 2)], loss)
    for _ in range(5):
        baked_in.number()
        baked_in.captured()
        for parameter in loss.teacher.parameters():
            parameter.data.mul_(0.5)
    said = [record.message for record in caplog.records]
    assert len(said) == 1 and said[0].startswith(
        "loss_fn.teacher.weight has been the cause of 3 captures (so have 1 more)"
    )
    assert "let one module own the model and what has the tensor" in said[0]
