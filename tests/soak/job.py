"""What each rank of the soak runs: train, save now and then, go on from the last checkpoint; say where it is."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import crossfade as cf

MODES = ("replicate", "zero1", "zero2", "zero3", "tp", "dp x tp")
STEPS, SAVE_EVERY = 8, 2
PACE_SECONDS = 0.05


@dataclass(frozen=True)
class Job:
    """One training run on some ranks, and the folder in which it leaves everything."""

    mode: str
    folder: str
    timeout: float
    attempt: int = 0
    raises: str = ""
    """Where a rank raises an error of its own, as `RANK PLACE`, in the first attempt."""

    @property
    def ranks(self) -> int:
        """How many it needs."""
        return 4 if self.mode == "dp x tp" else 2

    def text(self) -> str:
        """As an argument of a command."""
        return json.dumps(asdict(self))


def model() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """With state that a checkpoint must have."""
    return torch.optim.Adam(parameters, lr=0.01)


def batch(number: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 4, generator=generator)


def train_eagerly() -> list[list[float]]:
    """What single-device training leaves in each parameter: the numbers that all modes are compared with."""
    net = model()
    stepper = optimizer(net.parameters())
    for number in range(STEPS):
        x, y = batch(number)
        stepper.zero_grad()
        F.mse_loss(net(x), y).backward()
        stepper.step()
    return [parameter.detach().flatten().tolist() for parameter in net.parameters()]


def train(job: Job) -> None:
    """The life of one rank; how it ended is written beside where it went."""
    rank = int(os.environ["RANK"])
    attempt = job.attempt + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    trail = Trail(Path(job.folder, f"trail.{attempt}.{rank}"), f"{rank} " if job.raises and not attempt else "", job)
    trail.at(f"pid {os.getpid()}")
    ended: dict[str, Any] = {"kind": "done"}
    try:
        ended["parameters"] = _trained(job, trail)
    except BaseException as error:
        ended = {"kind": type(error).__name__, "text": str(error), "ours": isinstance(error, cf.CrossfadeError)}
        raise
    finally:
        Path(job.folder, f"end.{attempt}.{rank}.part").write_text(json.dumps({**ended, "time": time.time()}))
        os.rename(Path(job.folder, f"end.{attempt}.{rank}.part"), Path(job.folder, f"end.{attempt}.{rank}"))


@dataclass(frozen=True)
class Trail:
    """Where a rank has been, in a file that the soak reads to choose its moment."""

    path: Path
    who: str
    job: Job

    def at(self, place: str) -> None:
        """Be there now; raise if that is what this run is about."""
        with self.path.open("a") as file:
            file.write(place + "\n")
        if self.who and self.who + place == self.job.raises:
            Path(self.job.folder, "event").write_text(str(time.time()))
            raise ValueError(f"raised on purpose at {place}")


def _trained(job: Job, trail: Trail) -> list[list[float]]:
    dist.init_process_group("gloo")
    trail.at("open")
    net = model()
    step = cf.compile_step(net, F.mse_loss, optimizer(net.parameters()), timeout=job.timeout, **_options(job.mode))
    trail.at("capture")
    step.prepare(*batch(0))
    checkpoint = Path(job.folder, "checkpoint")
    if checkpoint.exists() or checkpoint.with_name("checkpoint.old").exists():
        trail.at("load")
        step.load(checkpoint)
    for number in range(step.steps, STEPS):
        trail.at(f"step {number}")
        time.sleep(PACE_SECONDS)
        step(*batch(number))
        if (number + 1) % SAVE_EVERY == 0:
            trail.at(f"save {number + 1}")
            step.save(checkpoint)
    trail.at("gather")
    with step.gathered() as whole:
        return [parameter.detach().flatten().tolist() for parameter in whole.parameters()]


def _options(mode: str) -> dict[str, Any]:
    plan = {"0": "colwise", "2": "rowwise"}
    if mode == "tp":
        return {"mesh": {"tp": 2}, "tensor_parallel": plan}
    if mode == "dp x tp":
        return {"mesh": {"dp": 2, "tp": 2}, "tensor_parallel": plan}
    return {"mesh": {"dp": 2}, "data_parallel": mode}


if __name__ == "__main__":
    train(Job(**json.loads(sys.argv[1])))
