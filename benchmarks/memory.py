"""Peak memory of a training step: eager torch, torch's DDP and Crossfade, each in processes of its own.

    python -m benchmarks.memory

What is printed is how far the resident set of a rank grows above what it was before the first step, after a few steps.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.figures import save
from crossfade import Ranks
from crossfade.demo import contenders
from crossfade.demo.model import SIZES, batches

CONTENDERS = {
    "compute alone (eager)": contenders.compute_alone,
    "torch DDP": contenders.ddp,
    "Crossfade": contenders.crossfade,
}


def grown(name: str, size_name: str, steps: int) -> float:
    """MB by which this rank's peak resident set grew while training."""
    size = SIZES[size_name]
    contender = CONTENDERS[name](size)
    if contender.compiled is not None:
        contender.compiled.prepare(*batches(size, dist.get_world_size(), 1)[0])
    before = _reset_peak()
    for batch in batches(size, dist.get_world_size(), steps):
        contender.step(*batch)
    return (_peak() - before) / 1024


def _reset_peak() -> int:
    """Start a new peak (Linux) and return the resident kilobytes now."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(key: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key))


def main() -> None:
    """Measure each contender in fresh processes and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="wide")
    parser.add_argument("--save", action="store_true", help="keep the figures as JSON")
    options = parser.parse_args()
    figures = {}
    table = Table("contender", "MB above the start", title=options.size)
    for name in CONTENDERS:
        with Ranks(2) as ranks:
            results: list[Any] = ranks.run(grown, name, options.size, 5)
        figures[name] = max(results)
        table.add_row(name, f"{figures[name]:.0f}")
    Console().print(table)
    if options.save:
        save(f"memory-{options.size}", {"megabytes_above_the_start": figures})


if __name__ == "__main__":
    main()
