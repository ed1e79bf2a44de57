"""Train a model on two ranks. Start it with:  crossfade launch --ranks 2 examples/01_train_a_model.py"""

import torch
import torch.distributed as dist
from torch import nn

import crossfade as cf

dist.init_process_group("gloo")
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
step = cf.compile_step(model, nn.functional.mse_loss, optimizer, {"dp": dist.get_world_size()}, clip_grad_norm=1.0)

data = torch.randn(64, 16)
targets = data.sum(1, keepdim=True)
for number in range(50):
    loss = step(data, targets)  # every rank passes the whole batch; each computes its part
    scheduler.step()
    if dist.get_rank() == 0 and number % 10 == 9:
        print(f"step {number + 1}: loss {loss:.4f}, gradient norm {step.outputs['grad_norm']:.3f}")

model.eval()
if dist.get_rank() == 0:
    with torch.no_grad():
        print(f"evaluation: {nn.functional.mse_loss(model(data), targets):.4f}")
    print(step.report)
dist.destroy_process_group()
