"""A step finds what users have replaced between steps, without looking everything up at each."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from crossfade import compile_step
from crossfade.execute.bound import Bound, BoundValue


def stepped(**options: Any) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return compile_step(model, nn.functional.mse_loss, optimizer, **options), model, optimizer


X, Y = torch.arange(12.0).reshape(4, 3) / 12, torch.ones(4, 2)


def fresh_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})


def other_moment(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    entries = optimizer.state[next(model.parameters())]
    entries["exp_avg"] = torch.full_like(entries["exp_avg"], 3.0)


def other_buffer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[1].running_mean = torch.full((4,), 5.0)  # type: ignore[index]


def other_rate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


def same_again(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})


@pytest.mark.parametrize("change", [fresh_state, other_moment, other_buffer, other_rate, same_again])
def test_what_is_replaced_between_steps_is_what_the_next_one_uses(change: Any) -> None:
    step, ours, mine = stepped()
    _, theirs, other = stepped()
    for number in range(4):
        if number == 2:
            change(ours, mine)
            change(theirs, other)
        step(X, Y)
        other.zero_grad()
        nn.functional.mse_loss(theirs(X), Y).backward()
        other.step()
    for (name, value), expected in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(value, expected), name
    for parameter, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.state[parameter]["exp_avg"], other.state[expected]["exp_avg"])
    assert step.captures == 1


def test_a_program_that_is_not_called_any_more_does_not_hold_old_state() -> None:
    step, model, optimizer = stepped()
    for size in (4, 2, 4):  # a program for each
        step(X[:size], Y[:size])
    old = [weakref.ref(entries["exp_avg"]) for entries in optimizer.state.values()]
    fresh_state(model, optimizer)
    step(X, Y)
    assert [reference() for reference in old] == [None] * len(old)


def test_what_was_looked_up_is_not_again_unless_something_was_replaced() -> None:
    model, looked_up = {"w": object()}, []

    def find() -> BoundValue:
        looked_up.append(1)
        return BoundValue(model["w"], ((model, "w", model["w"]),))

    bound = Bound({0: find, 2: find}, {1: lambda batch: batch.pop("x")})
    bound.look_up()
    batch = {"x": 1}
    assert bound.is_current() and bound.values(batch) == [model["w"], 1, model["w"]] and not batch
    assert len(looked_up) == 2
    del model["w"]
    assert not bound.is_current()
