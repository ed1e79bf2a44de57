"""Steps that are really run, beside what `crossfade.simulate` forecasts on a machine calibrated in the same run.

    python -m benchmarks.forecast_steps                        # two gloo ranks on loopback, one core each
    python -m benchmarks.forecast_steps --network 1gbit        # two hosts in network namespaces, as root
    python -m benchmarks.forecast_steps --device cuda --network emulated:8:h200-nvlink-node   # rank 0 of 8 on one GPU

Each model is trained in eager torch by AdamW (`fused=True`): alone, which exchanges nothing, and by torch's DDP, by
gradients reduced in one piece after the backward, and by FSDP2. Nothing is fitted to these steps. `crossfade calibrate`
measures the machine; what it does not measure, the host's seconds for an operator of a whole training step, is that of
a tiny model which does nothing else. Ways take turns; medians, of the slowest rank. On a GPU memory is compared too.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks import two_ranks
from benchmarks.figures import save
from benchmarks.two_ranks import slowest
from crossfade import emulated
from crossfade.cost.calibrate import calibrate
from crossfade.cost.machine import Launching, Machine
from crossfade.cost.presets import preset
from crossfade.demo.model import GPT, Size, next_token_loss
from crossfade.forecast.forecast import GIB, Forecast
from crossfade.forecast.simulate import simulate

WAYS = ("alone", "ddp", "megatron", "fsdp")
WARM_UP = 3
_TINY = Size(width=32, heads=2, layers=4, vocabulary=64, length=8, batch=1)


class Residual(nn.Module):
    """Two convolutions around which what they are given goes too."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(x)))


