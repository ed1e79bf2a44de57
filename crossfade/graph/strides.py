"""How tensors lie in memory: strides without gaps, and when two sets of strides mean the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def plain_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a new tensor: its dims in memory in their order.

    >>> plain_strides((4, 3, 2))
    (6, 2, 1)
    """
    return torch.empty(tuple(shape), device="meta").stride()


def dense_strides(value: Tensor) -> tuple[int, ...]:
    """The strides of a copy of a value: its own, without gaps.

    >>> dense_strides(torch.empty(4, 6).t()[::2])
    (1, 3)
    """
    return torch.empty_like(torch.empty_strided(value.shape, value.stride(), device="meta")).stride()


def strides_for(batch: Tensor, rows: int) -> tuple[int, ...]:
    """Strides without gaps for a batch of so many rows, its dims in memory in the order of a given one's.

    They are kept to the number: kernels tell channels_last by them, also where there is one channel.

    >>> images = torch.empty(4, 3, 5, 5).to(memory_format=torch.channels_last)
    >>> strides_for(images, 2), strides_for(torch.empty(6, 4).t(), 2)
    ((75, 1, 15, 3), (1, 2))
    """
    dense, given = dense_strides(batch), max(batch.shape[0], 1)
    return tuple(stride * rows // given if stride > dense[0] else stride for stride in dense)


def same_layout(shape: Sequence[int], strides: Sequence[int], others: Sequence[int]) -> bool:
    """Whether strides mean the same for a shape: those of dims of size 1 mean nothing.

    >>> same_layout((4, 1, 2), (2, 2, 1), (2, 7, 1)), same_layout((4, 3), (3, 1), (1, 4))
    (True, False)
    """
    return all(stride == wanted for size, stride, wanted in zip(shape, strides, others, strict=True) if size != 1)


def laid_out(value: Tensor, strides: Sequence[int]) -> Tensor:
    """A value with its dims in memory in the order that strides say, copied if they are in another.

    >>> laid_out(torch.ones(2, 3, 4), (12, 1, 3)).stride()
    (12, 1, 3)
    """
    if same_layout(value.shape, value.stride(), strides):
        return value
    order = sorted(range(value.dim()), key=lambda dim: -strides[dim])
    back = [order.index(dim) for dim in range(value.dim())]
    return value.permute(order).contiguous().permute(back)
