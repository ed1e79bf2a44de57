"""Products cut into pieces: each piece of a matrix product is written, or added, where it belongs in the result.

What is gathered or scattered has a dim that is cut into `ranks` blocks; a piece is some rows of the blocks of some
ranks. Tensors are therefore seen with that dim as two, (rank, row), and a piece is a slice of both.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crossfade.errors import RewriteError
from crossfade.graph.collective_matmul import Equation

_SHORT = (torch.bfloat16, torch.float16)
"""Dtypes whose sums are kept in float32 until they are complete."""
_RANK_LETTERS = "RQTUVWXYZ"


def cut(rows: int, chunks: int) -> list[tuple[int, int]]:
    """Start and size of each piece of a block; sizes differ by at most one row, and none is empty.

    >>> cut(7, 3), cut(2, 5)
    ([(0, 2), (2, 2), (4, 3)], [(0, 1), (1, 1)])
    """
    count = min(chunks, rows)
    edges = [index * rows // count for index in range(count + 1)] if count else []
    return [(start, end - start) for start, end in itertools.pairwise(edges)]


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums of a dtype are kept in.

    >>> wide(torch.bfloat16), wide(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float32 if dtype in _SHORT else dtype


def as_sent(tensor: Tensor) -> Tensor:
    """A contiguous tensor as collectives take it: not all of them know numbers of 8 bits.

    >>> as_sent(torch.ones(2, dtype=torch.float8_e4m3fn)).dtype
    torch.uint8
    """
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


@dataclass(slots=True)
class Scales:
    """What the operands of a scaled product are multiplied with: one number, or one for each row.

    Those for each row have the operand's dims, with one element where it is summed over.
    """

    first: Tensor
    second: Tensor
    dtype: torch.dtype
    fast: bool


@dataclass(frozen=True, slots=True)
class _Plan:
    """How an equation becomes one of matrices: orders of dims, and how many of them are batch, rows, columns, inner."""

    first: tuple[int, ...]
    second: tuple[int, ...]
    out: tuple[int, ...]
    batch: int
    rows: int
    columns: int
    inner: int


@functools.cache
def _plan(first: str, second: str, result: str) -> _Plan:
    batch = [letter for letter in result if letter in first and letter in second]
    rows = [letter for letter in result if letter not in second]
    columns = [letter for letter in result if letter not in first]
    inner = [letter for letter in first if letter not in result]
    return _Plan(
        first=tuple(first.index(letter) for letter in (*batch, *rows, *inner)),
        second=tuple(second.index(letter) for letter in (*batch, *inner, *columns)),
        out=tuple(result.index(letter) for letter in (*batch, *rows, *columns)),
        batch=len(batch),
        rows=len(rows),
        columns=len(columns),
        inner=len(inner),
    )


def multiply(
    letters: tuple[str, str, str],
    first: Tensor,
    second: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    scales: Scales | None = None,
) -> None:
    """Write `einsum(letters, first, second) + bias` into `out`, which may be a slice of something larger.

    >>> whole = torch.zeros(4, 2)
    >>> multiply(("mk", "kn", "mn"), torch.eye(2), torch.ones(2, 2), whole[1:3])
    >>> whole.sum(1)
    tensor([0., 2., 2., 0.])
    """
    plan = _plan(*letters)
    ordered = out.permute(plan.out)
    if scales is not None:
        _multiply_scaled(plan, first, second, ordered, scales)
    else:
        left, right = first.permute(plan.first), second.permute(plan.second)
        flat = None if plan.batch else _merged(ordered, (plan.rows, plan.columns))
        if flat is None:
            _multiply_unevenly(plan, left, right, ordered)
        else:
            inner = _size(left, plan.inner)
            left, right = left.reshape(flat.shape[0], inner), right.reshape(inner, flat.shape[1])
            added = _bias_of_matrix(bias, plan)
            if added is not None:
                torch.addmm(added, left, right, out=flat)
                return
            torch.mm(left, right, out=flat)
    if bias is not None:
        out.add_(bias)


def add_product(
    letters: tuple[str, str, str], first: Tensor, second: Tensor, out: Tensor, *, scales: Scales | None = None
) -> None:
    """Add `einsum(letters, first, second)` to a contiguous `out`, which may have a wider dtype."""
    plan = _plan(*letters)
    dtype = first.dtype if scales is None else scales.dtype
    flat = None
    if scales is None and out.dtype == dtype and plan.batch == 0:
        flat = _merged(out.permute(plan.out), (plan.rows, plan.columns))
    if flat is not None:
        inner = _size(left := first.permute(plan.first), plan.inner)
        right = second.permute(plan.second).reshape(inner, flat.shape[1])
        flat.addmm_(left.reshape(flat.shape[0], inner), right)
    else:
        product = first.new_empty(out.shape, dtype=dtype)
        multiply(letters, first, second, product, scales=scales)
        out.add_(product)


def _multiply_unevenly(plan: _Plan, left: Tensor, right: Tensor, ordered: Tensor) -> None:
    """A product of batches. Without any, and rows that do not lie evenly in the result, their first dims become one."""
    inner = _size(left, plan.inner)
    for moved in range(plan.rows) if plan.batch else range(1, plan.rows):
        flat = _merged(ordered, (plan.batch + moved, plan.rows - moved, plan.columns))
        if flat is not None and (moved == 0 or plan.batch == 0):
            right = right.reshape(-1, inner, flat.shape[2]) if plan.batch else right.reshape(inner, flat.shape[2])
            torch.bmm(left.reshape(*flat.shape[:2], inner), right.expand(flat.shape[0], -1, -1), out=flat)
            return
    batch, rows, columns = _grouped(ordered.shape, (plan.batch, plan.rows, plan.columns))
    if plan.batch:
        product = torch.bmm(left.reshape(batch, rows, inner), right.reshape(batch, inner, columns))
    else:
        product = torch.mm(left.reshape(rows, inner), right.reshape(inner, columns))
    ordered.copy_(product.view(ordered.shape))


def _multiply_scaled(plan: _Plan, first: Tensor, second: Tensor, ordered: Tensor, scales: Scales) -> None:
    """A scaled product of matrices: the left one in rows, the right one in columns, as the kernels take them."""
    rows, columns = math.prod(ordered.shape[: plan.rows]), math.prod(ordered.shape[plan.rows :])
    left = first.permute(plan.first)
    right = second.permute(plan.second).reshape(_size(left, plan.inner), columns)
    left = left.reshape(rows, right.shape[0]).contiguous()
    if right.stride(0) != 1:
        right = right.t().contiguous().t()
    left_scale = _row_scale(scales.first, plan.first, (rows, 1))
    right_scale = _row_scale(scales.second, plan.second, (1, columns))
    flat = ordered.view(rows, columns) if ordered.is_contiguous() and ordered.dtype == scales.dtype else None
    place = flat if flat is not None else ordered.new_empty((rows, columns), dtype=scales.dtype)
    torch.ops.aten._scaled_mm.out(
        left, right, left_scale, right_scale, out_dtype=scales.dtype, use_fast_accum=scales.fast, out=place
    )
    if flat is None:
        ordered.copy_(place.view(ordered.shape))


def _row_scale(scale: Tensor, order: tuple[int, ...], shape: tuple[int, int]) -> Tensor:
    if scale.numel() == 1:
        return scale.view(1, 1)
    scale = scale.permute(order).reshape(shape).contiguous()
    return scale if scale.data_ptr() % 16 == 0 else scale.clone()  # the kernels on CUDA read 16 bytes at a time


def _bias_of_matrix(bias: Tensor | None, plan: _Plan) -> Tensor | None:
    """A bias of the result's last dim as addmm takes it; None where that dim is not a matrix's own."""
    if bias is None or bias.dim() != 1:
        return None
    last = len(plan.out) - 1
    if plan.columns == 1 and plan.out[-1] == last:
        return bias
    return bias[:, None] if plan.rows == 1 and plan.out[0] == last else None


def _size(tensor: Tensor, last: int) -> int:
    return math.prod(tensor.shape[tensor.dim() - last :])


def _grouped(shape: Sequence[int], groups: tuple[int, ...]) -> list[int]:
    sizes, start = [], 0
    for count in groups:
        sizes.append(math.prod(shape[start : start + count]))
        start += count
    return sizes


def _merged(tensor: Tensor, groups: tuple[int, ...]) -> Tensor | None:
    """The tensor with each group of neighbouring dims as one, or None if that takes a copy."""
    shape, strides = tensor.shape, tensor.stride()
    merged, start = [], 0
    for count in groups:
        stride, expected = 1, None
        for dim in range(start + count - 1, start - 1, -1):
            if shape[dim] == 1:
                continue
            if expected is None:
                stride = strides[dim]
            elif strides[dim] != expected:
                return None
            expected = strides[dim] * shape[dim]
        merged.append(stride)
        start += count
    return tensor.as_strided(_grouped(shape, groups), merged)


def blocked(tensor: Tensor, dim: int, ranks: int) -> Tensor:
    """The tensor with a dim as two: rank, and row of that rank's block; the rank comes first of all.

    >>> blocked(torch.zeros(5, 6), 1, 2).shape
    torch.Size([2, 5, 3])
    """
    shape = tensor.shape
    return tensor.view(*shape[:dim], ranks, shape[dim] // ranks, *shape[dim + 1 :]).movedim(dim, 0)


def piece(view: Tensor, dim: int, ranks: tuple[int, int], rows: tuple[int, int]) -> Tensor:
    """Some rows of the blocks of some ranks of what `blocked` made; both are given as start and size."""
    return view.narrow(0, *ranks).narrow(dim + 1, *rows)


@functools.cache
def rank_letter(equation: Equation) -> str:
    """A letter for the dim of ranks that the equation does not use."""
    used = f"{equation.first}{equation.second}"
    return next(letter for letter in _RANK_LETTERS if letter not in used)


def scale_by_rows(scale: Tensor, letters: str, equation: Equation, sizes: Sequence[int]) -> Tensor:
    """A scale with the dims of its operand: one element where it does not depend on a dim."""
    if scale.numel() == 1:
        return scale.reshape([1] * len(letters))
    shape = [1 if letter in equation.contracted else size for letter, size in zip(letters, sizes, strict=True)]
    if scale.numel() != math.prod(shape):
        raise RewriteError(
            f"a scale of shape {list(scale.shape)} for {letters!r} of {equation}",
            expected=f"one number, or {math.prod(shape)}: one for each row over all ranks",
            remedy="scale by tensor or by row",
        )
    return scale.reshape(shape)
