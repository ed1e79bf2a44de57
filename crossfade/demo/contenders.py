"""Ways to train the same model on the same batches, to be timed side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from crossfade.compile.step import Step
from crossfade.compile.training import compile_step
from crossfade.demo.model import Size, batches, build, next_token_loss

TrainStep = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Contender:
    """One way to train: a step on the whole batch, and whether it runs on the first rank alone."""

    name: str
    step: TrainStep
    first_rank_only: bool = False
    compiled: Step | None = None
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Measured:
    """What one contender did: its losses, and the seconds of each timed step on the slowest rank."""

    name: str
    losses: tuple[float, ...]
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.seconds)


def single_process(size: Size) -> Contender:
    """Plain eager torch: one process computes the whole batch."""
    model = build(size)
    return Contender("one process, eager", eager_step(model, model), first_rank_only=True)


def compute_alone(size: Size) -> Contender:
    """Plain eager torch on each rank's part of the batch, nothing exchanged: all communication hidden."""
    model = build(size)
    return Contender("compute alone (no exchange)", on_own_part(eager_step(model, model)))


def ddp(size: Size, bucket_mb: float | None = None) -> Contender:
    """Torch's DistributedDataParallel."""
    model = build(size)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
    name = "torch DDP, default buckets" if bucket_mb is None else f"torch DDP, {bucket_mb:g} MB buckets"
    return Contender(name, on_own_part(eager_step(wrapped, model)))


def crossfade(size: Size, name: str = "Crossfade", **options: Any) -> Contender:
    """The whole step as one graph, with any options of `compile_step`."""
    model = build(size)
    step = compile_step(model, next_token_loss, _optimizer(model), {"dp": dist.get_world_size()}, **options)
    return Contender(name, step, compiled=step)


def race(
    contenders: Sequence[Contender],
    size: Size,
    *,
    steps: int,
    warm_up: int = 3,
    progress: Callable[[], None] = lambda: None,
) -> list[Measured]:
    """Train all contenders on the same batches, one step of each in turn, so that a busy machine is fair to all."""
    for number, (tokens, targets) in enumerate(batches(size, dist.get_world_size(), warm_up + steps)):
        for contender in contenders:
            loss, seconds = _timed(contender, tokens, targets)
            contender.losses.append(loss)
            if number >= warm_up:
                contender.seconds.append(seconds)
            progress()
    return [Measured(contender.name, tuple(contender.losses), tuple(contender.seconds)) for contender in contenders]


def _timed(contender: Contender, tokens: Tensor, targets: Tensor) -> tuple[float, float]:
    takes_part = not contender.first_rank_only or dist.get_rank() == 0
    dist.barrier()
    start = time.perf_counter()
    loss = float(contender.step(tokens, targets)) if takes_part else 0.0
    seconds = time.perf_counter() - start
    ranks = 1 if contender.first_rank_only else dist.get_world_size()
    return _over_ranks(loss, dist.ReduceOp.SUM) / ranks, _over_ranks(seconds, dist.ReduceOp.MAX)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def eager_step(
    forward: Callable[[Tensor], Tensor], model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> TrainStep:
    """A step of plain eager torch: forward, backward, optimizer."""
    optimizer = optimizer or _optimizer(model)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = next_token_loss(forward(tokens), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def on_own_part(step: TrainStep) -> TrainStep:
    """A step that each rank takes on its part of the batch."""

    def own_part(*batch: Tensor) -> Tensor:
        return step(*(part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch))

    return own_part


def _over_ranks(value: float, how: Any) -> float:
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, how)
    return float(tensor)
