"""Sizes and heads that do not divide by the ranks: trained, clipped, saved and loaded as on one device."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import crossfade as cf
from tests.shard.tensor.uneven import APART, PLAN, WORDS, Decoder

STEPS, CLIP = 3, 0.5


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batches() -> list[tuple[Tensor, Tensor]]:
    ids = torch.randint(0, WORDS, (STEPS, 4, 7), generator=torch.Generator().manual_seed(1))
    return [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for tokens in ids]


def started(heads: int, keys: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Decoder(heads, keys)
    model.head.weight = model.words.weight  # tied
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def train(heads: int, keys: int, ranks: int, folder: str) -> dict[str, Any]:
    """Losses and norms beside one device's; how far the parameters are apart after training, and after loading."""
    model, optimizer = started(heads, keys)
    alone, alone_optimizer = copy.deepcopy(model), None
    alone_optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2, eps=1e-4)
    plan = {**PLAN, **APART, "head": "colwise"}
    step = cf.compile_step(
        model, loss_of, optimizer, {"tp": ranks}, tensor_parallel=plan, clip_grad_norm=CLIP, timeout=60
    )
    found, expected = [], []
    for inputs, labels in batches():
        found += [float(step(inputs, labels)), float(step.outputs["grad_norm"])]
        loss = loss_of(alone(inputs), labels)
        loss.backward()
        expected += [float(loss.detach()), float(clip_grad_norm_(alone.parameters(), CLIP))]
        alone_optimizer.step()
        alone_optimizer.zero_grad()
    wanted = dict(alone.named_parameters())
    parts = step.own_parts({name: whole.detach() for name, whole in wanted.items()})
    worst = max(float((part - model.get_parameter(name).detach()).abs().max()) for name, part in parts.items())
    padding = float(model.down.weight.detach()[:, -1].abs().max()) if dist.get_rank() == ranks - 1 else 0.0
    with step.gathered() as whole:
        shapes = {name: tuple(tensor.shape) == tuple(wanted[name].shape) for name, tensor in whole.named_parameters()}
        reread = max(
            float((tensor.detach() - wanted[name].detach()).abs().max()) for name, tensor in whole.named_parameters()
        )
    state = step.state_dict()
    dcp.save(state, checkpoint_id=folder)
    saved = {name: torch.empty_like(tensor) for name, tensor in alone.state_dict().items()}
    dcp.load({"model": saved}, checkpoint_id=folder, no_dist=True)
    on_disk = max(float((saved[name] - tensor.detach()).abs().max()) for name, tensor in wanted.items())
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    step(*batches()[0])
    dcp.load(state := step.state_dict(), checkpoint_id=folder)
    step.load_state_dict(state)
    back = all(torch.equal(before[name], parameter.detach()) for name, parameter in model.named_parameters())
    return {
        "found": found,
        "expected": expected,
        "worst": max(worst, reread, on_disk),
        "shapes": all(shapes.values()),
        "padding": padding,
        "back": back,
        "split": model.q.weight.shape[0] < alone.q.weight.shape[0],
    }


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("heads", "keys", "count"),
    [(9, 3, 2), pytest.param(9, 9, 2, marks=pytest.mark.models), pytest.param(4, 4, 3, marks=pytest.mark.models)],
)
def test_uneven_models_equal_one_device(ranks: Any, tmp_path: Path, heads: int, keys: int, count: int) -> None:
    for trained in ranks(count).run(train, heads, keys, count, str(tmp_path)):
        assert trained["found"] == pytest.approx(trained["expected"], rel=1e-5)
        assert trained["worst"] < 2e-6
        assert trained["shapes"] and trained["split"]
        assert trained["padding"] == 0.0, "no step touches what is padding"
        assert trained["back"]
