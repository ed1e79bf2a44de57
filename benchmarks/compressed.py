"""Step time with gradients as they are, in 16 bits and in 8, over a slow link; torch's DDP with its own hook beside.

    python -m benchmarks.compressed                       # two ranks on loopback
    python -m benchmarks.compressed --network 1gbit       # two hosts in network namespaces, as root
    python -m benchmarks.compressed --network 1gbit --save

Times are medians of back-to-back steps, of the slowest rank, contenders in turns within one run. `sent` are the bytes
that a rank's collectives hold, `loss` that of the last step, on the same batches for all.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks import two_ranks
from benchmarks.figures import save
from benchmarks.step import back_to_back
from crossfade.cost.calibrate import calibrate
from crossfade.demo.contenders import Contender, compute_alone, crossfade, ddp, eager_step, on_own_part, race
from crossfade.demo.model import SIZES, Size, batches, build

MODES = ("replicate", "zero2")
DTYPES = (None, "bfloat16", "int8")


def main() -> None:
    """Parse the command line, run on the ranks and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="wide")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--contenders", default="", help="words that the names of contenders must have, by commas")
    two_ranks.add_options(parser)
    options = parser.parse_args()
    given = {"size": options.size, "steps": options.steps, "contenders": options.contenders}
    two_ranks.run("benchmarks.compressed", work, given, finish, options)


def work(size: str, steps: int, contenders: str) -> dict[str, Any]:
    """What each rank does: a few steps of each in turn, then back-to-back ones."""
    chosen = SIZES[size]
    machine = calibrate("calibrated", {"dp": dist.group.WORLD})
    makers: dict[str, Callable[[], Contender]] = {
        "compute alone": lambda: compute_alone(chosen),
        "torch": lambda: ddp(chosen, 2),
        "torch float16": lambda: _ddp_in_float16(chosen),
    }
    for mode in MODES:
        for dtype in DTYPES:
            name = f"Crossfade {mode}, {dtype or 'float32'}"
            options = {"data_parallel": mode, "reduce_dtype": dtype, "machine": machine}
            makers[name] = lambda name=name, options=options: crossfade(chosen, name, **options)
    wanted = contenders.split(",")
    entered = [make() for name, make in makers.items() if any(word in name for word in wanted)]
    measured = race(entered, chosen, steps=steps)
    batch = batches(chosen, dist.get_world_size(), 1)[0]
    seconds, _ = back_to_back(entered, batch, machine)
    compiled = {contender.name: contender.compiled for contender in entered if contender.compiled is not None}
    return {
        "steady": seconds,
        "losses": {result.name: result.losses[-1] for result in measured},
        "sent": {name: step.report.total_after[1] for name, step in compiled.items()},
        "predicted": {name: step.report.predicted.seconds for name, step in compiled.items() if step.report.predicted},
    }


def _ddp_in_float16(size: Size) -> Contender:
    model = build(size)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=2)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return Contender("torch DDP, 2 MB buckets, fp16_compress_hook", on_own_part(eager_step(wrapped, model)))


def finish(figures: dict[str, Any], options: argparse.Namespace) -> None:
    """Print the table and keep the figures if asked."""
    table = Table("contender", "ms a step", "sent", "predicted ms", "loss", title=f"{options.size}, {options.network}")
    for name, seconds in figures["steady"].items():
        sent, predicted = figures["sent"].get(name), figures["predicted"].get(name)
        table.add_row(
            name,
            f"{seconds * 1e3:.0f}",
            f"{sent / 2**20:.1f} MB" if sent else "",
            f"{predicted * 1e3:.0f}" if predicted else "",
            f"{figures['losses'][name]:.4f}",
        )
    Console(width=120).print(table)
    if options.save:
        save(f"compressed-{options.size}-{options.network}", figures)


if __name__ == "__main__":
    main()
