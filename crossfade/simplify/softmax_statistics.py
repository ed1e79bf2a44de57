"""Softmax's two reductions in one: the operator `crossfade.softmax_statistics`, which graphs hold.

It reads its input once, block by block, and corrects the sum so far whenever a block raises the maximum. On CUDA it is
one Triton launch where the rows lie side by side; elsewhere (and without Triton) torch's own reductions of each block.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from crossfade.errors import RewriteError

SOFTMAX_STATISTICS = "crossfade::softmax_statistics"

_BLOCK = 4096
"""Elements of a row that are reduced at a time: few enough to stay in a cache, enough to be worth a call."""


def softmax_statistics(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The maximum along a dim, and the sum of `exp(x - maximum)`; the dim is kept, of size one.

    >>> softmax_statistics(torch.tensor([[0.0, 0.0, float("-inf"), 0.0]]), 1)
    (tensor([[0.]]), tensor([[3.]]))
    """
    return torch.ops.crossfade.softmax_statistics(x, dim)


def _without_data(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    dim = _checked_dim(x, dim)
    shape = [*x.shape[:dim], 1, *x.shape[dim + 1 :]]
    return x.new_empty(shape), x.new_empty(shape)


def _plainly(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    dim = _checked_dim(x, dim)
    first, *others = x.split(_BLOCK, dim)
    most = first.amax(dim, keepdim=True)
    total = _sum_above(first, most, dim)
    for block in others:
        higher = torch.maximum(most, block.amax(dim, keepdim=True))
        total = total * (most - _finite(higher)).exp() + _sum_above(block, higher, dim)
        most = higher
    # a row of nothing but -inf has no maximum to be measured from: exp(x - max) is nan there
    total = torch.where(most == float("-inf"), float("nan"), total)
    return most.contiguous(), total.contiguous()


def _sum_above(block: Tensor, most: Tensor, dim: int) -> Tensor:
    return (block - _finite(most)).exp().sum(dim, keepdim=True)


def _finite(most: Tensor) -> Tensor:
    """The maximum to measure from, so that a block of nothing but -inf adds nothing to the sum."""
    return torch.where(most == float("-inf"), 0.0, most)


def _on_cuda(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    dim = _checked_dim(x, dim)
    if _has_triton() and x.dtype == torch.float32 and dim == x.dim() - 1 and x.is_contiguous() and x.numel():
        from crossfade.simplify import softmax_statistics_triton

        return softmax_statistics_triton.softmax_statistics(x)
    return _plainly(x, dim)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _checked_dim(x: Tensor, dim: int) -> int:
    if not x.is_floating_point() or x.dim() == 0 or not -x.dim() <= dim < x.dim():
        raise RewriteError(
            f"softmax statistics of a tensor of {x.dtype} with {x.dim()} dims along dim {dim}",
            expected="floating-point numbers and one of their dims",
            remedy="convert the tensor, or correct the dim",
        )
    return dim % x.dim()


torch.library.define(SOFTMAX_STATISTICS, "(Tensor x, int dim) -> (Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag)
torch.library.register_fake(SOFTMAX_STATISTICS, _without_data)
torch.library.impl(SOFTMAX_STATISTICS, "default", _plainly)
torch.library.impl(SOFTMAX_STATISTICS, "cuda", _on_cuda)

OPERATOR = torch.ops.crossfade.softmax_statistics.default
"""What a graph calls for both."""
