"""Ranks on CUDA see what differs between them a few steps later, without waiting for the device at each step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import crossfade as cf
from crossfade.errors import RankMismatchError
from tests.ranks.test_losses import LOSSES, Words, batch_of

pytestmark = pytest.mark.gpu


def train(change: str) -> tuple[int, str]:
    """Train on two ranks of one GPU; from step 3 on something differs on the last."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step = cf.compile_step(model, nn.functional.mse_loss, optimizer, {"dp": 2}, timeout=60)
    done = 0
    for done in range(12):
        odd = dist.get_rank() == 1 and done >= 3
        generator = torch.Generator().manual_seed(done + (100 if odd and change == "batch" else 0))
        batch = [torch.randn(8, width, generator=generator).cuda() for width in (6, 3)]
        if odd and done == 3 and change == "rate":
            optimizer.param_groups[0]["lr"] = 0.02
        if odd and done == 3 and change == "weight":
            with torch.no_grad():
                model[2].bias[1] += 1e-3
        try:
            step(*batch)
        except RankMismatchError as error:
            return done, str(error)
    return done, ""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("change", "words", "last"),
    [("none", "", 11), ("batch", 'batch="local"', 5), ("rate", "a learning rate", 5), ("weight", "a parameter", 9)],
)
def test_what_differs_is_seen(ranks: Any, change: str, words: str, last: int) -> None:
    for done, error in ranks(2).run(train, change):
        assert done <= last and words in error
        assert bool(error) == (change != "none")


def losses(name: str) -> tuple[list[float], list[float]]:
    """Of two ranks, and of eager torch on the whole batch."""
    torch.manual_seed(0)
    ours, theirs = Words().cuda(), Words().cuda()
    theirs.load_state_dict(ours.state_dict())
    mine, other = (torch.optim.SGD(model.parameters(), lr=0.5) for model in (ours, theirs))
    step = cf.compile_step(ours, LOSSES[name], mine, {"dp": 2}, timeout=60)
    found, expected = [], []
    for seed in range(3):
        tokens, *rest = [one.cuda() for one in batch_of(seed)]
        found.append(float(step(tokens, *rest)))
        other.zero_grad()
        loss = LOSSES[name](theirs(tokens), *rest)
        loss.backward()
        other.step()
        expected.append(float(loss))
    return found, expected


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["ignored labels", "smoothed labels", "a mask's mean", "the number of items"])
def test_parts_of_any_number_of_tokens_add_up(ranks: Any, name: str) -> None:
    for found, expected in ranks(2).run(losses, name):
        assert found == pytest.approx(expected, rel=1e-4)
