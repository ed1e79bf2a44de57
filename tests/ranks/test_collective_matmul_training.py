"""A step split by a plan and planned for a slow network: collective matmuls both ways, the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossfade as cf
import crossfade.compile.overlap
from crossfade.graph.passes import Outcome


class Block(nn.Module):
    """A perceptron between residual additions, with norms, as transformers have them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), Block(256), Block(256), nn.LayerNorm(256), nn.Linear(256, 8))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def mean_square(found: Tensor, expected: Tensor) -> Tensor:
    return (found - expected).pow(2).mean()


def train_planned() -> dict[str, Any]:
    """Two steps on the ranks and on one device: how far parameters are apart, and what became of the collectives.

    Nothing is measured, so that a busy machine does not decide what pays.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crossfade.compile.overlap, "measured_as_run", lambda program, lowering, **options: {})
        return trained_and_compared()


def trained_and_compared() -> dict[str, Any]:
    (model, optimizer), (alone, alone_optimizer) = built(), built()
    plan = {"*.up": "colwise", "*.down": "rowwise"}
    machine = "ethernet-1gbit"
    step = cf.compile_step(model, mean_square, optimizer, {"tp": 2}, tensor_parallel=plan, machine=machine, timeout=100)
    for number in range(2):
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(8, 256, 64, generator=generator), torch.randn(8, 256, 8, generator=generator)
        loss = step(x, y)
        expected = mean_square(alone(x), y)
        expected.backward()
        alone_optimizer.step()
        alone_optimizer.zero_grad()
    whole = {name: parameter.detach() for name, parameter in alone.named_parameters()}
    parts = step.own_parts(whole).items()
    fused = [given.verdict for given in step.report.verdicts if given.verdict.outcome is Outcome.FUSED]
    return {
        "worst": max(float((part - model.get_parameter(name).detach()).abs().max()) for name, part in parts),
        "losses": (float(loss), float(expected.detach())),
        "fused": [verdict.subject for verdict in fused if verdict.bytes],
        "after": dict(step.report.collectives_after),
    }


@pytest.mark.ranks
def test_a_planned_step_has_collective_matmuls_and_equals_one_device(ranks: Any) -> None:
    found = ranks(2).run(train_planned)
    for result in found:
        assert result["worst"] < 1e-6
        assert result["losses"][0] == pytest.approx(result["losses"][1], rel=1e-5)
        assert result["fused"] == found[0]["fused"] and result["fused"]
        assert any(kind.endswith("in pieces") for kind in result["after"])
