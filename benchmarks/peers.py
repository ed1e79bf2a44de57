"""Torch's own ways to train in parts, to race against: FSDP2, and DTensor parameters compiled with torch's passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from crossfade.demo.contenders import Contender, eager_step, on_own_part
from crossfade.demo.model import Size, build


def fsdp(size: Size, *, reshard: bool) -> Contender:
    """FSDP2, one unit a block, parameters freed after the forward or kept for the backward."""
    from torch.distributed.fsdp import fully_shard

    model = build(size)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    name = f"torch FSDP2, {'resharded' if reshard else 'kept'} after the forward"
    return Contender(name, on_own_part(eager_step(model, model)))


def compiled_ddp(size: Size, bucket_mb: float | None = None) -> Contender:
    """DDP under torch.compile, which splits the graph at buckets."""
    model = build(size)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
    buckets = "default buckets" if bucket_mb is None else f"{bucket_mb:g} MB buckets"
    return Contender(f"torch compiled DDP, {buckets}", on_own_part(eager_step(torch.compile(wrapped), model)))


def simple_fsdp(size: Size, bucket_mb: float = 2.0) -> Contender:
    """Parameters as DTensors that each use gathers, compiled as one graph with torch's bucketing and reordering."""
    import torch._inductor.config as inductor

    inductor.reorder_for_compute_comm_overlap = True
    passes = ["reorder_communication_preserving_peak_memory", "sink_waits_iterative"]
    inductor.reorder_for_compute_comm_overlap_passes = passes
    inductor.bucket_all_gathers_fx = inductor.bucket_reduce_scatters_fx = "all"
    inductor.bucket_all_gathers_fx_bucket_size_determinator = lambda index: bucket_mb
    inductor.bucket_reduce_scatters_fx_bucket_size_determinator = lambda index: bucket_mb
    model = build(size)
    _gather_at_each_use(model)
    run = torch.compile(model, fullgraph=True)
    return Contender(f"torch SimpleFSDP, compiled, {bucket_mb:g} MB buckets", on_own_part(eager_step(run, model)))


def _gather_at_each_use(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in model.modules():
        own = list(module.named_parameters(recurse=False))
        for name, parameter in own:
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.data, mesh, [Shard(0)])))
        if own:
            properties = {name: property(_gathered(name)) for name, _ in own}
            module.__class__ = type(f"Gathered{type(module).__name__}", (type(module),), properties)


def _gathered(name: str) -> Callable[[Any], Tensor]:
    def get(module: Any) -> Tensor:
        whole = module._parameters[name].redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial("avg")])

    return get
