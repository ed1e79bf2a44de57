"""The same habits on two ranks: equal to a plain loop on one device with the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from crossfade import Ranks
from tests.loops import on_ranks
from tests.loops.plain import adamw, batches, network, trained

pytestmark = pytest.mark.ranks

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def plain(scheduled: bool = False) -> tuple[nn.Module, list[float], AveragedModel]:
    """A plain loop: its model, losses, and moving average."""
    model = network()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5 if scheduled else 1.0)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    losses = []
    for batch in batches():
        losses += trained(model, optimizer, [batch])
        average.update_parameters(model)
        scheduler.step()
    return model, losses, average


@pytest.mark.parametrize("batch", ["global", "local"])
def test_what_is_named_is_split_as_the_rest_is(ranks: Callable[[int], Ranks], batch: str) -> None:
    model = network()
    expected = trained(
        model,
        adamw(model),
        batches(),
        lambda model, x, y: on_ranks.smoothed(model(x), y, alpha=0.3, weight=on_ranks.weights()),
    )
    for losses, state in ranks(2).run(on_ranks.losses_with_names, batch):
        torch.testing.assert_close(losses, expected, **CLOSE)
        torch.testing.assert_close(state, dict(model.state_dict()), **CLOSE)


@pytest.mark.parametrize("mode", ["replicate", "zero1", "zero3"])
def test_stepping_the_optimizer_after_a_step_trains_once(ranks: Callable[[int], Ranks], mode: str) -> None:
    model, expected, _ = plain(scheduled=True)
    for losses, state in ranks(2).run(on_ranks.losses_after_habits, mode):
        torch.testing.assert_close(losses, expected, **CLOSE)
        torch.testing.assert_close(state, dict(model.state_dict()), **CLOSE)


def test_an_average_of_a_model_in_parts_is_taken_of_the_whole(ranks: Callable[[int], Ranks]) -> None:
    average = plain()[2]
    for state in ranks(2).run(on_ranks.averaged_in_parts):
        torch.testing.assert_close(state, dict(average.module.state_dict()), **CLOSE)


def test_a_model_in_parts_is_saved_by_torch_once_it_is_whole(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    model = plain()[0]
    for state in ranks(2).run(on_ranks.saved_whole, str(tmp_path)):
        torch.testing.assert_close(dict(state), dict(model.state_dict()), **CLOSE)
        fresh = network()
        fresh.load_state_dict(state)
        assert torch.isfinite(F.mse_loss(fresh(batches(1)[0][0]), batches(1)[0][1]))
    assert ranks(2).run(on_ranks.kinds_of_saved_parts) == ["DTensor", "DTensor"]
