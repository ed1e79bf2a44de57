"""Copying in and out of a bucket: two operators that graphs hold, `crossfade.pack` and `crossfade.unpack`.

A bucket has `rows` rows, one for each rank that sends or receives a part of it; each row holds its part of every
member, side by side. On CUDA both are one Triton launch, elsewhere (and without Triton) a few of torch's own copies.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from crossfade.errors import RewriteError

PACK = "crossfade::pack"
UNPACK = "crossfade::unpack"

# Members smaller than this cost more to call torch for than to pass over again (measured on CPU, 1 and 2 threads).
_SMALL_MEMBER_BYTES = 2**16


def pack(
    values: Sequence[Tensor], rows: int = 1, *, dtype: torch.dtype | None = None, divisor: float | None = None
) -> Tensor:
    """Copy values into a fresh flat bucket: its row r is row r of every value, each cut into `rows` equal parts.

    With `divisor` each value is divided, rounding as `value / divisor` does; then it is converted to `dtype`.

    >>> a, b = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([10.0, 20.0])
    >>> pack([a, b])
    tensor([ 1.,  2.,  3.,  4., 10., 20.])
    >>> pack([a, b], rows=2)
    tensor([ 1.,  2., 10.,  3.,  4., 20.])
    >>> pack([a, b], dtype=torch.bfloat16, divisor=2)
    tensor([ 0.5000,  1.0000,  1.5000,  2.0000,  5.0000, 10.0000], dtype=torch.bfloat16)
    """
    return torch.ops.crossfade.pack(values, rows, dtype=dtype, divisor=divisor)


def unpack(packed: Tensor, rows: int, sizes: Sequence[int]) -> list[Tensor]:
    """Copy a bucket of `rows` rows out into fresh tensors, one of shape [rows, size] for each size.

    >>> unpack(torch.tensor([1.0, 2.0, 10.0, 3.0, 4.0, 20.0]), 2, [2, 1])
    [tensor([[1., 2.], [3., 4.]]), tensor([[10.], [20.]])]
    """
    return torch.ops.crossfade.unpack(packed, rows, sizes)


def implementation(device: torch.device) -> str:
    """Which code copies on a device, for reports: "triton" leaves to torch what it does not round alike (conversions
    other than between floats of up to 32 bits), and everything while a CUDA graph is captured.

    >>> implementation(torch.device("cpu"))
    'plain'
    """
    return "triton" if device.type == "cuda" and _has_triton() else "plain"


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _pack_without_data(
    values: list[Tensor], rows: int = 1, *, dtype: torch.dtype | None = None, divisor: float | None = None
) -> Tensor:
    dtype = _checked_dtype(values, rows, dtype, divisor)
    return values[0].new_empty([sum(value.numel() for value in values)], dtype=dtype)


def _unpack_without_data(packed: Tensor, rows: int, sizes: list[int]) -> list[Tensor]:
    _check_sizes(packed, rows, sizes)
    return [packed.new_empty([rows, size]) for size in sizes]


def _pack_plainly(
    values: list[Tensor], rows: int = 1, *, dtype: torch.dtype | None = None, divisor: float | None = None
) -> Tensor:
    dtype = _checked_dtype(values, rows, dtype, divisor)
    source = values[0].dtype
    unchanged = dtype == source and divisor is None
    alike = all(value.dtype == source and value.is_contiguous() for value in values)
    if alike and (unchanged or sum(value.nbytes for value in values) < _SMALL_MEMBER_BYTES * len(values)):
        packed = _concatenated(values, rows)
        return (packed if divisor is None else packed.div_(divisor)).to(dtype)
    return _copied(values, rows, dtype, divisor)


def _concatenated(values: list[Tensor], rows: int) -> Tensor:
    """The bucket of contiguous values of one dtype."""
    if rows == 1 and len(values) > 1:  # of a single value this op returns a view
        return torch.ops.aten.flatten_dense_tensors(values)
    return torch.cat([value.view(rows, value.numel() // rows) for value in values], 1).view(-1)


def _copied(values: list[Tensor], rows: int, dtype: torch.dtype, divisor: float | None) -> Tensor:
    """The bucket of any values: each is converted, and read in its order, on the way into its place."""
    blocks = [_as_rows(value, rows) for value in values]
    sizes = [value.numel() // rows for value in values]
    packed = values[0].new_empty(rows * sum(sizes), dtype=dtype)
    pieces = packed.view(rows, sum(sizes)).split(sizes, 1)
    places = [piece.view(block.shape) for piece, block in zip(pieces, blocks, strict=True)]
    if divisor is None:
        torch.ops.aten._foreach_copy_(places, blocks)
    else:
        for place, block in zip(places, blocks, strict=True):
            torch.div(block, divisor, out=place)
    return packed


def _unpack_plainly(packed: Tensor, rows: int, sizes: list[int]) -> list[Tensor]:
    _check_sizes(packed, rows, sizes)
    return torch.ops.aten.split_with_sizes_copy(packed.reshape(rows, sum(sizes)), sizes, 1)


def _pack_on_cuda(
    values: list[Tensor], rows: int = 1, *, dtype: torch.dtype | None = None, divisor: float | None = None
) -> Tensor:
    dtype = _checked_dtype(values, rows, dtype, divisor)
    if _may_launch(values[0].device):
        from crossfade.graph import packing_triton

        if all(packing_triton.converts(value.dtype, dtype, divisor) for value in values):
            return packing_triton.pack(values, rows, dtype, divisor)
    return _pack_plainly(values, rows, dtype=dtype, divisor=divisor)


def _unpack_on_cuda(packed: Tensor, rows: int, sizes: list[int]) -> list[Tensor]:
    _check_sizes(packed, rows, sizes)
    if _may_launch(packed.device):
        from crossfade.graph import packing_triton

        return packing_triton.unpack(packed, rows, sizes)
    return _unpack_plainly(packed, rows, sizes)


def _may_launch(device: torch.device) -> bool:
    """Whether our kernel can run now: a captured graph would replay the upload of its tables from freed memory."""
    return implementation(device) == "triton" and not torch.cuda.is_current_stream_capturing()


def _as_rows(value: Tensor, rows: int) -> Tensor:
    """The value with `rows` as its first dim: two-dimensional if contiguous, else as it lies, to be copied once."""
    if value.is_contiguous() or value.dim() == 0 or value.shape[0] % rows:
        return value.reshape(rows, value.numel() // rows)
    return value.unflatten(0, (rows, value.shape[0] // rows))


def _checked_dtype(
    values: Sequence[Tensor], rows: int, dtype: torch.dtype | None, divisor: float | None
) -> torch.dtype:
    """The dtype of the bucket, once the arguments make sense. Symbolic sizes are trusted: a check would guard them."""
    if not values:
        raise RewriteError("an empty list to pack", expected="at least one value", remedy="leave empty buckets out")
    _check_rows(rows)
    for value in values if rows > 1 else ():
        if isinstance(size := value.numel(), int) and size % rows:
            raise RewriteError(
                f"a value of shape {list(value.shape)} to pack into {rows} rows",
                expected=f"a multiple of {rows} elements",
                remedy="pad it, or leave it out of the bucket",
            )
    if len(devices := {value.device for value in values}) > 1:
        raise RewriteError(
            f"values on {', '.join(sorted(map(str, devices)))} in one bucket",
            expected="one device",
            remedy="make a bucket for each device",
        )
    dtypes = {value.dtype for value in values}
    if dtype is None and len(dtypes) > 1:
        names = ", ".join(sorted(str(given).removeprefix("torch.") for given in dtypes))
        raise RewriteError(f"values of {names} in one bucket", expected="one dtype", remedy="give the bucket's dtype")
    if divisor is not None and not all(given.is_floating_point or given.is_complex for given in dtypes):
        raise RewriteError(
            f"integers to divide by {divisor}",
            expected="floating-point values",
            remedy="convert them first, or leave the divisor out",
        )
    return dtype or values[0].dtype


def _check_sizes(packed: Tensor, rows: int, sizes: Sequence[int]) -> None:
    if not sizes:
        raise RewriteError("no sizes to unpack", expected="at least one", remedy="leave empty buckets out")
    _check_rows(rows)
    known = all(isinstance(size, int) for size in [packed.numel(), *sizes])
    if known and packed.numel() != rows * sum(sizes):
        raise RewriteError(
            f"a bucket of {packed.numel()} elements",
            expected=f"{rows} rows of {' + '.join(map(str, sizes))} = {rows * sum(sizes)}",
            remedy="unpack with the rows and sizes that it was packed with",
        )


def _check_rows(rows: int) -> None:
    if rows < 1:
        raise RewriteError(f"a bucket of {rows} rows", expected="at least one", remedy="give one row for each rank")


torch.library.define(
    PACK,
    "(Tensor[] values, int rows=1, *, ScalarType? dtype=None, float? divisor=None) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(UNPACK, "(Tensor packed, int rows, SymInt[] sizes) -> Tensor[]", tags=torch.Tag.pt2_compliant_tag)
torch.library.register_fake(PACK, _pack_without_data)
torch.library.register_fake(UNPACK, _unpack_without_data)
torch.library.impl(PACK, "default", _pack_plainly)
torch.library.impl(UNPACK, "default", _unpack_plainly)
torch.library.impl(PACK, "cuda", _pack_on_cuda)
torch.library.impl(UNPACK, "cuda", _unpack_on_cuda)

OPERATOR = torch.ops.crossfade.pack.default
"""What a graph calls to pack."""

COPIES_OUT = frozenset(
    {torch.ops.aten.clone.default, torch.ops.aten.split_with_sizes_copy.default, torch.ops.crossfade.unpack.default}
)
"""What a graph calls to copy members out of a bucket."""
