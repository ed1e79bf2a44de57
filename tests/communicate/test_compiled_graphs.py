"""Graphs that torch.compile makes, forward and backward, static and dynamic, improved on their way to execution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import crossfade as cf
from crossfade.compile.pipeline import optimization


def through_torch_compile(ranks: int, dynamic: bool) -> tuple[list[str], bool]:
    """What became of the collectives of each graph, and whether losses and gradients are those of eager execution."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    group = dist.group.WORLD
    counts: list[str] = []

    def improve(module: torch.fx.GraphModule, _: Any) -> Any:
        done = cf.optimize(module, passes=optimization())
        before, after = (
            sum(number for number, _ in table.values())
            for table in (done.report.collectives_before, done.report.collectives_after)
        )
        counts.append(f"{before} to {after}")
        return make_boxed_func(done.module)

    def loss(x: Tensor, weights: list[Tensor]) -> Tensor:
        gathered = [funcol.all_gather_tensor_autograd(weight, 0, group) for weight in weights]  # type: ignore[arg-type]
        total = x.sum() * 0
        for weight in gathered:
            total = total + (x @ weight.t()).clamp(-9, 9).sum()
        return total

    generator = torch.Generator().manual_seed(dist.get_rank())
    weights = [torch.randint(-2, 3, (rows, 4), generator=generator).float().requires_grad_() for rows in (2, 3, 1)]
    compiled = torch.compile(loss, backend=aot_autograd(fw_compiler=improve), dynamic=dynamic)
    same = True
    for batch in (4, 6):
        x = torch.randint(-2, 3, (batch, 4), generator=generator).float()
        results = []
        for function in (loss, compiled):
            value = function(x, weights)
            results.append([value.detach(), *torch.autograd.grad(value, weights)])
        same &= all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    torch._dynamo.reset()
    return counts, same


@pytest.mark.ranks
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_gathers_of_the_forward_and_scatters_of_the_backward(ranks: Any, dynamic: bool) -> None:
    for counts, same in ranks(2).run(through_torch_compile, 2, dynamic):
        assert same
        assert counts and set(counts) == {"3 to 1"}
