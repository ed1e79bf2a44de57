"""Split a small GPT over the ranks, compare with one device, and see the plan and what is communicated.

crossfade launch --ranks 2 examples/07_tensor_parallel.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import crossfade as cf
from crossfade.demo.model import SIZES, build

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))

size = SIZES["tiny"]
model = build(size).eval()  # the same on every rank
tokens = torch.randint(0, size.vocabulary, (size.batch, size.length), generator=torch.Generator().manual_seed(0))
exported = torch.export.export(model, (tokens,))

plan = cf.Plan(
    {
        "blocks.*.attention.query_key_value": cf.Fused("colwise", blocks=3),
        "blocks.*.attention.out": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
    }
)
sharded = cf.shard(exported, mesh, plan)
with torch.no_grad():
    expected = model(tokens)
    found = sharded.module()(tokens)

if dist.get_rank() == 0:
    print(sharded)
    print(f"largest difference from one device: {(found - expected).abs().max():.1e}")
    print(f"the graph alone suggests the same plan: {cf.Plan.megatron(exported) == plan}")
torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
dist.destroy_process_group()
