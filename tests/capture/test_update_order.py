"""Updates follow the order in which gradients become ready, except where random numbers are drawn."""

from __future__ import annotations

import torch
from torch import fx

from crossfade.capture.update_order import order_by_readiness

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
