"""Training graphs of Llama-like models, traced on fake tensors under a fake process group of 64 ranks.

`ddp(layers)`: forward and backward, with one averaged all-reduce per gradient where it is ready.
`fsdp(layers)`: every parameter gathered before use in the forward and again in the backward, its gradient
reduce-scattered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from crossfade.graph import collectives
from crossfade.graph.private import FakeTensorMode

RANKS = 64
WIDTH, HEADS, LENGTH, HIDDEN, VOCABULARY = 1024, 16, 2048, 4096, 8192


def start_fake_world() -> str:
    """A process group of 64 ranks that moves nothing; returns its name."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    return dist.group.WORLD.group_name  # type: ignore[union-attr]


class _AveragedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: str) -> Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return collectives.wait(collectives.all_reduce(gradient / RANKS, "sum", ctx.group)), None


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Tensor, group: str) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(x, shard)
        return x @ _gather(shard, group).t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, shard = ctx.saved_tensors
        dx = gradient @ _gather(shard, ctx.group)
        dw = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
        return dx, collectives.wait(collectives.reduce_scatter(dw, "avg", RANKS, ctx.group)), None


def _gather(shard: Tensor, group: str) -> Tensor:
    return collectives.wait(collectives.all_gather(shard, RANKS, group))


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    length, width = query.shape[-2:]
    query, key, value = (t.view(-1, length, HEADS, width // HEADS).transpose(1, 2) for t in (query, key, value))
    scores = (query @ key.transpose(-1, -2)) * (width // HEADS) ** -0.5
    return (scores.softmax(-1) @ value).transpose(1, 2).reshape(-1, length, width)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


Linear = Callable[[Tensor, Tensor], Tensor]


def _decoder(linear: Linear, norms: list[Tensor], weights: list[list[Tensor]], head: Tensor, x: Tensor) -> Tensor:
    for norm, (q, k, v, o, up, gate, down) in zip(norms, weights, strict=True):
        h = _norm(x, norm)
        x = x + linear(_attend(linear(h, q), linear(h, k), linear(h, v)), o)
        h = _norm(x, norm)
        x = x + linear(F.silu(linear(h, up)) * linear(h, gate), down)
    return linear(x, head).float().pow(2).mean()


def _layer_shapes() -> list[tuple[int, int]]:
    return [(WIDTH, WIDTH)] * 4 + [(HIDDEN, WIDTH)] * 2 + [(WIDTH, HIDDEN)]


def _trace(linear: Linear, prepare: Callable[[Tensor], Tensor], layers: int, parts: int) -> fx.GraphModule:
    shapes = [shape for _ in range(layers) for shape in _layer_shapes()] + [(VOCABULARY, WIDTH)]

    def step(x: Tensor, norms: list[Tensor], flat: list[Tensor]) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in flat]
        used = [prepare(t) for t in leaves]
        weights = [used[7 * i : 7 * i + 7] for i in range(layers)]
        return list(torch.autograd.grad(_decoder(linear, norms, weights, used[-1], x), leaves))

    with FakeTensorMode(allow_non_fake_inputs=True):
        norms = [torch.empty(WIDTH) for _ in range(layers)]
        flat = [torch.empty(rows // parts, columns) for rows, columns in shapes]
        module = make_fx(step)(torch.empty(1, LENGTH, WIDTH), norms, flat)
    module.graph.eliminate_dead_code()
    return module


def ddp(layers: int) -> fx.GraphModule:
    """A data-parallel step's forward and backward."""
    group = start_fake_world()
    return _trace(lambda x, w: x @ w.t(), lambda t: _AveragedGradient.apply(t, group), layers, 1)


def fsdp(layers: int) -> fx.GraphModule:
    """A fully sharded step's forward and backward."""
    group = start_fake_world()
    return _trace(lambda x, w: _GatheredLinear.apply(x, w, group), lambda t: t, layers, RANKS)
