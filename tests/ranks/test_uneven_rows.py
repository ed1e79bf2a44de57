"""Rows of padded parts: ZeRO beside tensor parallelism where sizes do not divide, trained, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.nn.utils import clip_grad_norm_

import crossfade as cf
from tests.ranks.test_uneven_tensor_parallel import CLIP, batches, loss_of, started
from tests.shard.tensor.uneven import APART, PLAN

HEADS, KEYS = 9, 9
MESH = {"dp": 2, "tp": 2}


def train(mode: str, folder: str) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor], bool]:
    """Losses and norms, parameters put together, what a checkpoint holds, and whether it is taken back."""
    model, optimizer = started(HEADS, KEYS)
    plan = {**PLAN, **APART, "head": "colwise"}
    step = cf.compile_step(
        model, loss_of, optimizer, MESH, data_parallel=mode, tensor_parallel=plan, clip_grad_norm=CLIP, timeout=60
    )
    found: list[float] = []
    for inputs, labels in batches():
        found += [float(step(inputs, labels)), float(step.outputs["grad_norm"])]
    with step.gathered() as whole:
        trained = {name: p.detach().clone() for name, p in whole.named_parameters()}
    step.save(folder)
    step(*batches()[0])
    step.load(folder)
    with step.gathered() as whole:
        back = all(torch.equal(trained[name], p.detach()) for name, p in whole.named_parameters())
    saved = {name: torch.empty_like(value) for name, value in started(HEADS, KEYS)[0].state_dict().items()}
    dcp.load({"model": saved}, checkpoint_id=folder, no_dist=True)
    return found, trained, saved, back


@pytest.mark.ranks
@pytest.mark.parametrize(
    "mode", ["zero2", *(pytest.param(mode, marks=pytest.mark.models) for mode in ("zero1", "zero3"))]
)
def test_training_and_checkpoints_equal_one_device(ranks: Any, tmp_path: Path, mode: str) -> None:
    model, optimizer = started(HEADS, KEYS)
    expected: list[float] = []
    for inputs, labels in batches():
        loss = loss_of(model(inputs), labels)
        loss.backward()
        expected += [float(loss.detach()), float(clip_grad_norm_(model.parameters(), CLIP))]
        optimizer.step()
        optimizer.zero_grad()
    wanted = {name: p.detach() for name, p in model.named_parameters()}
    for found, trained, saved, back in ranks(4).run(train, mode, str(tmp_path / "checkpoint")):
        assert found == pytest.approx(expected, rel=1e-4)
        torch.testing.assert_close(trained, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close({name: saved[name] for name in wanted}, wanted, rtol=1e-4, atol=1e-5)
        assert back
