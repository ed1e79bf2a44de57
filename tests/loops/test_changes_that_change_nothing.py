"""A change of what a model could read, but that makes the same program: nothing is compiled, and no rank waits.

Frameworks write into a model's config when the first rank saves it.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import crossfade as cf


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.config = nn.Linear(3, 2), types.SimpleNamespace(scale=2.0, saved_as=None)

    def forward(self, x: Tensor) -> Tensor:
        name = getattr(self.config, "saved_as", "")
        return self.layer(x) * (self.config.scale if name != "nowhere" else 0.0)


def compiled(mesh: Any = None) -> tuple[Configured, cf.Step]:
    torch.manual_seed(0)
    model = Configured()
    return model, cf.compile_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), mesh, timeout=30.0)


BATCH = torch.ones(4, 3), torch.zeros(4, 2)


def test_the_same_program_is_not_compiled_again() -> None:
    model, step = compiled()
    step(*BATCH)
    model.config.saved_as = "here"
    step(*BATCH)
    assert step.captures == 1
    model.config.scale = 3.0
    before = model.layer.weight.detach().clone()
    expected = F.mse_loss(model(BATCH[0]), BATCH[1])
    assert float(step(*BATCH)) == pytest.approx(float(expected.detach()))
    assert step.captures == 2 and not torch.equal(before, model.layer.weight)


def test_what_cannot_be_trained_any_more_is_still_refused() -> None:
    model, step = compiled()
    step(*BATCH)
    model.layer.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(cf.ModelError, match=r"layer\.weight has a gradient hook"):
        step(*BATCH)


def test_a_parameter_that_was_replaced_is_the_one_that_is_trained() -> None:
    model, step = compiled()
    step(*BATCH)
    model.layer.weight = nn.Parameter(torch.zeros(2, 3))
    step.optimizer.param_groups[0]["params"] = list(model.parameters())
    step(*BATCH)
    assert model.layer.weight.abs().sum() > 0


def saved_by_the_first(after: str) -> list[float]:
    model, step = compiled({"dp": 2})
    losses = [float(step(*BATCH))]
    if dist.get_rank() == 0:
        model.config.saved_as = after
    return [*losses, float(step(*BATCH)), float(step(*BATCH))]


@pytest.mark.ranks
def test_a_change_on_one_rank_that_changes_nothing(ranks: Any) -> None:
    first, second = ranks(2).run(saved_by_the_first, "here")
    assert first == second and first[2] < first[1] < first[0]


@pytest.mark.ranks
def test_a_change_on_one_rank_that_changes_its_program_is_told(ranks: Any) -> None:
    with pytest.raises(cf.RankFailedError, match=r"config\.saved_as changed from None to 'nowhere'"):
        ranks(2).run(saved_by_the_first, "nowhere")
