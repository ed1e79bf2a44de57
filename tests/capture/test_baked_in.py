"""What a program was captured with is seen to have changed, whatever it is, and only then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from crossfade import compile_step
from crossfade.capture.baked_in import BakedIn

X, Y = torch.arange(12.0).reshape(4, 3) / 12, torch.ones(4, 2)


def model_of() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    model[1].mode = None  # type: ignore[assignment]
    return model


AGAIN = {
    "a number": lambda model: setattr(model[1], "momentum", 0.5),
    "a switch": lambda model: model.eval(),
    "a parameter that is not trained": lambda model: model[0].bias.requires_grad_(False),
}


@pytest.mark.parametrize("change", AGAIN.values(), ids=AGAIN)
def test_what_is_baked_in_is_captured_again(change: Any) -> None:
    model = model_of()
    step = compile_step(model, nn.functional.mse_loss, torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        step(X, Y)
    change(model)
    before = step.captures
    step.prepare(X, Y)
    step.prepare(X, Y)
    assert (before, step.captures) == (1, 2)


SEEN = AGAIN | {
    "a word that was none": lambda model: setattr(model[1], "mode", "fast"),
    "a word where there was nothing": lambda model: setattr(model[0], "extra", "word"),
    "a dtype": lambda model: model.double(),
    "a parameter where there was none": lambda model: setattr(model[2], "scale", nn.Parameter(torch.ones(4))),
    "another parameter": lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(4, 3))),
    "no parameter any more": lambda model: setattr(model[0], "bias", None),
    "a buffer of another shape": lambda model: setattr(model[1], "running_mean", torch.ones(5)),
}


@pytest.mark.parametrize("change", SEEN.values(), ids=SEEN)
def test_a_change_gives_another_number(change: Any) -> None:
    model = model_of()
    baked_in = BakedIn(model.modules())
    before = baked_in.number()
    change(model)
    assert baked_in.number() != before
    assert baked_in.number() == baked_in.number()


def test_a_switch_under_another_name_is_seen() -> None:
    model = nn.ReLU()
    model.causal = True
    baked_in = BakedIn([model])
    before = baked_in.number()
    del model.causal
    model.flash = True
    assert baked_in.number() != before


def test_scripted_modules_are_read_too() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(3, 4)), nn.Linear(4, 2))
    step = compile_step(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    step(X, Y)
    step(X, Y)
    assert step.captures == 1


def test_of_many_states_the_oldest_are_forgotten() -> None:
    model = nn.Dropout(0.0)
    baked_in = BakedIn([model])
    numbers = []
    for number in range(100):
        model.p = number / 100
        numbers.append(baked_in.number())
    assert len(set(numbers)) == 100 and len(baked_in._numbers) <= 32
    model.p = 0.98
    assert baked_in.number() == numbers[98]


def test_the_same_again_gives_the_same_number() -> None:
    model = model_of()
    baked_in = BakedIn(model.modules())
    before = baked_in.number()
    model.eval()
    assert baked_in.number() != before
    model.train()
    model[1].running_mean = torch.ones(4)  # values are no part of it
    assert baked_in.number() == before
