"""This rank's part of a value that all ranks of a group hold alike: an operator that graphs hold, `crossfade.own_part`.

The rank is looked up by the group's name when it runs, so that all ranks run one program. Nothing is sent; since it
names a group, its place among the group's collectives is kept as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crossfade.errors import RewriteError
from crossfade.graph.private import group_named

OWN_PART = "crossfade::own_part"


def own_part(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    """A fresh, contiguous copy of this rank's part of `x`, which is cut into `ranks` equal parts along `dim`.

    >>> own_part(torch.empty(4, 6, device="meta"), 1, 3, "tp").shape
    torch.Size([4, 2])
    """
    return torch.ops.crossfade.own_part(x, dim, ranks, group)


def _part_size(x: Tensor, dim: int, ranks: int) -> int:
    if ranks < 1 or not -x.dim() <= dim < x.dim() or x.shape[dim] % ranks:
        raise RewriteError(
            f"dim {dim} of a value of shape {list(x.shape)} to cut into {ranks} parts",
            expected="a dim whose size is a multiple of the number of ranks",
            remedy="cut along another dim, or pad it",
        )
    return x.shape[dim] // ranks


def _without_data(x: Tensor, dim: int, ranks: int, group_name: str) -> Tensor:
    shape = list(x.shape)
    shape[dim] = _part_size(x, dim, ranks)
    return x.new_empty(shape)


def _copied(x: Tensor, dim: int, ranks: int, group_name: str) -> Tensor:
    size = _part_size(x, dim, ranks)
    group = group_named(group_name)
    if group.size() != ranks:
        raise RewriteError(
            f"a group {group_name} of {group.size()} ranks",
            expected=f"{ranks}, for which the program was made",
            remedy="make the program for the group that it runs on",
        )
    return x.narrow(dim, group.rank() * size, size).clone(memory_format=torch.contiguous_format)


torch.library.define(
    OWN_PART, "(Tensor x, int dim, int ranks, str group_name) -> Tensor", tags=torch.Tag.pt2_compliant_tag
)
torch.library.register_fake(OWN_PART, _without_data)
torch.library.impl(OWN_PART, "default", _copied)

OPERATOR = torch.ops.crossfade.own_part.default
"""What a graph calls."""
