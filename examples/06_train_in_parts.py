"""Train with parameters and optimizer state in parts, planned for this machine; save, and go on from there.

crossfade launch --ranks 2 examples/06_train_in_parts.py
"""

import tempfile

import torch
import torch.distributed as dist
from torch import nn

import crossfade as cf


def begin() -> cf.Step:
    torch.manual_seed(0)  # all ranks must build the same model
    model = nn.Sequential(nn.Linear(64, 257), nn.GELU(), nn.Linear(257, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mesh = {"dp": dist.get_world_size()}
    return cf.compile_step(
        model, nn.functional.mse_loss, optimizer, mesh, data_parallel="zero3", machine="loopback-gloo"
    )


dist.init_process_group("gloo")
inputs, targets = torch.randn(32, 64), torch.randn(32, 8)
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)  # all ranks save to the first one's

step = begin()
for _ in range(3):
    step(inputs, targets)
step.save(f"{folder[0]}/checkpoint")
expected = float(step(inputs, targets))

resumed = begin()
resumed.load(f"{folder[0]}/checkpoint")
found = float(resumed(inputs, targets))
timeline = step.profile(inputs, targets)

if dist.get_rank() == 0:
    weight = next(step.model.parameters())
    print(f"this rank keeps {weight.to_local().shape[0]} of {weight.shape[0]} rows of the first weight")
    print(f"loss after the checkpoint: {expected:.6f}, resumed: {found:.6f}")
    print(
        f"one step: {timeline.seconds * 1e3:.1f} ms, of which computation stood still {timeline.exposed * 1e3:.1f} ms"
    )
    step.report.show()
assert found == expected
dist.destroy_process_group()
