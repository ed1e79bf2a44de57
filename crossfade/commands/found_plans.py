"""What `crossfade plan` does with a model: find the plan of its training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from crossfade.commands.whatif import machine_of
from crossfade.errors import BatchError, OptimizerError
from crossfade.forecast.sources import source_of
from crossfade.search.find_plan import find_plan
from crossfade.search.plan_found import FoundPlan
from crossfade.shard.tensor.plan import Plan

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
}


@dataclass(frozen=True)
class Asked:
    """What is to be found, as the command line has it."""

    model: str
    ranks: int
    batch: str = ""
    machine: str = "h100-cluster"
    memory: str = ""
    optimizer: str = "adamw"
    plan: Path | None = None
    accumulate: str = ""
    in_full: bool = False


def _numbers(text: str) -> tuple[int, ...] | None:
    words = text.split(",") if text else []
    if not all(word.strip().isdigit() for word in words):
        raise BatchError(f"--accumulate {text}", expected="numbers of micro-batches", remedy="write it so: 1,2,4")
    return tuple(map(int, words)) or None


def find(asked: Asked) -> FoundPlan:
    """Find what was asked for."""
    if asked.optimizer not in OPTIMIZERS:
        raise OptimizerError(
            f"--optimizer {asked.optimizer}",
            expected=f"one of {', '.join(OPTIMIZERS)}",
            remedy="take one of them, or call crossfade.find_plan with your own",
        )
    source = source_of(asked.model, asked.batch or f"{asked.ranks}x2048")
    return find_plan(
        source.model,
        source.loss_fn,
        OPTIMIZERS[asked.optimizer](source.model),
        source.batch,
        ranks=asked.ranks,
        machine=machine_of(asked.machine),
        memory=asked.memory or None,
        tensor_parallel=Plan.load(asked.plan) if asked.plan is not None else None,
        accumulate=_numbers(asked.accumulate),
        in_full=asked.in_full,
    )
