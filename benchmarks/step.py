"""Step time of torch's DDP and of Crossfade on the same model, alternating in one run, as ratios.

    python -m benchmarks.step                          # two ranks on loopback
    python -m benchmarks.step --network 1gbit          # two hosts in network namespaces, as root
    python -m benchmarks.step --size deep --save       # also keep the figures in benchmarks/results/

Times are medians, of the slowest rank. `limit` is the larger of compute alone and of one all-reduce of all gradients
in pieces of 1 MB, both measured in the same run: what perfect overlap would give.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks import two_ranks
from benchmarks.figures import save
from crossfade.demo.contenders import compute_alone, crossfade, ddp, race
from crossfade.demo.model import SIZES, build


def main() -> None:
    """Parse the command line, run on two ranks and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="wide")
    parser.add_argument("--steps", type=int, default=12)
    two_ranks.add_options(parser)
    options = parser.parse_args()
    two_ranks.run("benchmarks.step", work, {"size": options.size, "steps": options.steps}, finish, options)


def work(size_name: str, steps: int) -> dict[str, Any]:
    """What each rank does: race, and measure the two limits."""
    size = SIZES[size_name]
    contenders = [compute_alone(size), ddp(size), ddp(size, 2), ddp(size, 1), crossfade(size)]
    measured = race(contenders, size, steps=steps)
    step = contenders[-1].compiled
    assert step is not None
    return {
        "times": {one.name: one.median for one in measured},
        "loss_difference": max(abs(a - b) for a, b in zip(measured[1].losses, measured[-1].losses, strict=True)),
        "communication": _communication(sum(p.numel() for p in build(size).parameters())),
        "collectives_before": step.report.total_before,
        "collectives_after": step.report.total_after,
    }


def _communication(elements: int) -> float:
    """Median seconds of one all-reduce of all gradients, in pieces launched together."""
    pieces = torch.zeros(elements).split(2**18)
    seconds = []
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter()
        for work in [dist.all_reduce(piece, async_op=True) for piece in pieces]:
            work.wait()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def finish(figures: dict[str, Any], options: argparse.Namespace) -> None:
    """Print the table and keep the figures if asked."""
    times: dict[str, float] = figures["times"]
    limit = max(next(iter(times.values())), figures["communication"])
    default = times["torch DDP, default buckets"]
    table = Table("contender", "ms a step", "x limit", "speed against DDP", title=f"{options.size}, {options.network}")
    for name, seconds in [*times.items(), ("one all-reduce of all gradients", figures["communication"])]:
        table.add_row(name, f"{seconds * 1e3:.1f}", f"{seconds / limit:.2f}", f"{default / seconds:.2f}")
    Console().print(table)
    Console().print(f"losses of DDP and Crossfade differ by at most {figures['loss_difference']:.1e}")
    if options.save:
        save(f"step-{options.size}-{options.network}", {"steps": options.steps, **figures})


if __name__ == "__main__":
    main()
