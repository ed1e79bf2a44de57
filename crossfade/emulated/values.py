"""What an emulated collective leaves in its outputs: every other rank holds what this one holds.

A sum over `n` ranks is then `n` times this rank's tensor, an average or a maximum is the tensor itself, and what is
gathered is this rank's part `n` times. Each function checks the shapes and returns what has to be written, as a
function to be called later; None where the outputs are right as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from crossfade.errors import MeshError, NotYetError

Write = Callable[[], None]

_KEEPS_EQUAL_VALUES = {ReduceOp.AVG, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BOR}


def reduced(tensors: Sequence[Tensor], op: Any, ranks: int) -> Write | None:
    """Tensors reduced in place with as many equal ones.

    >>> tensor = torch.tensor([1.0, 2.0])
    >>> reduced([tensor], ReduceOp.SUM, ranks=8)()
    >>> tensor
    tensor([ 8., 16.])
    """
    change = _change(op, ranks)
    targets = [tensor.data for tensor in tensors]  # .data: like a real backend, we leave autograd's version alone
    return None if change is None else lambda: _each(change, targets)


def gathered(outputs: Sequence[Tensor], inputs: Sequence[Tensor], ranks: int) -> Write:
    """Each output is its input, `ranks` times along dim 0."""
    for output, source in _paired(outputs, inputs):
        _check_size(output.numel(), source.numel() * ranks, "an output", ranks)
    pairs = [(_parts(output, ranks), source.data) for output, source in zip(outputs, inputs, strict=True)]
    return lambda: _each(lambda pair: pair[0].copy_(pair[1].reshape(1, -1).expand_as(pair[0])), pairs)


def repeated(outputs: Sequence[Tensor], source: Tensor) -> Write:
    """Each output is the source."""
    targets, values = [output.data for output in outputs], source.data
    for target in targets:
        _check_size(target.numel(), values.numel(), "an output", 1)
    return lambda: _each(lambda target: target.copy_(values.view(target.shape)), targets)


def delivered(outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> Write:
    """Each output is its source."""
    pairs = [(output.data, source.data) for output, source in _paired(outputs, sources)]
    return lambda: _each(lambda pair: pair[0].copy_(pair[1].reshape(pair[0].shape)), pairs)


def zeroed(outputs: Sequence[Tensor]) -> Write:
    """Each output is zero: what is not known should at least not be whatever the memory held."""
    targets = [output.data for output in outputs]
    return lambda: _each(lambda target: target.zero_(), targets)


def own_part(source: Tensor, ranks: int, rank: int) -> Tensor:
    """This rank's part of a tensor along dim 0."""
    return _parts(source, ranks)[rank]


def scattered(outputs: Sequence[Tensor], own: Sequence[Tensor], op: Any, ranks: int) -> Write:
    """Each output is this rank's part of what is scattered, reduced with as many equal ones."""
    pairs = [(output.data, part.data) for output, part in _paired(outputs, own)]
    for target, part in pairs:
        _check_size(part.numel() * ranks, target.numel() * ranks, "an input", ranks)
    change = _change(op, ranks)

    def write() -> None:
        for target, part in pairs:
            target.copy_(part.view(target.shape))
            if change is not None:
                change(target)

    return write


def exchanged(outputs: Sequence[Tensor], own: Tensor) -> Write:
    """Each output, what one rank sent here, is what this rank sends to itself.

    Where sizes differ from rank to rank, an output takes what fits of it; the rest of the output becomes zero.
    """
    targets, source = [output.data for output in outputs], own.data.reshape(-1)
    return lambda: _each(lambda target: _pour(target, source), targets)


def split(tensor: Tensor, sizes: Sequence[int], ranks: int) -> tuple[Tensor, ...]:
    """The parts of a tensor along dim 0, by their sizes; equal ones if none are given."""
    if not sizes:
        _check_divides(tensor.shape[0], ranks)
        sizes = [tensor.shape[0] // ranks] * ranks
    return tensor.split(list(sizes))


def _change(op: Any, ranks: int) -> Callable[[Tensor], Any] | None:
    """What a reduction does to a tensor that is the same on all ranks; None if nothing."""
    kind = getattr(op, "op", op)
    if kind in _KEEPS_EQUAL_VALUES or ranks == 1 or (kind == ReduceOp.BXOR and ranks % 2):
        return None
    if kind == ReduceOp.BXOR:
        return lambda tensor: tensor.zero_()
    if kind == ReduceOp.SUM:
        return lambda tensor: None if tensor.dtype == torch.bool else tensor.mul_(ranks)
    if kind == ReduceOp.PRODUCT:
        return lambda tensor: None if tensor.dtype == torch.bool else tensor.pow_(ranks)
    if kind == ReduceOp.PREMUL_SUM and hasattr(op, "factor"):
        factor = op.factor
        return lambda tensor: tensor.mul_(factor).mul_(ranks)
    raise NotYetError(
        f"reduction {kind} on an emulated fabric",
        expected="sum, avg, product, min, max, band, bor or bxor",
        remedy="scale before or after a sum instead",
    )


def _paired(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    if len(outputs) != len(inputs):
        raise MeshError(
            f"{len(outputs)} outputs for {len(inputs)} inputs", expected="as many", remedy="pass one for each"
        )
    return list(zip(outputs, inputs, strict=True))


def _parts(tensor: Tensor, ranks: int) -> Tensor:
    if not tensor.is_contiguous():
        raise MeshError(
            f"a tensor with strides {tuple(tensor.stride())}", expected="a contiguous one", remedy="call .contiguous()"
        )
    _check_divides(tensor.numel(), ranks)
    return tensor.data.view(ranks, -1) if tensor.numel() else tensor.data.view(ranks, 0)


def _check_size(found: int, expected: int, what: str, ranks: int) -> None:
    if found != expected:
        raise MeshError(
            f"{what} of {found} elements",
            expected=f"{expected} in a group of {ranks} ranks",
            remedy="size the tensors by the group's size",
        )


def _check_divides(size: int, ranks: int) -> None:
    if size % ranks:
        raise MeshError(
            f"a size of {size} in a group of {ranks} ranks",
            expected=f"a multiple of {ranks}",
            remedy="pad the tensor, or say the sizes of its parts",
        )


def _pour(target: Tensor, source: Tensor) -> None:
    if target.numel() == source.numel():
        target.copy_(source.view(target.shape))
    else:
        target.zero_()
        fits = min(target.numel(), source.numel())
        target.view(-1)[:fits].copy_(source[:fits])


def _each(function: Callable[[Any], Any], items: Sequence[Any]) -> None:
    for item in items:
        function(item)
