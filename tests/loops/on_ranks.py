"""Loops with people's habits, as each of two ranks runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import crossfade as cf
from tests.loops.plain import adamw, batches, network


def smoothed(output: Tensor, target: Tensor, *, alpha: float = 0.0, weight: Tensor) -> Tensor:
    return ((output - (1 - alpha) * target).square() * weight[:, None]).mean()


def weights() -> Tensor:
    return torch.linspace(0.5, 2.0, 8)


def mine(value: Tensor) -> Tensor:
    return value.chunk(dist.get_world_size())[dist.get_rank()]


def losses_with_names(batch: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of a loop that passes a tensor and a number by name."""
    model = network()
    step = cf.compile_step(model, smoothed, adamw(model), {"dp": 2}, batch=batch)  # type: ignore[arg-type]
    part = mine if batch == "local" else lambda value: value
    losses = [step(part(x), part(y), alpha=0.3, weight=part(weights())).item() for x, y in batches()]
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def losses_after_habits(mode: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of a loop that still zeroes gradients, steps its optimizer and a scheduler."""
    model = network()
    optimizer = adamw(model)
    step = cf.compile_step(model, F.mse_loss, optimizer, {"dp": 2}, data_parallel=mode)  # type: ignore[arg-type]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        losses.append(step(x, y).item())
        optimizer.step()
        scheduler.step()
    with step.gathered() as whole:
        return losses, {name: value.detach().clone() for name, value in whole.state_dict().items()}


def averaged_in_parts() -> dict[str, Tensor]:
    """A moving average of a model in parts, of whole weights."""
    model = network()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    step = cf.compile_step(model, F.mse_loss, adamw(model), {"dp": 2}, data_parallel="zero2")
    for x, y in batches():
        step(x, y)
        with step.gathered() as whole:
            average.update_parameters(whole)
    return dict(average.module.state_dict())


def saved_whole(folder: str) -> dict[str, Any]:
    """What `torch.save` writes of a model in parts, gathered first; every rank reads it again."""
    model = network()
    step = cf.compile_step(model, F.mse_loss, adamw(model), {"dp": 2}, data_parallel="zero3")
    for x, y in batches():
        step(x, y)
    with step.gathered() as whole:
        if dist.get_rank() == 0:
            torch.save(whole.state_dict(), Path(folder) / "model.pt")
    dist.barrier()
    return torch.load(Path(folder) / "model.pt")


def kinds_of_saved_parts() -> str:
    """What stands in the state of a model in parts outside of `gathered`."""
    model = network()
    step = cf.compile_step(model, F.mse_loss, adamw(model), {"dp": 2}, data_parallel="zero3")
    step(*batches(1)[0])
    return type(model.state_dict()["0.weight"]).__name__
