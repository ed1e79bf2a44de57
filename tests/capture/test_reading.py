"""What a capture reads and what it does not: what is compared at every step, now and then, or only if replaced."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crossfade import compile_step
from crossfade.capture.baked_in import EVERY, BakedIn
from crossfade.errors import ModelError
from tests.capture.changed_models import Holder, Settings, X, Y


def test_a_gradient_hook_that_comes_later_is_refused() -> None:
    model = nn.Linear(3, 2)
    step = compile_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    step(X, Y)
    handle = model.weight.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(ModelError, match="parameter weight has a gradient hook"):
        step(X, Y)
    handle.remove()
    step(X, Y)
    model.weight.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(ModelError, match="parameter weight has a gradient hook"):
        step(X, Y)


class Busy(nn.Module):
    """Keeps much that it does not compute with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.calls, self.epoch, self.last, self.seen, self.average = 0, 0, None, [], {"weight": torch.zeros(2, 3)}
        self.trainer = types.SimpleNamespace(model=self, steps=0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = self.linear(x)
        self.seen.append(self.last)
        return self.last

    def log(self) -> str:
        return f"{self.epoch}, {self.trainer.steps}, {self.average}"


def test_what_the_program_does_not_read_captures_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = Busy()
    step = compile_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(5):
        with caplog.at_level(logging.WARNING, logger="crossfade"):
            step(X, Y)
        model.epoch = model.trainer.steps = number
        model.average["weight"].add_(model.linear.weight.detach())
        model.best = float(number)
        model.last = torch.zeros(number + 1)
    assert step.captures == 1
    assert (model.calls, model.seen) == (0, [])
    assert "calls of the Busy is changed by the forward (from 0 to 1)" in caplog.text


def test_a_value_that_changes_at_each_step_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(Holder(1.0, lambda it, x: x * it))
    step = compile_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    with caplog.at_level(logging.INFO, logger="crossfade"):
        for number in range(4):
            model[0].held = float(number + 1)
            step.prepare(X, Y)
    assert "capturing again: model.0.held changed from 1.0 to 2.0" in caplog.text
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and warnings[0].startswith("model.0.held has been the cause of 3 captures")
    assert step.report.facts["captured again"] == "model.0.held changed from 3.0 to 4.0"
    assert "values watched at every step" in step.report.facts["guards"]


def test_a_return_to_an_earlier_state_captures_nothing() -> None:
    model = Holder({"a": [1.0, Settings()]}, lambda it, x: x * it["a"][0] * it["a"][1].scale)
    baked_in = BakedIn([model])
    first = baked_in.number()
    model.held["a"][1].scale = 2.0
    assert baked_in.number() != first
    model.held = {"a": [1.0, Settings()]}  # equal, and another
    assert baked_in.number() == first
    model.held["a"][1].scale = 2.0
    assert baked_in.number() != first


LARGE: dict[str, tuple[str, Callable[[], Any], Callable[[Any], Any]]] = {
    "an array": ("1 larger arrays", lambda: np.zeros(1000), lambda it: it.__setitem__(999, 1.0)),
    "a tensor, past torch": ("1 larger tensors on cpu", lambda: torch.zeros(1000), lambda it: it.data.fill_(1.0)),
    "a dict": ("1 large dicts", lambda: dict.fromkeys(range(5000), 1), lambda it: it.update({4000: 2})),
    "a list": ("1 large lists", lambda: [1] * 5000, lambda it: it.__setitem__(4000, 2)),
}


@pytest.mark.parametrize(("words", "make", "change"), LARGE.values(), ids=LARGE)
def test_what_is_large_is_compared_every_so_often(words: str, make: Any, change: Any) -> None:
    model = Holder(make(), lambda it, x: x * float(it[999]))
    baked_in = BakedIn([model])
    first = baked_in.number()
    assert f"compared every {EVERY} steps: {words}" in baked_in.watched()
    change(model.held)
    assert baked_in.number() == first
    assert {baked_in.number() for _ in range(EVERY)} == {first, first + 1}


def test_what_is_not_looked_into_is_said() -> None:
    model = Holder(np.random.default_rng(0), lambda it, x: x * it.random())
    baked_in = BakedIn([model])
    baked_in.number()
    assert "seen only when replaced: 1 Generator" in baked_in.watched()


def test_more_than_can_be_looked_at_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crossfade.capture.reading.LOOKED_AT", 100)
    chain: Any = None
    for _ in range(5000):
        chain = Settings(inner=chain)
    model = Holder(chain, lambda it, x: x * it.scale * it.inner.scale)
    baked_in = BakedIn([model])
    first = baked_in.number()
    model.held.inner.scale = 2.0
    assert baked_in.number() != first and "1 Settings" in baked_in.watched()
