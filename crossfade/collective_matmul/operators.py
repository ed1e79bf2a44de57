"""Runs the operators of `crossfade.graph.collective_matmul` on CPU and CUDA tensors, once this module is imported.

The forms of exchange are in `chunked`, `ring` and `symmetric`; all compute the same.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from crossfade.collective_matmul import chunked, ring
from crossfade.collective_matmul.pieces import GatheredProducts, Meanwhile, ScatteredProduct
from crossfade.errors import MeshError, NotYetError
from crossfade.graph.collective_matmul import (
    GATHER_MATMUL,
    MATMUL_SCATTER,
    MATMUL_SCATTER_MEANWHILE,
    GatherMatmulCall,
    MatmulScatterCall,
    pairs,
)
from crossfade.graph.private import group_named

_EXCHANGES = {"chunked": chunked, "ring": ring}


def _gather_matmul(*given: Any) -> list[Tensor]:
    call = GatherMatmulCall(*given)
    if call.form == "symmetric" and call.ranks > 1:
        from crossfade.collective_matmul import symmetric  # registers operators that few need

        _own_rank(call.part, call)
        return symmetric.gather(call)
    gathered = GatheredProducts(call)
    if call.ranks == 1:
        gathered.take(call.part.unsqueeze(0), (0, 1), (0, call.part.shape[call.dim]))
    else:
        _EXCHANGES[call.form].gather(gathered, call.chunks, _own_rank(call.part, call), call.group)
    return gathered.results()


def _matmul_scatter(*given: Any, others: Meanwhile | None = None) -> Tensor:
    call = MatmulScatterCall(*given)
    if call.form == "symmetric" and call.ranks > 1:
        from crossfade.collective_matmul import symmetric

        _own_rank(call.left, call)
        result = symmetric.scatter(call)
        if others is not None:  # torch's kernels leave no time for it
            others.compute(1.0)
        return result
    scattered = ScatteredProduct(call, others)
    if call.ranks == 1:
        scattered.compute((0, 1), (0, scattered.rows), scattered.result.unsqueeze(0))
        scattered.compute_others(1.0)
    else:
        _EXCHANGES[call.form].scatter(scattered, call.chunks, _own_rank(call.left, call), call.group)
    return scattered.result


def _matmul_scatter_meanwhile(*given: Any) -> list[Tensor]:
    """Takes what `_matmul_scatter` does, then the operands of what is computed meanwhile."""
    *scattered, meanwhile = given
    others = Meanwhile(pairs(meanwhile))
    result = _matmul_scatter(*scattered, others=others)
    return [result, *others.results]


def _own_rank(tensor: Tensor, call: GatherMatmulCall | MatmulScatterCall) -> int:
    """This process's rank in the group, once the group is as large as the program says and can exchange so."""
    group = group_named(call.group)
    if group.size() != call.ranks:
        raise MeshError(
            f"the group {call.group} has {group.size()} ranks, and a product is exchanged between {call.ranks}",
            expected=f"{call.ranks} ranks",
            remedy="run the program on a mesh of the size it was made for",
        )
    if tensor.is_cuda and call.form != "symmetric" and dist.get_backend(group) == "gloo":
        raise NotYetError(
            f"a product of CUDA tensors is exchanged in the form {call.form} over gloo",
            expected="NCCL, which exchanges CUDA tensors beside computation",
            remedy="use NCCL, or the form symmetric within one machine",
        )
    return group.rank()


for _device in ("cpu", "cuda"):
    torch.library.impl(GATHER_MATMUL, _device, _gather_matmul)
    torch.library.impl(MATMUL_SCATTER, _device, _matmul_scatter)
    torch.library.impl(MATMUL_SCATTER_MEANWHILE, _device, _matmul_scatter_meanwhile)
