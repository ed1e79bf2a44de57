"""Collectives that know their backward: what a sharded forward is made of, so that plain autograd through it is right.

Five operators change the placement of a value over the ranks of an axis. Each is the conjugate of another, under one
convention: the gradient of a replicated value is replicated (whole and alike on all ranks), that of a sharded value is
sharded alike, and that of a partial sum is replicated.

    operator         forward                        backward
    tp_enter         replicated, nothing to do      partial sums, all-reduced
    tp_reduce        partial sums, all-reduced      replicated, nothing to do
    tp_gather        sharded, all-gathered          replicated, own part taken
    tp_gather_enter  sharded, all-gathered          partial sums, reduce-scattered
    tp_scatter       partial sums, reduce-scattered sharded, all-gathered
    tp_split         replicated, own part taken     sharded, all-gathered
    tp_share         replicated, kept by one rank   replicated, nothing to do

They decompose into functional collectives and plain ATen ops wherever a graph is traced or compiled. A dim is
split in `outer` blocks, each over all ranks. The own rank arrives as a tensor, so that all ranks run one program.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crossfade.graph import collectives

_LIBRARY = torch.library.Library("crossfade", "FRAGMENT")
_SIGNATURES = {
    "tp_enter": "(Tensor x, str group) -> Tensor",
    "tp_reduce": "(Tensor x, str op, str group) -> Tensor",
    "tp_gather": "(Tensor x, int dim, SymInt outer, Tensor rank, int ranks, str group) -> Tensor",
    "tp_gather_enter": "(Tensor x, int dim, SymInt outer, Tensor rank, int ranks, str group) -> Tensor",
    "tp_scatter": "(Tensor x, int dim, SymInt outer, Tensor rank, int ranks, str group) -> Tensor",
    "tp_split": "(Tensor x, int dim, SymInt outer, Tensor rank, int ranks, str group) -> Tensor",
    "tp_share": "(Tensor x, Tensor rank) -> Tensor",
}


def _needs_grad(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def _all_reduced(x: Tensor, op: str, group: str) -> Tensor:
    return collectives.wait(collectives.all_reduce(x.contiguous(), op, group))


def _gathered(x: Tensor, dim: int, outer: Any, ranks: int, group: str) -> Tensor:
    """Put the parts of all ranks together along a dim of `outer` blocks."""
    whole = collectives.wait(collectives.all_gather(x.contiguous(), ranks, group))
    sizes = x.shape
    if dim == 0 and outer == 1:
        return whole
    parts = whole.view(ranks, *sizes[:dim], outer, sizes[dim] // outer, *sizes[dim + 1 :])
    ordered = parts.movedim(0, dim + 1)
    return ordered.reshape(*sizes[:dim], ranks * sizes[dim], *sizes[dim + 1 :])


def _own_part(x: Tensor, dim: int, outer: Any, rank: Tensor, ranks: int) -> Tensor:
    sizes = x.shape
    inner = sizes[dim] // outer // ranks
    parts = x.reshape(*sizes[:dim], outer, ranks, inner, *sizes[dim + 1 :])
    own = parts.index_select(dim + 1, rank.view(1))
    return own.reshape(*sizes[:dim], outer * inner, *sizes[dim + 1 :])


def _scattered(x: Tensor, dim: int, outer: Any, ranks: int, group: str) -> Tensor:
    sizes = x.shape
    inner = sizes[dim] // outer // ranks
    parts = x.reshape(*sizes[:dim], outer, ranks, inner, *sizes[dim + 1 :]).movedim(dim + 1, 0).contiguous()
    own = collectives.wait(collectives.reduce_scatter(parts, "sum", ranks, group))
    return own.reshape(*sizes[:dim], outer * inner, *sizes[dim + 1 :])


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _all_reduced(grad, "sum", ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, op: str, group: str) -> Tensor:
        return _all_reduced(x, op, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, outer: Any, rank: Tensor, ranks: int, group: str) -> Tensor:
        ctx.save_for_backward(rank)
        ctx.settings = dim, outer, ranks
        return _gathered(x, dim, outer, ranks, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        dim, outer, ranks = ctx.settings
        return _own_part(grad, dim, outer, ctx.saved_tensors[0], ranks), None, None, None, None, None


class _GatherEnter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, outer: Any, rank: Tensor, ranks: int, group: str) -> Tensor:
        ctx.settings = dim, outer, ranks, group
        return _gathered(x, dim, outer, ranks, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _scattered(grad, *ctx.settings), None, None, None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, outer: Any, rank: Tensor, ranks: int, group: str) -> Tensor:
        ctx.settings = dim, outer, ranks, group
        return _scattered(x, dim, outer, ranks, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _gathered(grad, *ctx.settings), None, None, None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, outer: Any, rank: Tensor, ranks: int, group: str) -> Tensor:
        ctx.settings = dim, outer, ranks, group
        return _own_part(x, dim, outer, rank, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _gathered(grad, *ctx.settings), None, None, None, None, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: Tensor) -> Tensor:
        return _kept_by_one(x, rank)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def _kept_by_one(x: Tensor, rank: Tensor) -> Tensor:
    """The value on the first rank and zero on the others: their sum is exactly it."""
    return torch.where(rank == 0, x, torch.zeros_like(x))


def _enter(x: Tensor, group: str) -> Tensor:
    return _Enter.apply(x, group) if _needs_grad(x) else x


def _reduce(x: Tensor, op: str, group: str) -> Tensor:
    if not _needs_grad(x):
        return _all_reduced(x, op, group)
    if op != "sum":
        raise NotImplementedError(f"the gradient of an all-reduce of {op}. Remedy: detach what it reduces.")
    return _Reduce.apply(x, op, group)


def _gather(x: Tensor, dim: int, outer: Any, rank: Tensor, ranks: int, group: str) -> Tensor:
    if _needs_grad(x):
        return _Gather.apply(x, dim, outer, rank, ranks, group)
    return _gathered(x, dim, outer, ranks, group)


def _gather_enter(x: Tensor, dim: int, outer: Any, rank: Tensor, ranks: int, group: str) -> Tensor:
    if _needs_grad(x):
        return _GatherEnter.apply(x, dim, outer, rank, ranks, group)
    return _gathered(x, dim, outer, ranks, group)


def _scatter(x: Tensor, dim: int, outer: Any, rank: Tensor, ranks: int, group: str) -> Tensor:
    if _needs_grad(x):
        return _Scatter.apply(x, dim, outer, rank, ranks, group)
    return _scattered(x, dim, outer, ranks, group)


def _split(x: Tensor, dim: int, outer: Any, rank: Tensor, ranks: int, group: str) -> Tensor:
    if _needs_grad(x):
        return _Split.apply(x, dim, outer, rank, ranks, group)
    return _own_part(x, dim, outer, rank, ranks)


def _share(x: Tensor, rank: Tensor) -> Tensor:
    return _Share.apply(x, rank) if _needs_grad(x) else _kept_by_one(x, rank)


_IMPLEMENTATIONS = {
    "tp_enter": _enter,
    "tp_reduce": _reduce,
    "tp_gather": _gather,
    "tp_gather_enter": _gather_enter,
    "tp_scatter": _scatter,
    "tp_split": _split,
    "tp_share": _share,
}

for _name, _signature in _SIGNATURES.items():
    _LIBRARY.define(f"{_name}{_signature}")
    _LIBRARY.impl(_name, _IMPLEMENTATIONS[_name], "CompositeImplicitAutograd")

enter = torch.ops.crossfade.tp_enter.default
reduce = torch.ops.crossfade.tp_reduce.default
gather = torch.ops.crossfade.tp_gather.default
gather_enter = torch.ops.crossfade.tp_gather_enter.default
scatter = torch.ops.crossfade.tp_scatter.default
split = torch.ops.crossfade.tp_split.default
share = torch.ops.crossfade.tp_share.default
