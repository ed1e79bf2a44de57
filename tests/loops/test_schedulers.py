"""Schedulers as people step them: no warning from torch, the same rates and the same model as in a plain loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import crossfade as cf
from tests.loops.plain import adamw, batches, network, same

RATES = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda optimizer: RATES.StepLR(optimizer, 2, gamma=0.5),
    "warm-up and cosine": lambda optimizer: RATES.SequentialLR(
        optimizer, [RATES.LinearLR(optimizer, 0.1, total_iters=2), RATES.CosineAnnealingLR(optimizer, 2)], [2]
    ),
    "LambdaLR": lambda optimizer: RATES.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "ReduceLROnPlateau": lambda optimizer: RATES.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0),
}


def loop(kind: str, *, compiled: bool, early: bool) -> tuple[torch.nn.Module, list[tuple[float, float]], int]:
    """Model, losses and rates of a loop that steps its scheduler after each step, and once before all if `early`."""
    model = network()
    optimizer = adamw(model)
    step = cf.compile_step(model, F.mse_loss, optimizer) if compiled else None
    scheduler = SCHEDULERS[kind](optimizer)
    metric = [0.0] if kind == "ReduceLROnPlateau" else []
    if early:
        scheduler.step(*metric)
    seen = []
    for x, y in batches(6):
        if step is not None:
            loss = step(x, y)
        else:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        seen.append((loss.item(), optimizer.param_groups[0]["lr"]))
        scheduler.step(*(metric and [loss.item()]))
    return model, seen, step.captures if step is not None else 0


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_stepped_after_each_step(kind: str) -> None:
    reference, expected, _ = loop(kind, compiled=False, early=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
        model, seen, captures = loop(kind, compiled=True, early=False)
    assert seen == expected and captures == 1
    assert len({rate for _, rate in seen}) > 1
    same(model, reference)


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_stepped_before_the_first_step(kind: str) -> None:
    reference, expected, _ = loop(kind, compiled=False, early=True)
    model, seen, _ = loop(kind, compiled=True, early=True)
    assert seen == expected
    same(model, reference)
