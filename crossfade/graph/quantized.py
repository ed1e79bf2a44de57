"""Eight-bit forms of tensors that travel: two operators that graphs hold, `crossfade.quantize` and `.dequantize`.

A tensor of `rows` rows, one for each rank that a part of it goes to, becomes bytes: each row is its numbers as signed
eighths of what the largest of 256 neighbours is, 127 being all of it, and after them those largest ones in float32.
What rounding left out is kept, and added the next time (error feedback): over many steps nothing is lost.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crossfade.errors import RewriteError

BLOCK = 256
"""Numbers that share a scale."""
_LARGEST = 127
_SCALE_BYTES = 4
_TINY = torch.finfo(torch.float32).tiny
_AT_ONCE = 64 * BLOCK
"""Numbers that a CPU rounds at once: what it makes on the way stays in its cache."""


def columns(numel: int, rows: int) -> int:
    """The numbers in each of `rows` rows, padded to whole blocks, or of less than one to whole words.

    >>> columns(1000, 2), columns(10, 2)
    (512, 8)
    """
    each = -(-numel // rows)
    unit = BLOCK if each >= BLOCK else _SCALE_BYTES
    return -(-each // unit) * unit


def sent_bytes(numel: int, rows: int) -> int:
    """The bytes of all rows: about a quarter of float32's.

    >>> sent_bytes(2**20, 2) / (4 * 2**20)
    0.25390625
    """
    each = columns(numel, rows)
    return rows * (each + _SCALE_BYTES * -(-each // BLOCK))


def quantize(value: Tensor, error: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The bytes of `value + error`, and what they leave out: the error to add the next time.

    A block with infinities or NaN arrives as NaN, and leaves no error: the step after it is sound again.

    >>> value, error = torch.tensor([1.0, 0.5, 0.001, 0.0]), torch.zeros(4)
    >>> sent, error = quantize(value, error, 1)
    >>> dequantize(sent, 4)
    tensor([[1.0000, 0.5039, 0.0000, 0.0000]])
    >>> error
    tensor([ 0.0000, -0.0039,  0.0010,  0.0000])
    """
    return torch.ops.crossfade.quantize(value, error, rows)


def dequantize(sent: Tensor, numbers: int) -> Tensor:
    """What bytes stand for, in float32: `numbers` of each row."""
    return torch.ops.crossfade.dequantize(sent, numbers)


def _quantize(value: Tensor, error: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    _check(value, error, rows)
    numel, each = value.numel(), columns(value.numel(), rows)
    own, block = -(-numel // rows), min(each, BLOCK)
    wanted = _in_rows(value.reshape(-1), rows, own)
    before = _in_rows(error.reshape(-1), rows, own)
    sent = value.new_empty((rows, each + _SCALE_BYTES * (each // block)), dtype=torch.uint8)
    left = value.new_empty((rows, own), dtype=torch.float32)
    at_once = _AT_ONCE if value.device.type == "cpu" else each
    for row in range(rows):
        for start in range(0, own, at_once):
            end = min(start + at_once, own)
            part = wanted[row, start:end].to(torch.float32) + before[row, start:end]
            numbers, scales, lost = _rounded(part, block)
            sent[row, start : start + numbers.numel()] = numbers.view(torch.uint8)
            first = each + _SCALE_BYTES * (start // block)
            sent[row, first : first + _SCALE_BYTES * scales.numel()] = scales.view(torch.uint8)
            left[row, start:end] = lost
    return sent, left.view(-1)[:numel].view(error.shape)


def _rounded(wanted: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers as whole blocks of signed bytes, the blocks' scales, and what that leaves out."""
    count = wanted.numel()
    padded = wanted if count % block == 0 else torch.nn.functional.pad(wanted, [0, -count % block])
    blocks = padded.view(-1, block)
    scales = blocks.abs().amax(1, keepdim=True).div_(_LARGEST)
    numbers = (blocks / scales.clamp_min(_TINY)).round_()
    lost = (blocks - numbers * scales).view(-1)[:count]
    # What is not finite has no eight bits; its block's scale is not finite either, and one is not zero: NaN, or larger.
    whole = torch.nan_to_num_(numbers, 1.0, _LARGEST, -_LARGEST).to(torch.int8)
    return whole.view(-1), scales.view(-1), torch.nan_to_num_(lost, 0.0, 0.0, 0.0)


def _in_rows(flat: Tensor, rows: int, own: int) -> Tensor:
    missing = rows * own - flat.numel()
    return (torch.nn.functional.pad(flat, [0, missing]) if missing else flat).view(rows, own)


def _dequantize(sent: Tensor, numbers: int) -> Tensor:
    each = columns(numbers, 1)
    _check_bytes(sent, each)
    block = min(each, BLOCK)
    scales = sent[:, each:].contiguous().view(torch.float32)
    blocks = sent[:, :each].view(torch.int8).to(torch.float32).view(sent.shape[0], -1, block)
    return blocks.mul_(scales.unsqueeze(2)).view(sent.shape[0], each)[:, :numbers].contiguous()


def _quantize_without_data(value: Tensor, error: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    _check(value, error, rows)
    shape = rows, sent_bytes(value.numel(), rows) // rows
    return value.new_empty(shape, dtype=torch.uint8), torch.empty_like(error)


def _dequantize_without_data(sent: Tensor, numbers: int) -> Tensor:
    _check_bytes(sent, columns(numbers, 1))
    return sent.new_empty((sent.shape[0], numbers), dtype=torch.float32)


def _check(value: Tensor, error: Tensor, rows: int) -> None:
    if not value.is_floating_point() or error.dtype != torch.float32 or error.numel() != value.numel() or rows < 1:
        raise RewriteError(
            f"{value.dtype} {list(value.shape)} with an error of {error.dtype} {list(error.shape)}, in {rows} rows",
            expected="floating-point numbers, as many float32 errors, and at least one row",
            remedy="start with an error of zeros like the value, in float32",
        )


def _check_bytes(sent: Tensor, each: int) -> None:
    expected = each + _SCALE_BYTES * -(-each // BLOCK)
    if sent.dtype != torch.uint8 or sent.dim() != 2 or sent.shape[1] != expected:
        raise RewriteError(
            f"{sent.dtype} of shape {list(sent.shape)} to read {each} numbers a row from",
            expected=f"bytes in rows of {expected}",
            remedy="read as many numbers as were quantized in each row",
        )


torch.library.define(
    "crossfade::quantize",
    "(Tensor value, Tensor error, int rows) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define("crossfade::dequantize", "(Tensor sent, int numbers) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
torch.library.register_fake("crossfade::quantize", _quantize_without_data)
torch.library.register_fake("crossfade::dequantize", _dequantize_without_data)
torch.library.impl("crossfade::quantize", "default", _quantize)
torch.library.impl("crossfade::dequantize", "default", _dequantize)
