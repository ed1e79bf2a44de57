"""Gloo's reduce-scatter and the lowered form of it in pieces of several sizes, alternating in one run, as ratios.

    python -m benchmarks.reduce_scatter                      # two ranks on loopback
    python -m benchmarks.reduce_scatter --network 1gbit      # two hosts in network namespaces, as root
    python -m benchmarks.reduce_scatter --save               # also keep the figures in benchmarks/results/

Times are medians, of the slowest rank; a ratio above 1 says that lowering pays.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks import two_ranks
from benchmarks.figures import save
from benchmarks.two_ranks import seconds_of, slowest
from crossfade import run_passes
from crossfade.communicate.lower_reduce_scatters import LowerReduceScatters
from crossfade.execute.executable import Executable
from crossfade.graph.program import Program
from crossfade.graph.text import parse

MEGABYTES = (0.004, 0.0625, 0.25, 1.0, 2.0, 4.0, 16.0, 60.0)
WHOLE = 1000.0
PIECES = (0.25, 0.5, 1.0, 2.0, 4.0, WHOLE)
PLAIN = "reduce-scatter"


def main() -> None:
    """Parse the command line, run on two ranks and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    two_ranks.add_options(parser)
    options = parser.parse_args()
    two_ranks.run("benchmarks.reduce_scatter", work, {"repeats": options.repeats}, finish, options)


def work(repeats: int) -> dict[str, dict[str, float]]:
    """What each rank does: for each size in MB, the seconds of each contender."""
    return {f"{size:g}": _race(size, repeats) for size in MEGABYTES}


def _race(megabytes: float, repeats: int) -> dict[str, float]:
    elements = int(megabytes * 2**18)
    program = _program(elements)
    passes = {_label(piece): LowerReduceScatters(piece_mb=piece) for piece in PIECES}
    programs = {PLAIN: program} | {name: run_passes(program, [pass_]) for name, pass_ in passes.items()}
    group = {"dp": dist.group.WORLD.group_name}  # type: ignore[union-attr]
    contenders = {name: Executable(lowered, group) for name, lowered in programs.items()}
    value = torch.ones(elements)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats + 1):
        for name, contender in contenders.items():
            seconds[name].append(slowest(seconds_of(partial(contender, [value]))))
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}  # the first warms up


def _label(piece: float) -> str:
    return "lowered, one piece" if piece == WHOLE else f"lowered, {piece:g} MB"


def _program(elements: int) -> Program:
    text = f"""
    x: f32[{elements}] = input("x")
    s: f32[{elements // 2}] = c10d.reduce_scatter_tensor(x, "sum", 2, "dp")
    w: f32[{elements // 2}] = c10d.wait_tensor(s)
    return output("w", w)
    """
    return parse(text, groups={"dp": 2})


def finish(figures: dict[str, dict[str, float]], options: argparse.Namespace) -> None:
    """Print the table and keep the figures if asked."""
    names = list(next(iter(figures.values())))
    table = Table("MB", f"{PLAIN}, ms", *names[1:], title=f"{options.network}: ms, and how many times faster")
    for size, times in figures.items():
        plain = times[PLAIN]
        cells = [f"{times[name] * 1e3:.2f} ({plain / times[name]:.2f}x)" for name in names[1:]]
        table.add_row(size, f"{plain * 1e3:.2f}", *cells)
    Console(width=150).print(table)
    if options.save:
        kept: dict[str, Any] = {"repeats": options.repeats, "seconds by MB": figures}
        save(f"reduce-scatter-{options.network}", kept)


if __name__ == "__main__":
    main()
