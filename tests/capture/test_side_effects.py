"""What a forward stores beside computing is put back, and told of where training would need it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crossfade import compile_step
from tests.capture.changed_models import Holder, Settings, X, Y


@dataclasses.dataclass
class Remembered(Settings):
    """Remembers what was seen."""

    seen: list[Tensor] = dataclasses.field(default_factory=list)


class Remembers(nn.Module):
    """Keeps what it is told to in a plain attribute."""

    def __init__(self, kept: object) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(3, 2), kept

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.kept = y.detach().mean() if self.kept is None else self.kept + y.detach().mean()
        return y


@pytest.mark.parametrize("kept", [torch.zeros(()), None], ids=["a running mean", "what was seen last"])
def test_a_tensor_that_the_forward_goes_on_from_is_told_of(
    kept: Tensor | None, caplog: pytest.LogCaptureFixture
) -> None:
    model = Remembers(kept)
    step = compile_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        step(torch.ones(4, 3), torch.zeros(4, 2))
    assert model.kept is kept
    told = "kept of the Remembers is changed by the forward, which runs only when a step is captured" in caplog.text
    assert told == (kept is not None) and ("make it a buffer" in caplog.text) == told


COUNTED = 0


def _counted_globally(settings: Any, y: Tensor) -> Tensor:
    global COUNTED
    COUNTED += 1
    return y / COUNTED


def _remembered(settings: Any, y: Tensor) -> Tensor:
    remembered = y + (settings.seen[-1] if settings.seen else 0)
    settings.seen.append(y.detach().mean())
    return remembered


def _collected(settings: Any, y: Tensor) -> Tensor:
    """Begins with an empty list, as collectors of auxiliary losses do."""
    settings.seen.clear()
    settings.seen.append(y.square().mean())
    return y + sum(settings.seen)


def _noted(settings: Any, y: Tensor) -> Tensor:
    settings.scale = y.shape[0]
    return y * settings.scale


def _kept_lazily(settings: Any, y: Tensor) -> Tensor:
    if settings.inner is None:
        settings.inner = torch.ones(2)
    return y * settings.inner


def _in_a_dict(settings: dict[str, int], y: Tensor) -> Tensor:
    settings["calls"] += 1
    return y / settings["calls"]


def _in_an_object(settings: Any, y: Tensor) -> Tensor:
    settings.scale += 1
    return y / settings.scale


GOES_ON: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Tensor], str]] = {
    "a counter in an object": (Settings, _in_an_object, r"model.held.scale is changed from 1.0 to 2.0"),
    "a counter in a dict": (lambda: {"calls": 0}, _in_a_dict, r"model.held\['calls'\] is changed from 0 to 1"),
    "a global counter": (Settings, _counted_globally, "test_side_effects.COUNTED is changed from 0 to 1"),
    "a list that is read": (Remembered, _remembered, "model.held.seen is changed from a list of 0 to a list of 1"),
    "an iterator": (lambda: iter([1.0, 0.5]), lambda it, y: y * next(it), "model.held is moved on"),
    "a generator": (lambda: (x for x in [1.0, 0.5]), lambda it, y: y * next(it), "model.held is moved on"),
    "a list that is begun again": (Remembered, _collected, ""),
    "a number that is written before it is read": (Settings, _noted, ""),
    "a tensor that is made once": (Settings, _kept_lazily, ""),
}


class Centred(nn.Module):
    """A loss whose buffer is replaced, where no checkpoint of the model would have it."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(2))

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(y - self.centre, target)
        self.centre = 0.9 * self.centre + 0.1 * y.detach().mean(0)
        return loss


def test_a_buffer_of_the_loss_that_is_replaced_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(3, 2)
    compile_step(model, Centred(), torch.optim.SGD(model.parameters(), lr=0.1))(X, Y)
    assert "loss_fn.centre is changed (a tensor of shape (2,)) by the forward or the loss" in caplog.text


@pytest.mark.parametrize(("held", "read", "told"), GOES_ON.values(), ids=GOES_ON)
def test_what_code_goes_on_from_is_told_of_wherever_it_stands(
    held: Any, read: Any, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    global COUNTED
    COUNTED = 0
    model = Holder(held(), read)
    step = compile_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    step(X, Y)
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == bool(told)
    for message in said:
        assert re.search(f"{told} by the forward or the loss, which run only when", message)
