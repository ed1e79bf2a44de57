"""Improve what torch.compile makes: its forward and backward graphs pass through Crossfade on their way to execution.

Run it on two ranks: crossfade launch --ranks 2 examples/04_inside_torch_compile.py
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import crossfade as cf

dist.init_process_group("gloo")


def improve(module: torch.fx.GraphModule, _: Any) -> Any:
    """What torch.compile calls with each graph, here on every rank."""
    improved = cf.optimize(module)
    print(improved.report)
    return make_boxed_func(improved.module)


def loss(x: torch.Tensor, shards: list[torch.Tensor]) -> torch.Tensor:
    """Sharded weights: each is gathered for its product, and its gradient scattered by autograd."""
    weights = [funcol.all_gather_tensor_autograd(shard, 0, dist.group.WORLD) for shard in shards]
    return torch.stack([(x @ weight.t()).pow(2).mean() for weight in weights]).sum()


torch.manual_seed(0)
shards = [torch.randn(rows, 8, requires_grad=True) for rows in (4, 2, 6)]
compiled = torch.compile(loss, backend=aot_autograd(fw_compiler=improve), dynamic=True)
for batch in (16, 32):  # one graph serves both
    compiled(torch.randn(batch, 8), shards).backward()
print("gradients:", [round(float(shard.grad.norm()), 3) for shard in shards])
dist.destroy_process_group()