class Convolutions(nn.Module):
    """Residual convolutions over images, and classes."""

    def __init__(self, channels: int, layers: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(Residual(channels) for _ in range(layers))
        self.head = nn.Linear(channels, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Perceptron(nn.Module):
    """Equal layers over rows."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@dataclass(frozen=True)
class Case:
    """A model, its loss and one rank's batch."""

    build: Callable[[], Any]
    loss: Callable[..., Tensor]
    batch: Callable[[], tuple[Tensor, Tensor]]


def _tokens(size: Size) -> tuple[Tensor, Tensor]:
    return tuple(torch.randint(0, size.vocabulary, (size.batch, size.length)) for _ in range(2))  # type: ignore[return-value]


def _gpt(size: Size) -> Case:
    return Case(lambda: GPT(size), next_token_loss, lambda: _tokens(size))


def _rows(rows: int, width: int, layers: int) -> Case:
    return Case(lambda: Perceptron(width, layers), F.mse_loss,
                lambda: (torch.randn(rows, width), torch.randn(rows, width)))  # fmt: skip


def _images(images: int, pixels: int, channels: int, layers: int) -> Case:
    return Case(lambda: Convolutions(channels, layers), F.cross_entropy,
                lambda: (torch.randn(images, 3, pixels, pixels), torch.randint(0, 1000, (images,))))  # fmt: skip


CASES = {
    "cpu": {
        "gpt": _gpt(Size(width=512, heads=8, layers=6, vocabulary=8192, length=256, batch=2)),
        "perceptron": _rows(512, 1024, 8),
        "convolutions": _images(8, 64, 64, 4),
    },
    "cuda": {
        "gpt": _gpt(Size(width=2048, heads=16, layers=12, vocabulary=32_768, length=2048, batch=4)),
        "perceptron": _rows(16_384, 4096, 16),
        "convolutions": _images(64, 224, 256, 8),
    },
}
"""Chosen before any was forecast."""


CALIBRATION_SECONDS = 30.0
"""Three times the default: on slow links and noisy machines ten seconds leave few repetitions of each size."""


def main() -> None:
    """Parse the command line, run on the ranks and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=CASES, default="cpu")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--only", default="", help="models and ways whose names have this in them")
    two_ranks.add_options(parser)
    options = parser.parse_args()
    given = {name: getattr(options, name) for name in ("device", "steps", "only", "network")}
    if options.network.startswith("emulated:"):
        _, ranks, machine = options.network.split(":")
        with emulated.world(preset(machine), int(ranks)):
            finish(work(**given), options)
    elif options.device == "cuda":
        raise SystemExit("found --device cuda with real ranks. Remedy: --network emulated:8:h200-nvlink-node, say.")
    else:
        two_ranks.run("benchmarks.forecast_steps", work, given, finish, options)


def work(device: str, steps: int, only: str, network: str) -> dict[str, Any]:
    """What each rank does for each model: calibrate, since machines change within minutes; measure, and forecast."""
    torch.manual_seed(0)
    rows, machines = [], {}
    for name, case in CASES[device].items():
        ways = [way for way in WAYS if only in f"{name} {way}"]
        if ways:
            machine = calibrate("calibrated", {"dp": dist.group.WORLD}, device=device, seconds=CALIBRATION_SECONDS)
            machine = _with_host(machine, device, steps)
            machines[name] = machine.to_json()
            rows += list(_case(name, case, ways, machine, steps))
    return {"rows": rows, "machines": machines, "ranks": dist.get_world_size()}


def _with_host(machine: Machine, device: str, steps: int) -> Machine:
    """The machine with what a host takes for each operator of a step in eager torch, as a tiny model shows."""
    case = _gpt(_TINY)
    run, _ = _stepping(case, "alone", device)
    measured = statistics.median(_timed(run, device) for _ in range(WARM_UP + 4 * steps))
    free = dataclasses.replace(machine, overhead=0.0, launching=Launching())
    counted = dataclasses.replace(machine, overhead=0.0, launching=Launching(1.0))
    alone = {"dp": 1}
    others, launches = (_forecast(case, "alone", alone, each, device).seconds for each in (free, counted))
    seconds = max(0.0, measured - others) / launches
    if device == "cpu":
        return dataclasses.replace(machine, overhead=seconds)
    return dataclasses.replace(machine, launching=Launching(seconds))


def _case(name: str, case: Case, ways: list[str], machine: Machine, steps: int) -> Iterator[dict[str, Any]]:
    device, ranks = machine.device, dist.get_world_size()
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    reserved = {way: _most_reserved(case, way) for way in ways} if device == "cuda" else {}
    runs = {}
    for way in ways:
        runs[way], _ = _stepping(case, way, device)
        for _ in range(WARM_UP):
            _timed(runs[way], device)
    for _ in range(steps):
        for way in ways:
            seconds[way].append(_timed(runs[way], device))
    for way in ways:
        found = _forecast(case, way, {"dp": 1 if way == "alone" else ranks}, machine, device)
        yield {
            "model": name, "way": way, "forecast_s": found.seconds, "measured_s": statistics.median(seconds[way]),
            "spent": dict(found.spent),
            **({"forecast_gib": found.memory.bytes / GIB, "measured_gib": reserved[way] / GIB} if reserved else {}),
        }  # fmt: skip


def _forecast(case: Case, way: str, mesh: dict[str, int], machine: Machine, device: str) -> Forecast:
    with torch.device("meta"):
        model = case.build()
    model = model.to(_dtype(device))
    return simulate(model, _moved(case.batch(), "meta", device), mesh=mesh, machine=machine, loss_fn=case.loss,
                    way="ddp" if way == "alone" else way, master=False)  # fmt: skip


def _stepping(case: Case, way: str, device: str) -> tuple[Callable[[], Any], nn.Module]:
    """A whole step of one way, and its model."""
    model = case.build().to(device, _dtype(device))
    batch = _moved(case.batch(), device, device)
    called: Any = model
    if way == "ddp":
        called = DistributedDataParallel(model)
    if way == "fsdp":
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        case.loss(called(batch[0]), batch[1]).backward()
        if way == "megatron":
            flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            at = 0
            for parameter in model.parameters():
                parameter.grad.copy_(flat[at : at + parameter.numel()].view_as(parameter))
                at += parameter.numel()
        optimizer.step()

    return step, model


def _dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def _moved(batch: tuple[Tensor, Tensor], to: str, device: str) -> tuple[Tensor, Tensor]:
    """A batch on a device, its numbers in the precision that models of a device have."""
    first, second = (part.to(to, _dtype(device)) if part.is_floating_point() else part.to(to) for part in batch)
    return first, second


def _timed(run: Callable[[], Any], device: str) -> float:
    """Seconds of a step on the slowest rank."""
    dist.barrier()
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    return slowest(time.perf_counter() - start) if device == "cpu" else time.perf_counter() - start


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _most_reserved(case: Case, way: str) -> int:
    """Bytes that torch takes of a GPU for a way by itself: beside another, it would use holes that this one leaves."""
    before = _reserved()
    run, _ = _stepping(case, way, "cuda")
    for _ in range(WARM_UP):
        _timed(run, "cuda")
    return torch.cuda.max_memory_reserved() - before


def _reserved() -> int:
    """Bytes that torch holds of a GPU, once it has given back what is unused; its high mark starts there."""
    gc.collect()  # what an earlier model held goes now, not while the next is measured
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_reserved()


def finish(figures: dict[str, Any], options: argparse.Namespace) -> None:
    """Print the table and keep the figures if asked."""
    table = Table("model", "way", "forecast ms", "measured ms", "off", "GiB", "measured", "off",
                  title=f"{options.device}, {options.network}, {figures['ranks']} ranks")  # fmt: skip
    missed = []
    for row in figures["rows"]:
        off = row["forecast_s"] / row["measured_s"] - 1
        missed.append(abs(off))
        memory = ["", "", ""]
        if "measured_gib" in row:
            gib, measured = row["forecast_gib"], row["measured_gib"]
            memory = [f"{gib:.2f}", f"{measured:.2f}", f"{gib / measured - 1:+.1%}"]
        milliseconds = [f"{row[key] * 1e3:.1f}" for key in ("forecast_s", "measured_s")]
        table.add_row(row["model"], row["way"], *milliseconds, f"{off:+.1%}", *memory)
    Console(width=120).print(table)
    if missed:
        print(f"mean error {statistics.mean(missed):.1%}, worst {max(missed):.1%}, of {len(missed)} steps")
    if options.save:
        name = f"forecast-steps-{options.device}-{options.network.replace(':', '-')}"
        save(name, {"steps": options.steps, **figures})


if __name__ == "__main__":
    main()
