"""Captured programs draw and lay out what eager torch does: bit by bit, for values of any layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from crossfade.capture.as_laid_out import AsLaidOut
from crossfade.graph.private import dispatch_functionalize

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "transposed": lambda x: x.transpose(1, 2),
    "samples inside": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "permuted": lambda x: x.permute(3, 1, 0, 2),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "sliced": lambda x: x[:, :, ::2].transpose(1, 3),
    "one channel": lambda x: x[:, :1].contiguous(memory_format=torch.channels_last),
}
OPERATORS: dict[str, Callable[[Tensor], Any]] = {
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.5),
    "bernoulli_ of a view": lambda x: torch.zeros_like(x)[1:].bernoulli_(0.5),
    "bernoulli": lambda x: torch.bernoulli(x, 0.5),
    "dropout": lambda x: F.dropout(x, 0.5),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "batch norm, running": lambda x: F.batch_norm(x, torch.zeros(x.shape[1]), torch.ones(x.shape[1]), training=True),
    "channel shuffle": lambda x: F.channel_shuffle(x, 1 if x.shape[1] % 2 else 2),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_captured_is_eager(operator: str, layout: str):
    def function(x: Tensor) -> list[Tensor]:
        return [OPERATORS[operator](LAYOUTS[layout](x))]

    def captured(x: Tensor) -> list[Tensor]:
        with AsLaidOut():
            return function(x)

    x = torch.randn(4, 6, 4, 6, generator=torch.Generator().manual_seed(3))
    graph = make_fx(dispatch_functionalize(captured), tracing_mode="fake")(x)
    torch.manual_seed(0)
    (expected,) = function(x)
    torch.manual_seed(0)
    (found,) = graph(x)
    assert torch.equal(found, expected)
    if expected.shape[1] > 1 and operator != "bernoulli":  # whose fake strides are wrong; nothing of ours reads them
        assert found.stride() == expected.stride()
        described = next(iter(graph.graph.find_nodes(op="output"))).args[0][0].meta["val"]
        assert described.stride() == expected.stride()
