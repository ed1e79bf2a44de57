"""Adam's update of one parameter in one walk through memory: an operator that graphs hold, `crossfade.adam_`."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

ADAM = "crossfade::adam_"

_LATE = 1e30
"""A step so late that beta to its power is nothing: who calls has corrected for early steps already."""


def adam_(
    parameter: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    beta1: float,
    beta2: float,
    correction: float,
    eps: float,
    size: float,
) -> None:
    """Update the two moments and the parameter in place, all contiguous, of one shape and dtype, on the CPU.

    The parameter changes by `size * mean / (sqrt(square) / correction + eps)`. The kernel of torch corrects for the
    first steps by itself: it is given a late one, with the correction in its learning rate and epsilon.

    >>> parameter, mean, square = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    >>> adam_(parameter, torch.tensor([4.0]), mean, square, 0.5, 0.75, 0.5, 0.0, -0.25)
    >>> parameter, mean, square
    (tensor([-0.1250]), tensor([2.]), tensor([4.]))
    """
    torch.ops.aten._fused_adamw_.default(
        [parameter],
        [gradient],
        [mean],
        [square],
        [],
        [_late(parameter.dtype)],
        lr=-size * correction,
        beta1=beta1,
        beta2=beta2,
        weight_decay=0.0,
        eps=eps * correction,
        amsgrad=False,
        maximize=False,
    )


@functools.cache
def _late(dtype: torch.dtype) -> Tensor:
    return torch.full((), _LATE, dtype=dtype)


def _without_data(*_: object) -> None:
    """Nothing is made."""


torch.library.define(
    ADAM,
    "(Tensor(a!) parameter, Tensor gradient, Tensor(b!) mean, Tensor(c!) square, Scalar beta1, Scalar beta2,"
    " Scalar correction, Scalar eps, Scalar size) -> ()",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.impl(ADAM, "cpu", adam_)
torch.library.register_fake(ADAM, _without_data)

OPERATOR = torch.ops.crossfade.adam_.default
"""What a graph calls."""
