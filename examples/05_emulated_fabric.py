"""Time a 64-rank training step on one machine: this process is rank 0, the network between the others is emulated.

Run it: python examples/05_emulated_fabric.py
"""

import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from crossfade import emulated
from crossfade.cost.machine import Fabric, Link, Machine
from crossfade.graph.collectives import Kind

link = Link(latency=30e-6, bandwidth=10e9 / 8)  # 10 Gbit/s Ethernet
machine = Machine("10 Gbit/s", {"*": Fabric(dict.fromkeys(Kind, link))}, flops={"float32": 5e10}, memory_bandwidth=1e10)
layers = [layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.GELU())]
data = torch.randn(256, 512)


def step_seconds(bucket_megabytes: float) -> float:
    """The best of some training steps with DDP."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=bucket_megabytes)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        optimizer.zero_grad()
        model(data).pow(2).mean().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return min(seconds[2:])  # DDP settles its buckets first


with emulated.world(machine, ranks=64) as fabric:
    for megabytes in (1, 25):
        print(f"64 ranks, buckets of {megabytes} MB: {1e3 * step_seconds(megabytes):.1f} ms a step")
with emulated.world(machine, ranks=1):
    print(f"one rank, nothing to send: {1e3 * step_seconds(25):.1f} ms a step")
print(f"{fabric.launched} collectives, {1e3 * fabric.late:.1f} ms late in sum")
