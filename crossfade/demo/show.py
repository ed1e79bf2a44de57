"""The demonstration: train, time, compare, report."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from crossfade.demo.contenders import Contender, Measured, crossfade, ddp, race, single_process
from crossfade.demo.model import SIZES, Size, batches
from crossfade.ranks.local import Ranks
from crossfade.report.report import Report, Table
from crossfade.report.terminal import show_table

WARM_UP = 2
DDP_BUCKETS_MB = (1.0, 4.0)
"""Bucket sizes tried for DDP beside its default; the best of them is shown."""


def run(*, ranks: int, steps: int, size: str, folder: Path, console: Console, everything: bool = False) -> Report:
    """Train the same small GPT in every way, print the table, and write the report into `folder`."""
    console.print(f"Training a small GPT ({size}) on {ranks} local ranks, {steps} steps of each contender in turn.")
    with Ranks(ranks, timeout=600) as world:
        measured, report = world.run(work, size, steps)[0]
    tables = times_table(measured), losses_table(measured)
    report = functools.reduce(Report.with_table, tables, report)
    report.show(console, all=everything)
    for table in () if everything else tables:
        show_table(table, console)
    folder.mkdir(parents=True, exist_ok=True)
    report.to_json(folder / "report.json")
    console.print(f"HTML report: {report.to_html(folder / 'index.html')}", soft_wrap=True)
    return report


def work(size_name: str, steps: int) -> tuple[list[Measured], Report] | None:
    """What each rank does; the first one shows progress and answers."""
    size = SIZES[size_name]
    contenders = [single_process(size), ddp(size), *(ddp(size, mb) for mb in DDP_BUCKETS_MB), crossfade(size)]
    with _progress(len(contenders) * (steps + WARM_UP)) as advance:
        measured = race(contenders, size, steps=steps, warm_up=WARM_UP, progress=advance)
    report = _report(contenders[-1], size)  # on every rank: it takes one more step
    return (measured, report) if dist.get_rank() == 0 else None


def times_table(measured: list[Measured]) -> Table:
    """Step times as ratios to DDP's default, from one run."""
    default = measured[1].median
    best = min(measured[2:-1], key=lambda contender: contender.median, default=measured[1])
    shown = [measured[0], measured[1], replace(best, name=f"{best.name} (best)"), measured[-1]]
    rows = [[entry.name, f"{entry.median * 1e3:.1f} ms", f"{default / entry.median:.2f}x"] for entry in shown]
    note = f"Medians of {len(measured[0].seconds)} steps, taken in turn in one run; times are the slowest rank's."
    return Table("Step time", ["contender", "step", "speed against DDP"], rows, note)


def losses_table(measured: list[Measured]) -> Table:
    """Losses side by side, at a few steps."""
    last = len(measured[0].losses) - 1
    chosen = [measured[0], measured[1], measured[-1]]
    steps = sorted({0, last // 3, 2 * last // 3, last})
    rows = [(str(step), *(f"{contender.losses[step]:.6f}" for contender in chosen)) for step in steps]
    worst = max(abs(a - b) for a, b in zip(chosen[0].losses, chosen[-1].losses, strict=True))
    note = f"Largest difference between one process and Crossfade over all steps: {worst:.1e}."
    return Table("Loss", ["step", *(contender.name for contender in chosen)], rows, note)


def _report(contender: Contender, size: Size) -> Report:
    """What became of the collectives, and what one more step does when."""
    step = contender.compiled
    assert step is not None
    step.profile(*batches(size, dist.get_world_size(), 1)[0])
    report = step.report
    return replace(report, facts={**report.facts, "threads": f"{torch.get_num_threads()} on each rank"})


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on the first rank, nothing on the others."""
    if dist.get_rank() != 0:
        yield lambda: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("training", total=total)
        yield lambda: bar.advance(task)
