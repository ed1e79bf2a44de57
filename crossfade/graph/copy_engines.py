"""All-gathers by a GPU's copy engines, through symmetric memory: an operator that graphs hold.

`crossfade.all_gather_by_copy_engines` gathers what `all_gather_into_tensor` does, bit for bit, without the kernels that
take processors (SMs) from what computes meanwhile. It runs on CUDA devices of one node that reach each other's memory;
anything else is an error. Programs are read, printed and checked anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crossfade.errors import MeshError
from crossfade.graph.private import backend_of_group, gather_through_symmetric_memory

ALL_GATHER = "crossfade::all_gather_by_copy_engines"


def all_gather_by_copy_engines(x: Tensor, group_size: int, group: str) -> Tensor:
    """Start to gather the parts of all ranks along dim 0. To be waited for like any collective.

    >>> all_gather_by_copy_engines(torch.empty(2, 3, device="meta"), 4, "dp").shape
    torch.Size([8, 3])
    """
    return torch.ops.crossfade.all_gather_by_copy_engines(x, group_size, group)


def _without_data(x: Tensor, group_size: int, group_name: str) -> Tensor:
    return x.new_empty([x.shape[0] * group_size, *x.shape[1:]])


def _started(x: Tensor, group_size: int, group_name: str) -> Tensor:
    if not x.is_cuda:
        raise _no_symmetric_memory(f"a tensor on {x.device}", group_name)
    backend = backend_of_group(group_name)
    if backend is None or "emulated" in backend:
        raise _no_symmetric_memory(f"a tensor on {x.device} ({backend or 'no group of this process'})", group_name)
    try:
        return gather_through_symmetric_memory(x, group_name)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
        raise _no_symmetric_memory(f"a tensor on {x.device}, for which torch says {said!r}", group_name) from error


def _no_symmetric_memory(found: str, group: str) -> MeshError:
    return MeshError(
        f"a gather by copy engines along group {group!r} of {found}",
        expected="CUDA devices of one node that have symmetric memory",
        remedy="leave the group out of the groups of gather-by-copy-engines: its own backend then gathers",
    )


torch.library.define(
    ALL_GATHER, "(Tensor x, int group_size, str group_name) -> Tensor", tags=torch.Tag.pt2_compliant_tag
)
torch.library.register_fake(ALL_GATHER, _without_data)
torch.library.impl(ALL_GATHER, "default", _started)

OPERATOR = torch.ops.crossfade.all_gather_by_copy_engines.default
"""What a graph calls to gather by copy engines."""
