"""Batches of which ranks bring different numbers of samples, put together so that every rank has all of them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from crossfade.errors import BatchError
from crossfade.graph.private import tree_flatten, tree_unflatten

Batch = tuple[Any, ...]

_UNUSABLE = -1
"""Sent in place of a number of samples by a rank whose own tensors do not go together."""


def joined(batch: Batch, group: Any, device: str) -> Batch:
    """The batch itself where every rank of a group brings as many samples; otherwise the samples of all, in rank order.

    Ranks tell each other their numbers first, at every call. Only dim 0 may differ; a rank may bring no samples at all,
    as tensors with no rows.
    """
    leaves, spec = tree_flatten(batch)
    tensors = [leaf for leaf in leaves if _has_rows(leaf)]
    own = {tensor.shape[0] for tensor in tensors}
    rows = own.pop() if len(own) == 1 else _UNUSABLE
    told = _everyones([rows, zlib.crc32(_but_for_rows(leaves, spec).encode())], group, device)
    _check(told)
    sizes = [size for size, _ in told]
    if len(set(sizes)) == 1:
        return batch
    return tree_unflatten([_all_rows(leaf, sizes, group) if _has_rows(leaf) else leaf for leaf in leaves], spec)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _but_for_rows(leaves: Sequence[Any], spec: Any) -> str:
    """What all ranks' batches must have in common."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return f"{spec} {[(tuple(tensor.shape[1:]), tensor.dim(), tensor.dtype) for tensor in tensors]}"


def _everyones(numbers: list[int], group: Any, device: str) -> list[list[int]]:
    own = torch.tensor(numbers, device=device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    return torch.stack(found).tolist()


def _check(told: list[list[int]]) -> None:
    """Refuse, on all ranks alike, what cannot be put together."""
    unusable = [index for index, (size, _) in enumerate(told) if size == _UNUSABLE]
    if unusable:
        raise BatchError(
            f"part {unusable[0]} of the batch, whose tensors have different numbers of rows, or none any",
            expected="the same number of samples along dim 0 of every tensor that a rank brings",
            remedy="make tensors that all samples share (masks, tables) buffers of the model",
        )
    if len({kind for _, kind in told}) > 1:
        raise BatchError(
            "parts of the batch that differ in more than their number of samples",
            expected="the same structure, dtypes and sizes beyond dim 0 on every rank",
            remedy="pad samples alike on every rank, and pass tensors with no rows where a rank has no samples",
        )
    if not any(size for size, _ in told):
        raise BatchError("a batch of 0 samples", expected="at least one", remedy="skip the step on all ranks")


def _all_rows(tensor: Tensor, sizes: Sequence[int], group: Any) -> Tensor:
    """The rows of all ranks; they travel as bytes, which every backend carries."""
    padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
    padded[: tensor.shape[0]] = tensor
    own = padded.reshape(-1).view(torch.uint8)
    found = [torch.empty_like(own) for _ in sizes]
    dist.all_gather(found, own, group=group)
    parts = [each.view(tensor.dtype).view(padded.shape)[:size] for each, size in zip(found, sizes, strict=True)]
    return torch.cat(parts)
