"""The emulated fabric against what was asked of it: seconds demanded and delivered, and what emulating them costs.

    python -m benchmarks.emulated               # on CPU
    python -m benchmarks.emulated --save        # also keep the figures in benchmarks/results/

The fabric is 10 Gbit/s Ethernet. Errors are medians, and what nine in ten stay below; CPU time is what the whole
process used for one collective. Both include torch.distributed's own Python, which is slower after a long sleep. The
second table is eager DDP in one process with emulated peers; a world of one rank shows what it computes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.figures import save
from crossfade import emulated
from crossfade.cost.machine import Fabric, Link, Machine
from crossfade.graph.collectives import Kind

ETHERNET = Machine(
    "10 Gbit/s Ethernet",
    {"*": Fabric(dict.fromkeys(Kind, Link(latency=30e-6, bandwidth=1.25e9)))},
    flops={"float32": 5e10},
    memory_bandwidth=1e10,
)
WORLDS = (8, 64)


@dataclass(frozen=True)
class Case:
    """A kind of collective, by the bytes of its larger side, in a world, with values written or not."""

    kind: Kind
    size: int
    ranks: int
    values: bool

    def __str__(self) -> str:
        values = "values" if self.values else "no values"
        size = f"{self.size >> 20} MiB" if self.size >> 20 else f"{self.size >> 10} KiB"
        return f"{self.kind} of {size}, {self.ranks} ranks, {values}"


KINDS = (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
CASES = [Case(kind, size, ranks, True) for ranks in WORLDS for kind in KINDS for size in (2**12, 2**20, 2**25)]
CASES += [Case(kind, 2**25, ranks, False) for ranks in WORLDS for kind in KINDS]


def collective(case: Case) -> Callable[[], Any]:
    """A call of the case's collective, which returns when it has arrived."""
    large = torch.ones(case.size // 4)
    part = torch.ones(large.numel() // case.ranks)
    calls: dict[Kind, Callable[[], Any]] = {
        Kind.ALL_REDUCE: lambda: dist.all_reduce(large),
        Kind.ALL_GATHER: lambda: dist.all_gather_into_tensor(large, part),
        Kind.REDUCE_SCATTER: lambda: dist.reduce_scatter_tensor(part, large),
    }
    return calls[case.kind]


def measure(case: Case, rounds: int) -> dict[str, float]:
    """Seconds demanded and delivered, by how much they differ, and the process's CPU seconds."""
    with emulated.world(ETHERNET, case.ranks, values=case.values):
        call = collective(case)
        call()  # touches the memory, starts threads
        seconds, busy = [], time.process_time()
        for _ in range(rounds):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        busy = (time.process_time() - busy) / rounds
    demanded = ETHERNET.collective_seconds(case.kind, case.size, case.ranks)
    late = sorted(taken - demanded for taken in seconds)
    figures = {"demanded": demanded, "delivered": statistics.median(seconds), "error": statistics.median(late)}
    return figures | {"error of nine in ten": late[int(0.9 * (rounds - 1))], "cpu": busy}


def training(megabytes: float, rounds: int) -> float:
    """Median seconds of an eager DDP step in the world that is there."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.GELU())]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=megabytes)
    data, seconds = torch.randn(256, 1024), []
    for turn in range(rounds + 3):
        start = time.perf_counter()
        model.zero_grad()
        model(data).pow(2).mean().backward()
        if turn >= 3:  # DDP settles its buckets in the first ones
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def steps(rounds: int) -> dict[str, float]:
    """Seconds of DDP steps, in worlds of several sizes, with small and large buckets."""
    found = {}
    for ranks in (1, *WORLDS):
        for megabytes in (1, 25):
            with emulated.world(ETHERNET, ranks):
                found[f"{ranks} ranks, buckets of {megabytes} MiB"] = training(megabytes, rounds)
    return found


def show(accuracy: dict[str, dict[str, float]], seconds: dict[str, float]) -> None:
    """Print both tables, in milliseconds."""
    table = Table("collective", "demanded", "delivered", "error", "9 in 10", "CPU", title="ms, on CPU")
    for name, figures in accuracy.items():
        table.add_row(name, *(f"{1e3 * value:.3f}" for value in figures.values()))
    ddp = Table("eager DDP", "ms a step", title=f"32 MiB of gradients on {ETHERNET.name}")
    for name, taken in seconds.items():
        ddp.add_row(name, f"{1e3 * taken:.1f}")
    console = Console()
    console.print(table)
    console.print(ddp)


def main() -> None:
    """Parse the command line, measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--save", action="store_true", help="keep the figures as JSON")
    options = parser.parse_args()
    accuracy = {str(case): measure(case, options.rounds) for case in CASES}
    seconds = steps(options.rounds)
    show(accuracy, seconds)
    if options.save:
        save("emulated-cpu", {"fabric": ETHERNET.name, "seconds": accuracy, "DDP step seconds": seconds})


if __name__ == "__main__":
    main()
