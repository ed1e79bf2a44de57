"""Gradients of earlier micro-batches, which wait on each rank, added to those of this one before all are exchanged."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from crossfade.graph.passes import Numerics, Pass, PassResult
from crossfade.graph.program import Input, InputKind, OutputKind, Program
from crossfade.graph.splice import after, splice

SCALE = ":scale"
"""The name of the number that earlier gradients are multiplied by: what they belong to may have been scaled."""


def earlier_name(parameter: str) -> str:
    """The name of the input with a parameter's earlier gradient.

    >>> earlier_name("0.weight")
    '0.weight:earlier'
    """
    return f"{parameter}:earlier"


@dataclass(frozen=True)
class AddEarlierGradients(Pass):
    """Add to each gradient what this rank has kept of earlier micro-batches, times one number for all of them.

    What was added up on each rank is then exchanged once, by the last micro-batch.

    Also known as: the first backward after `no_sync()` of torch's DDP.

    Before:
        x: f32[4] = input("x")
        neg: f32[4] = aten.neg(x)
        return gradient("w", neg)

    After:
        x: f32[4] = input("x")
        scale: f32[] = earlier(":scale")
        w_earlier: f32[4] = earlier("w:earlier")
        neg: f32[4] = aten.neg(x)
        mul: f32[4] = aten.mul.Tensor(w_earlier, scale)
        add: f32[4] = aten.add.Tensor(neg, mul)
        return gradient("w", add)
    """

    name = "add-earlier-gradients"
    numerics = Numerics.REASSOCIATES

    def run(self, program: Program) -> PassResult:
        """Give every gradient an input that is added to it."""
        gradients = [(out.name, value) for out, value in program.named_results() if out.kind is OutputKind.GRADIENT]
        if not gradients:
            return PassResult(False, {"added": 0})
        with program.fake_mode:
            kept = [(earlier_name(name), torch.empty_like(value.meta["val"])) for name, value in gradients]
            scale = torch.empty((), device=kept[0][1].device)
        added = program.add_inputs([(Input(InputKind.EARLIER, name), value) for name, value in [(SCALE, scale), *kept]])
        sums = [
            splice(program, _sum, value, earlier, added[0], before=after(program, value), like=value)
            for (_, value), earlier in zip(gradients, added[1:], strict=True)
        ]
        summed = iter(sums)
        program.set_results(
            [next(summed) if out.kind is OutputKind.GRADIENT else value for out, value in program.named_results()]
        )
        return PassResult(True, {"added": len(sums)})


def _sum(gradient: Tensor, earlier: Tensor, scale: Tensor) -> Tensor:
    return gradient + earlier * scale
