"""`crossfade.softmax_statistics` on CUDA: each program takes a row from left to right and reads it once.

Imported only where Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LARGEST_BLOCK = 4096
_WARPS = 8


def softmax_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum along the last dim and the sum of exponentials below it, of contiguous float32 rows."""
    width = x.shape[-1]
    most = x.new_empty([*x.shape[:-1], 1])
    total = torch.empty_like(most)
    block = min(triton.next_power_of_2(width), _LARGEST_BLOCK)
    with torch.cuda.device(x.device):
        _row[most.numel(),](x, most, total, width, BLOCK=block, num_warps=_WARPS if block > 1024 else 4)
    return most, total


@triton.jit
def _row(x: tl.tensor, most: tl.tensor, total: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    start = x + row * width
    lane = tl.arange(0, BLOCK)
    # Each lane keeps the maximum and the sum of its own column, so that lanes meet once, at the end of the row.
    high = tl.full([BLOCK], float("-inf"), tl.float32)
    summed = tl.zeros([BLOCK], tl.float32)
    nans = tl.zeros([BLOCK], tl.int32)
    for offset in range(0, width, BLOCK):
        value = tl.load(start + offset + lane, mask=offset + lane < width, other=float("-inf"))
        nans = nans | (value != value).to(tl.int32)
        higher = tl.maximum(high, value)
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing but -inf so far adds nothing
        summed = summed * tl.exp(high - base) + tl.exp(value - base)
        high = higher
    highest = tl.max(high, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    sum_of_row = tl.sum(summed * tl.exp(high - base), 0)
    # no maximum to measure from, or none that is a number: exp(x - maximum) is nan
    undefined = (highest == float("-inf")) | (tl.max(nans, 0) > 0)
    tl.store(total + row, tl.where(undefined, float("nan"), sum_of_row))
    tl.store(most + row, tl.where(tl.max(nans, 0) > 0, float("nan"), highest))
