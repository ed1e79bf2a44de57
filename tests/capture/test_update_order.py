"""Updates follow the order in which gradients become ready, except where random numbers are drawn."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
import torch
from torch import fx, nn

import crossfade as cf
from crossfade.capture.update_order import order_by_readiness
from crossfade.errors import OptimizerError

ATEN = torch.ops.aten


def traced(*, draws: bool) -> tuple[fx.Graph, list[fx.Node]]:
    """Two updates, the first of which needs the gradient that is ready last; a number is computed before each."""
    graph = fx.Graph()
    late, early = graph.placeholder("late"), graph.placeholder("early")
    results = []
    for gradient in (late, early):
        rate = graph.create_node("call_function", ATEN.scalar_tensor.default, (0.5,), name=f"rate_of_{gradient.name}")
        operator = ATEN.bernoulli.p if draws else ATEN.mul.Tensor
        arguments = (gradient, 0.5) if draws else (gradient, rate)
        results.append(graph.create_node("call_function", operator, arguments, name=f"new_{gradient.name}"))
    graph.output(tuple(results))
    return graph, [early, late]


def test_what_is_ready_first_comes_first_and_numbers_with_it() -> None:
    graph, gradients = traced(draws=False)
    order_by_readiness(graph, gradients)
    graph.lint()
    names = [node.name for node in graph.nodes if node.op == "call_function"]
    assert names == ["rate_of_early", "new_early", "rate_of_late", "new_late"]


def test_draws_stay_in_their_order() -> None:
    graph, gradients = traced(draws=True)
    before = [node.name for node in graph.nodes]
    order_by_readiness(graph, gradients)
    assert [node.name for node in graph.nodes] == before


class ByPosition(torch.optim.Optimizer):
    """Steps the faster the later a parameter stands in its group; `all_of_them` also without a gradient."""

    def __init__(self, parameters: Iterable[torch.Tensor], *, all_of_them: bool = False) -> None:
        super().__init__(parameters, {"lr": 0.1, "all_of_them": all_of_them})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for position, parameter in enumerate(group["params"], 1):
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] * position)
                elif group["all_of_them"]:
                    parameter.mul_(0.5)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.never, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def test_parameters_without_gradients_keep_their_positions() -> None:
    torch.manual_seed(0)
    ours = Unused()
    theirs = copy.deepcopy(ours)
    optimizer = ByPosition(theirs.parameters())
    step = cf.compile_step(ours, nn.functional.mse_loss, ByPosition(ours.parameters()))
    for _ in range(3):
        x, y = torch.randn(5, 3), torch.randn(5, 2)
        step(x, y)
        optimizer.zero_grad()
        nn.functional.mse_loss(theirs(x), y).backward()
        optimizer.step()
    for mine, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, expected)


def test_a_step_that_changes_them_is_refused() -> None:
    model = Unused()
    step = cf.compile_step(model, nn.functional.mse_loss, ByPosition(model.parameters(), all_of_them=True))
    with pytest.raises(OptimizerError, match=r"changes never\.weight, which has no gradient.*whose \.grad is None"):
        step(torch.randn(5, 3), torch.randn(5, 2))
