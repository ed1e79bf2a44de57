"""Exchange through symmetric memory of CUDA devices: torch's own kernels, where each rank reads the others' pieces.

They know products of rows with one matrix, "...k,kn->...n"; anything else is an error that says what was expected. How
many pieces a block is cut into is theirs to say.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from crossfade.collective_matmul.products import scale_by_rows
from crossfade.errors import NotYetError
from crossfade.graph.collective_matmul import Equation, GatherMatmulCall, MatmulScatterCall, read_product
from crossfade.graph.private import group_named, symmetric_products


def gather(call: GatherMatmulCall) -> list[Tensor]:
    """The products, and the gathered tensor if it is kept."""
    part, others, scales, dim, group = call.part, call.others, call.scales, call.dim, call.group
    shapes = call.shapes()
    equations = [read_product(product) for product in call.products]
    known = symmetric_products()
    _check(part, equations)
    if dim == part.dim() - 1 and (not known.gathers_last_dim or any(scale is not None for scale in scales)):
        raise _not_yet(f"a gather along the last of {part.dim()} dims", "rows, or with a later torch a plain product")
    if any(scale is not None for scale in scales):
        gathered, results = torch.ops.symm_mem.fused_all_gather_scaled_matmul(
            part,
            [_in_columns(other) for other in others],
            _shared_scale(scales, equations[0], call.whole()),
            [_column_scale(scale, other) for scale, other in zip(scales[1::2], others, strict=True)],
            dim,
            group,
            [None] * len(others),
            [None] * len(others),
            [equation.dtype for equation in equations],
            [equation.fast for equation in equations],
        )
    else:
        gathered, results = torch.ops.symm_mem.fused_all_gather_matmul(part, others, dim, group, return_A=call.keep)
    done = []
    for result, bias, (shape, _) in zip(results, call.biases, shapes, strict=True):
        result = result.contiguous().view(shape)
        done.append(result if bias is None else result.add_(bias))
    return [*done, gathered.contiguous()] if call.keep else done


def scatter(call: MatmulScatterCall) -> Tensor:
    """This rank's part of the product, reduced."""
    left, right, bias, scales, group = call.left, call.right, call.bias, call.scales, call.group
    dim, reduce_op, ranks = call.dim, call.reduce_op, call.ranks
    shape, dtype = call.shape()
    equation = read_product(call.product)
    known = symmetric_products()
    _check(left, [equation])
    scaled = bool(scales) and scales[0] is not None and scales[1] is not None
    if dim == left.dim() - 1 and (scaled or not known.scatters_last_dim):
        raise _not_yet(f"a scatter along the last of {left.dim()} dims", "rows, or with a later torch a plain product")
    if scaled and dim > 1:
        raise _not_yet(f"a scaled product scattered along dim {dim}", "dim 0 or 1")
    if scaled:
        whole = list(shape)
        whole[dim] *= ranks
        result = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
            left,
            _in_columns(right),
            _shared_scale(scales, equation, left.shape),
            _column_scale(scales[1], right),
            reduce_op,
            dim,
            dim,
            group,
            whole,
            out_dtype=dtype,
            use_fast_accum=equation.fast,
        )
    else:
        result = torch.ops.symm_mem.fused_matmul_reduce_scatter(left, right, reduce_op, dim, group)
    result = result.contiguous()
    if bias is not None:
        missing = len(shape) - bias.dim()
        if dim >= missing and bias.shape[dim - missing] > 1:
            bias = bias.narrow(dim - missing, group_named(group).rank() * shape[dim], shape[dim])
        result.add_(bias, alpha=ranks if reduce_op == "sum" else 1)  # every rank adds it before the reduction
    return result


def _check(first: Tensor, equations: Sequence[Equation]) -> None:
    """Raise unless torch's kernels know all these products of a tensor."""
    if not first.is_cuda:
        raise _not_yet(f"a tensor on {first.device}", "one on a CUDA device")
    if not first.is_contiguous() or first.dim() < 2:
        raise _not_yet(
            f"a tensor of shape {list(first.shape)} and strides {list(first.stride())}", "a contiguous one of two dims"
        )
    for equation in equations:
        rows, inner = equation.first[:-1], equation.first[-1]
        fits = (
            len(equation.second) == 2 and equation.second[0] == inner and equation.result == rows + equation.second[1]
        )
        if not fits:
            raise _not_yet(f"the product {equation}", "one of rows with a matrix, such as 'bsk,kn->bsn'")


def _in_columns(matrix: Tensor) -> Tensor:
    """The matrix as scaled kernels take it."""
    return matrix if matrix.stride(0) == 1 else matrix.t().contiguous().t()


def _shared_scale(scales: Sequence[Tensor | None], equation: Equation, sizes: Sequence[int]) -> Tensor:
    """The first operand's scale, of which there may be only one: a number, or one for each row of all ranks."""
    first = scales[0]
    if first is None or any(scale is not first and not _same(scale, first) for scale in scales[0::2]):
        raise _not_yet("products with different scales of the gathered tensor", "the same one for all of them")
    return first if first.numel() == 1 else scale_by_rows(first, equation.first, equation, sizes).contiguous()


def _same(tensor: Tensor | None, other: Tensor) -> bool:
    """Whether two tensors are the same memory seen the same way; numbers are not compared."""
    return tensor is not None and (tensor.data_ptr(), tensor.shape, tensor.stride()) == (
        other.data_ptr(),
        other.shape,
        other.stride(),
    )


def _column_scale(scale: Tensor | None, matrix: Tensor) -> Tensor:
    """The matrix's scale: a number, or one for each column."""
    assert scale is not None  # products without scales went another way
    return scale if scale.numel() == 1 else scale.reshape(1, matrix.shape[1]).contiguous()


def _not_yet(found: str, expected: str) -> NotYetError:
    return NotYetError(
        f"{found} in a product fused through symmetric memory", expected=expected, remedy="use the form ring or chunked"
    )
