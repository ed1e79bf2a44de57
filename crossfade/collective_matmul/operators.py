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
from crossfade.graph.collective_matmul import GATHER_MATMUL, MATMUL_SCATTER, MATMUL_SCATTER_MEANWHILE, check_run, pairs
from crossfade.graph.private import group_named

_EXCHANGES = {"chunked": chunked, "ring": ring}


def _gather_matmul(
    part: Tensor,
    others: list[Tensor],
    biases: list[Tensor | None],
    scales: list[Tensor | None],
    products: list[str],
    dim: int,
    ranks: int,
    form: str,
    chunks: int,
    keep: bool,
    group_name: str,
) -> list[Tensor]:
    check_run(ranks, form, chunks)
    if form == "symmetric" and ranks > 1:
        from crossfade.collective_matmul import symmetric  # registers operators that few need

        _own_rank(part, ranks, form, group_name)
        return symmetric.gather(part, others, biases, scales, products, dim, ranks, keep, group_name)
    gathered = GatheredProducts(part, others, biases, scales, products, dim, ranks, keep)
    if ranks == 1:
        gathered.take(part.unsqueeze(0), (0, 1), (0, part.shape[dim]))
    else:
        rank = _own_rank(part, ranks, form, group_name)
        _EXCHANGES[form].gather(gathered, chunks, rank, group_name)
    return gathered.results()


def _matmul_scatter(
    left: Tensor,
    right: Tensor,
    bias: Tensor | None,
    scales: list[Tensor | None],
    product: str,
    dim: int,
    reduce_op: str,
    ranks: int,
    form: str,
    chunks: int,
    group_name: str,
    *,
    others: Meanwhile | None = None,
) -> Tensor:
    check_run(ranks, form, chunks)
    if form == "symmetric" and ranks > 1:
        from crossfade.collective_matmul import symmetric

        _own_rank(left, ranks, form, group_name)
        result = symmetric.scatter(left, right, bias, scales, product, dim, reduce_op, ranks, group_name)
        if others is not None:  # torch's kernels leave no time for it
            others.compute(1.0)
        return result
    scattered = ScatteredProduct(left, right, bias, scales, product, dim, reduce_op, ranks, others)
    if ranks == 1:
        scattered.compute((0, 1), (0, scattered.rows), scattered.result.unsqueeze(0))
        scattered.compute_others(1.0)
    else:
        rank = _own_rank(left, ranks, form, group_name)
        _EXCHANGES[form].scatter(scattered, chunks, rank, group_name)
    return scattered.result


def _matmul_scatter_meanwhile(*given: Any) -> list[Tensor]:
    """Takes what `_matmul_scatter` does, then the operands of what is computed meanwhile."""
    *scattered, meanwhile = given
    others = Meanwhile(pairs(meanwhile))
    result = _matmul_scatter(*scattered, others=others)
    return [result, *others.results]


def _own_rank(tensor: Tensor, ranks: int, form: str, name: str) -> int:
    """This process's rank in the group, once the group is as large as the program says and can exchange so."""
    group = group_named(name)
    if group.size() != ranks:
        raise MeshError(
            f"a group {name} of {group.size()} ranks for a product over {ranks}",
            expected=f"{ranks} ranks",
            remedy="run the program on a mesh of the size it was made for",
        )
    if tensor.is_cuda and form != "symmetric" and dist.get_backend(group) == "gloo":
        raise NotYetError(
            f"a product of CUDA tensors fused in the form {form} over gloo",
            expected="NCCL, which exchanges CUDA tensors beside computation",
            remedy="use NCCL, or the form symmetric within one machine",
        )
    return group.rank()


for _device in ("cpu", "cuda"):
    torch.library.impl(GATHER_MATMUL, _device, _gather_matmul)
    torch.library.impl(MATMUL_SCATTER, _device, _matmul_scatter)
    torch.library.impl(MATMUL_SCATTER_MEANWHILE, _device, _matmul_scatter_meanwhile)
