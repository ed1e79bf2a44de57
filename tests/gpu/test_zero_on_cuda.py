"""Parameters in parts on a CUDA device: refused over gloo; on an emulated fabric, less memory than whole ones."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
from torch import nn

import crossfade as cf
from crossfade import emulated
from crossfade.cost.presets import preset
from crossfade.errors import NotYetError
from tests.ranks.cases import train_crossfade_on_ranks

pytestmark = pytest.mark.gpu


@pytest.mark.ranks
def test_gloo_is_refused(ranks: Any) -> None:
    with pytest.raises(NotYetError, match="on CUDA over gloo"):
        ranks(2).run(train_crossfade_on_ranks, "mlp", 2, {"device": "cuda", "data_parallel": "zero3"})


def peak_of(mode: str, limit: int | None) -> tuple[float, int]:
    """The last loss, and the most bytes that a later step held, for rank 0 of 8."""
    with emulated.world(preset("h200-nvlink-node"), 8):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16))).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        options = {"data_parallel": mode, "machine": "h200-nvlink-node", "memory_limit": limit}
        step = cf.compile_step(model, nn.functional.mse_loss, optimizer, {"dp": 8}, **options)
        inputs, targets = torch.randn(64, 1024, device="cuda"), torch.randn(64, 1024, device="cuda")
        step(inputs, targets)
        torch.cuda.reset_peak_memory_stats()
        loss = float(step(inputs, targets))
        return loss, torch.cuda.max_memory_allocated()


def test_parts_take_less_memory_than_the_whole() -> None:
    """Of 67 MB of parameters with twice that in state: zero1 keeps an eighth of the state, zero3 of everything; on so
    fast a link it gathers all at once if memory does not limit it."""
    found = {}
    for mode, limit in {"replicate": None, "zero1": None, "zero2": None, "zero3": 40 * 2**20}.items():
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            loss, found[mode] = pool.apply_async(peak_of, (mode, limit)).get(timeout=200)
        assert 0 < loss < 100
    assert found["replicate"] > found["zero1"] > found["zero3"]
    assert found["zero2"] > found["zero3"]
