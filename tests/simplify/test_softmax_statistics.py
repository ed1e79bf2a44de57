"""The maximum and the sum of exponentials in one reading: as torch's two readings have them, in any blocks."""

from __future__ import annotations

import math

import pytest
import torch

from crossfade.errors import RewriteError
from crossfade.simplify import softmax_statistics as module
from crossfade.simplify.softmax_statistics import softmax_statistics


def plainly(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    most = x.amax(dim, keepdim=True)
    return most, (x - most).exp().sum(dim, keepdim=True)


@pytest.mark.parametrize("block", [1, 3, 7, 100])
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_of_any_size(monkeypatch: pytest.MonkeyPatch, block: int, dim: int, dtype: torch.dtype):
    monkeypatch.setattr(module, "_BLOCK", block)
    x = 20 * torch.randn(7, 5, 9, dtype=dtype, generator=torch.Generator().manual_seed(block))
    for found, expected in zip(softmax_statistics(x, dim), plainly(x, dim), strict=True):
        torch.testing.assert_close(found, expected)
        assert found.is_contiguous()


@pytest.mark.parametrize("block", [1, 2, 100])
@pytest.mark.parametrize(
    "row",
    [
        [-math.inf, -math.inf, 1.0, 2.0],
        [1.0, 2.0, -math.inf, -math.inf],
        [-math.inf] * 4,
        [math.inf, 0.0, 1.0, 2.0],
        [0.0, math.nan, 1.0, 2.0],
    ],
)
def test_infinities_and_nans(monkeypatch: pytest.MonkeyPatch, block: int, row: list[float]):
    monkeypatch.setattr(module, "_BLOCK", block)
    x = torch.tensor([row])
    for found, expected in zip(softmax_statistics(x, 1), plainly(x, 1), strict=True):
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_descriptions_have_the_shapes():
    assert [value.shape for value in softmax_statistics(torch.empty(2, 3, 4, device="meta"), 1)] == [(2, 1, 4)] * 2


@pytest.mark.parametrize(("x", "dim"), [(torch.ones(2, dtype=torch.int64), 0), (torch.ones(2), 1), (torch.ones(()), 0)])
def test_others_are_refused(x: torch.Tensor, dim: int):
    with pytest.raises(RewriteError, match=f"of a tensor of {x.dtype} with {x.dim()} dims along dim {dim}"):
        softmax_statistics(x, dim)
