"""Whole training steps of Llama-like models, traced on fake tensors under a fake process group of 64 ranks.

`ddp(layers)`: one averaged all-reduce per gradient where it is ready.
`fsdp(layers)`: every parameter gathered before use in the forward and again in the backward, its gradient
reduce-scattered.
`tp(layers)`: attention and MLP cut by columns, then by rows, with two all-reduces in the forward and two in the
backward of each layer.

Each ends with an SGD step with momentum; `ddp_gradients(layers)` returns the gradients instead, which is where torch's
`ddp_fusion` looks for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


class _SummedGradient(torch.autograd.Function):
    """What enters a column-cut layer: every rank's gradient of it is a partial sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return collectives.wait(collectives.all_reduce(gradient, "sum", ctx.group)), None


class _Summed(torch.autograd.Function):
    """What leaves a row-cut layer: every rank's result is a partial sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return collectives.wait(collectives.all_reduce(x, "sum", group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def _gather(shard: Tensor, group: str) -> Tensor:
    return collectives.wait(collectives.all_gather(shard, RANKS, group))


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    length, width = query.shape[-2:]
    head = WIDTH // HEADS
    query, key, value = (t.view(-1, length, width // head, head).transpose(1, 2) for t in (query, key, value))
    scores = (query @ key.transpose(-1, -2)) * head**-0.5
    return (scores.softmax(-1) @ value).transpose(1, 2).reshape(-1, length, width)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


@dataclass(frozen=True)
class _Parallel:
    """How a step is distributed: what becomes of parameters, products, and the ends of a block."""

    cut: Callable[[int, tuple[int, int]], tuple[int, int]] = lambda place, shape: shape
    prepare: Callable[[Tensor], Tensor] = lambda parameter: parameter
    linear: Callable[[Tensor, Tensor], Tensor] = lambda x, weight: x @ weight.t()
    enter: Callable[[Tensor], Tensor] = lambda x: x
    leave: Callable[[Tensor], Tensor] = lambda x: x


def _decoder(how: _Parallel, norms: list[Tensor], weights: list[list[Tensor]], head: Tensor, x: Tensor) -> Tensor:
    for norm, (q, k, v, o, up, gate, down) in zip(norms, weights, strict=True):
        h = how.enter(_norm(x, norm))
        x = x + how.leave(how.linear(_attend(how.linear(h, q), how.linear(h, k), how.linear(h, v)), o))
        h = how.enter(_norm(x, norm))
        x = x + how.leave(how.linear(F.silu(how.linear(h, up)) * how.linear(h, gate), down))
    return how.linear(x, head).float().pow(2).mean()


def _layer_shapes() -> list[tuple[int, int]]:
    return [(WIDTH, WIDTH)] * 4 + [(HIDDEN, WIDTH)] * 2 + [(WIDTH, HIDDEN)]


def _trace(how: _Parallel, layers: int, *, update: bool = True) -> fx.GraphModule:
    shapes = [how.cut(place, shape) for _ in range(layers) for place, shape in enumerate(_layer_shapes())]
    shapes.append(how.cut(-1, (VOCABULARY, WIDTH)))

    def step(x: Tensor, norms: list[Tensor], parameters: list[Tensor], momenta: list[Tensor]) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in parameters]
        used = [how.prepare(t) for t in leaves]
        weights = [used[7 * i : 7 * i + 7] for i in range(layers)]
        gradients = torch.autograd.grad(_decoder(how, norms, weights, used[-1], x), leaves)
        if not update:
            return list(gradients)
        velocities = [0.9 * m + g for m, g in zip(momenta, gradients, strict=True)]
        return [*velocities, *(p - 0.01 * v for p, v in zip(parameters, velocities, strict=True))]

    with FakeTensorMode(allow_non_fake_inputs=True):
        norms = [torch.empty(WIDTH) for _ in range(layers)]
        parameters, momenta = ([torch.empty(shape) for shape in shapes] for _ in range(2))
        module = make_fx(step)(torch.empty(1, LENGTH, WIDTH), norms, parameters, momenta)
    module.graph.eliminate_dead_code()
    return module


def ddp(layers: int) -> fx.GraphModule:
    """A data-parallel step."""
    group = start_fake_world()
    return _trace(_Parallel(prepare=lambda t: _AveragedGradient.apply(t, group)), layers)


def ddp_gradients(layers: int) -> fx.GraphModule:
    """A data-parallel step without its update."""
    group = start_fake_world()
    return _trace(_Parallel(prepare=lambda t: _AveragedGradient.apply(t, group)), layers, update=False)


def fsdp(layers: int) -> fx.GraphModule:
    """A fully sharded step."""
    group = start_fake_world()
    return _trace(
        _Parallel(
            cut=lambda place, shape: (shape[0] // RANKS, shape[1]),
            linear=lambda x, w: _GatheredLinear.apply(x, w, group),
        ),
        layers,
    )


def tp(layers: int) -> fx.GraphModule:
    """A tensor-parallel step, cut into 16, one for each head; the group is the same fake one."""
    group = start_fake_world()

    def cut(place: int, shape: tuple[int, int]) -> tuple[int, int]:
        rows, columns = shape
        return (rows, columns // HEADS) if place in (3, 6) else (rows // HEADS, columns) if place >= 0 else shape

    return _trace(
        _Parallel(cut=cut, enter=lambda x: _SummedGradient.apply(x, group), leave=lambda x: _Summed.apply(x, group)),
        layers,
    )
