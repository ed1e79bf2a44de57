"""Gradients scaled down to a total norm."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from crossfade.graph import collectives


def clipped_norm(
    parameters: Mapping[str, Tensor], limit: float | None, split_over: Mapping[str, tuple[str, ...]]
) -> list[Tensor]:
    """The norm of all gradients, which are scaled down to the limit in place; nothing without a limit.

    `split_over` has the parameters of which a rank has parts, each with the groups whose ranks have the others: a part
    along one group may be split again along the next.

    >>> weight = torch.zeros(2, requires_grad=True)
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> clipped_norm({"weight": weight}, 1.0, {}), weight.grad
    ([tensor(5.)], tensor([0.6000, 0.8000]))
    """
    if limit is None:
        return []
    if not split_over:
        return [torch.nn.utils.clip_grad_norm_(list(parameters.values()), limit, foreach=False)]
    gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    kind = functools.reduce(torch.promote_types, (gradient.dtype.to_real() for gradient in gradients.values()))
    norm = _norm_of_all(gradients, split_over, torch.promote_types(kind, torch.float32))
    scale = torch.clamp(limit / (norm + 1e-6), max=1.0)  # as torch.nn.utils.clip_grad_norm_ does
    for gradient in gradients.values():
        gradient.mul_(scale)
    return [norm.to(kind)]


def _norm_of_all(
    gradients: Mapping[str, Tensor], split_over: Mapping[str, tuple[str, ...]], wide: torch.dtype
) -> Tensor:
    """The norm of gradients of which each rank of some groups has a part, or all where they are not split.

    Squares are summed in float32 at least: those of half precision overflow at a norm of 256. Sums travel along one
    group after the other, each number once: what is alike along a group joins after it.
    """
    total = next(iter(gradients.values())).new_zeros((), dtype=wide)
    sums: dict[tuple[str, ...], Tensor] = {}
    for groups in dict.fromkeys(split_over.values()):
        own = [gradient for name, gradient in gradients.items() if split_over.get(name) == groups]
        if own:
            sums[groups] = torch.stack([_square_of_norm(gradient, wide) for gradient in own]).sum()
    while sums:
        groups = max(sums, key=len)
        reduced = collectives.wait(collectives.all_reduce(sums.pop(groups), "sum", groups[0]))
        if rest := groups[1:]:
            sums[rest] = sums[rest] + reduced if rest in sums else reduced
        else:
            total = total + reduced
    for name, gradient in gradients.items():
        if name not in split_over:
            total = total + _square_of_norm(gradient, wide)
    return total.sqrt()


def _square_of_norm(gradient: Tensor, wide: torch.dtype) -> Tensor:
    """The sum of squares, of complex numbers of their absolute values, in a dtype that holds that of all gradients."""
    own = torch.promote_types(gradient.dtype, torch.float32)
    return torch.linalg.vector_norm(gradient, dtype=own).to(wide).square()
