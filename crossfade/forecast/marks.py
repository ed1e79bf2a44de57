"""Marks in a graph where a layer begins and ends, in the forward and in the backward; they are gone after capture."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crossfade.shard.tensor.rules import register_rule

MARK = "crossfade::layer_mark"
BEGINS, ENDS = "begins", "ends"

torch.library.define(MARK, "(Tensor x, str edge, int layer, bool backward) -> Tensor")


def _copied(x: Tensor, edge: str, layer: int, backward: bool) -> Tensor:
    return x.clone()


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.place = inputs[1:3]


def _marked_backward(context: Any, gradient: Tensor) -> tuple[Any, ...]:
    edge, layer = context.place
    return torch.ops.crossfade.layer_mark(gradient, edge, layer, True), None, None, None


torch.library.impl(MARK, "CompositeExplicitAutograd", _copied)
torch.library.register_fake(MARK, lambda x, edge, layer, backward: torch.empty_like(x))
torch.library.register_autograd(MARK, _marked_backward, setup_context=_remember)
register_rule(MARK, "... -> ...")

OPERATOR = torch.ops.crossfade.layer_mark.default
"""What a graph holds while it is captured."""


def mark(value: Tensor, edge: str, layer: int) -> Tensor:
    """The value, with a mark behind it: its gradient is marked too, where there is one.

    >>> mark(torch.ones(2), BEGINS, 0)
    tensor([1., 1.])
    """
    return torch.ops.crossfade.layer_mark(value, edge, layer, False)
