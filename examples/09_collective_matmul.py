"""Run matmuls and the collectives beside them in one another's time, and see what was done to each.

crossfade launch --ranks 2 examples/09_collective_matmul.py
"""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import crossfade as cf
from crossfade.cost.presets import preset

dist.init_process_group("gloo")
group = dist.group.WORLD


def perceptron(tokens: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Sequence-parallel: this rank's tokens are gathered, its columns computed, the sums scattered to their tokens."""
    gathered = functional.all_gather_tensor(tokens, 0, group)
    return functional.reduce_scatter_tensor(torch.relu(gathered @ up) @ down, "sum", 0, group)


generator = torch.Generator().manual_seed(dist.get_rank())
inputs = [torch.randn(*shape, generator=generator) / 16 for shape in ((512, 256), (256, 512), (512, 256))]
plain = make_fx(perceptron)(*inputs)
fused = cf.optimize(plain, machine=preset("ethernet-1gbit"))

expected, found = plain(*inputs), fused.module(*inputs)
torch.testing.assert_close(found, expected)
if dist.get_rank() == 0:
    fused.report.show()
    print(f"largest difference: {(found - expected).abs().max():.1e}")
dist.destroy_process_group()
