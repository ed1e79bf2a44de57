"""A program on several micro-batches: buffers go from one to the next, gradients are averaged or summed."""

from __future__ import annotations

import pytest
import torch

from crossfade.capture.accumulate import accumulate
from crossfade.graph.text import parse

TEXT = """
    w: f32[2] = parameter("w")
    seen: f32[2] = buffer("seen")
    x: f32[3, 2] = input("x")
    scale: f32[] = input("scale")
    total: f32[2] = aten.sum.dim_IntList(x, [0])
    more: f32[2] = aten.add.Tensor(seen, total)
    gradient: f32[2] = aten.mul.Tensor(more, scale)
    return gradient("w", gradient), update("seen", more)
"""


@pytest.mark.parametrize(("mean", "factor"), [(True, 0.5), (False, 1.0)])
def test_buffers_are_carried_and_gradients_joined(mean: bool, factor: float) -> None:
    program = accumulate(parse(TEXT), 2, mean=mean)
    assert [str(node.meta["val"].shape) for node in program.placeholders][2:] == [
        "torch.Size([6, 2])",
        "torch.Size([])",
    ]
    x, seen = torch.arange(12.0).reshape(6, 2), torch.ones(2)
    gradient, after = program.module()(torch.zeros(2), seen, x, torch.tensor(2.0))
    first, second = seen + x[:3].sum(0), seen + x.sum(0)
    assert torch.equal(after, second)
    assert torch.equal(gradient, 2 * (first + second) * factor)


def test_one_micro_batch_is_the_program_itself() -> None:
    program = parse(TEXT)
    assert accumulate(program, 1) is program
