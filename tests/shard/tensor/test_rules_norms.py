"""Norms over a split dim: found by the plan finder, and reduced by their statistics alone, forward and backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossfade as cf
from crossfade.shard.tensor.plan import Plan
from tests.shard.tensor.test_plan_through_norms import WIDTH, reduced, split


def normed(kind: type[nn.Module], inside: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, inside), kind(inside), nn.GELU(), nn.Linear(inside, WIDTH))


@pytest.mark.parametrize(("kind", "numbers"), [(nn.LayerNorm, 2), (nn.RMSNorm, 1)])
@pytest.mark.parametrize("inside", [32, 33])
def test_only_statistics_are_reduced(kind: type[nn.Module], numbers: int, inside: int) -> None:
    plan, local = split(normed(kind, inside), torch.randn(2, 3, WIDTH))
    assert plan == Plan({"0": "colwise", "3": "rowwise"})
    assert reduced(local) == [(2, 3, 1)] * numbers + [(2, 3, WIDTH)]
    assert not any(verdict.reason == "gathered" for verdict in local.verdicts)


def train(kind: type[nn.Module], inside: int) -> tuple[list[float], list[float], float]:
    """With dropout on both sides of the norm; losses on ranks and on one device, and how far weights are apart."""
    model = nn.Sequential(*(part for layer in normed(kind, inside) for part in (layer, nn.Dropout(0.3))))
    alone = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    step = cf.compile_step(
        model,
        nn.functional.mse_loss,
        optimizers[0],
        {"tp": 2},
        tensor_parallel={"0": "colwise", "6": "rowwise"},
        timeout=60,
    )
    batches = [torch.randn(2, 4, 6, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    torch.manual_seed(1)
    found = [float(step(x, y)) for x, y in batches]
    torch.manual_seed(1)
    expected = []
    for x, y in batches:
        loss = nn.functional.mse_loss(alone(x), y)
        loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        expected.append(float(loss.detach()))
    wanted: dict[str, Tensor] = {name: whole.detach() for name, whole in alone.named_parameters()}
    parts = step.own_parts(wanted)
    return (
        found,
        expected,
        max(float((part - model.get_parameter(name).detach()).abs().max()) for name, part in parts.items()),
    )


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "inside"), [(nn.LayerNorm, 33), (nn.RMSNorm, 32)])
def test_training_through_norms_and_dropout_equals_one_device(ranks: Any, kind: type[nn.Module], inside: int) -> None:
    for found, expected, worst in ranks(2).run(train, kind, inside):
        assert found == pytest.approx(expected, rel=1e-5)
        assert worst < 1e-6
