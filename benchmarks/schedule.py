"""How the scheduler scales and what it promises: `python -m benchmarks.schedule [LAYERS...]`, by default 4 16 64 256.

Whole training steps of `benchmarks.graphs` (FSDP and DDP, 64 ranks). For each: the seconds that planning takes, the
best of three, their growth, and on two machines the predicted milliseconds of a step and its peak memory, before and
after. Unbucketed, so that the graphs have as many collectives as they can.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import fx

from benchmarks import graphs
from crossfade.cost.estimate import estimate
from crossfade.cost.machine import Machine
from crossfade.cost.presets import preset
from crossfade.graph.program import from_graph_module
from crossfade.schedule.plan import Schedule, plan_schedule

MACHINES = ("h100-nvlink-node", "ethernet-100gbit")
REPEATS = 3
KINDS: dict[str, Callable[[int], fx.GraphModule]] = {"fsdp": graphs.fsdp, "ddp": graphs.ddp}


@dataclass(frozen=True)
class Row:
    """One graph on one machine."""

    kind: str
    machine: str
    layers: int
    nodes: int
    collectives: int
    seconds: float
    schedule: Schedule
    busy: float


def measure(kind: str, layers: int) -> list[Row]:
    """Plan one graph on each machine."""
    group = graphs.start_fake_world()
    program = from_graph_module(KINDS[kind](layers), groups={group: graphs.RANKS})
    rows = []
    for name in MACHINES:
        machine: Machine = preset(name)
        costs = estimate(program, machine)
        seconds = math.inf
        for _ in range(REPEATS):
            start = time.perf_counter()
            schedule = plan_schedule(program, costs)
            seconds = min(seconds, time.perf_counter() - start)
        nodes, busy = len(program.graph.nodes), sum(costs.compute.values())
        rows.append(Row(kind, name, layers, nodes, len(costs.travel), seconds, schedule, busy))
    return rows


def growth(before: Row | None, row: Row) -> str:
    """The exponent of planning time between two sizes: 1 is linear, 2 quadratic."""
    if before is None:
        return ""
    return f"{math.log(row.seconds / before.seconds) / math.log(row.nodes / before.nodes):.2f}"


def main(arguments: list[str]) -> None:
    """Measure all sizes and print one table."""
    layers = [int(item) for item in arguments] or [4, 16, 64, 256]
    table = Table(title=f"overlap-communication, torch {torch.__version__}")
    columns = ["graph", "machine", "layers", "nodes", "collectives", "plan s", "growth"]
    for column in [*columns, "computing ms", "before ms", "after ms", "before GB", "after GB", "order"]:
        table.add_column(column, justify="left" if column in ("graph", "machine", "order") else "right")
    for kind in KINDS:
        before: dict[str, Row] = {}
        for number in layers:
            for row in measure(kind, number):
                table.add_row(*cells(row, growth(before.get(row.machine), row)))
                before[row.machine] = row
    Console(width=180).print(table)


def cells(row: Row, exponent: str) -> list[str]:
    """A row of the table."""
    found = row.schedule
    times = [f"{1e3 * value:.1f}" for value in (row.busy, found.seconds_before, found.seconds)]
    peaks = [f"{value / 1e9:.2f}" for value in (found.peak_before, found.peak)]
    sizes = [f"{row.layers}", f"{row.nodes:,}", f"{row.collectives:,}", f"{row.seconds:.2f}", exponent]
    return [row.kind, row.machine, *sizes, *times, *peaks, found.chosen]


if __name__ == "__main__":
    main(sys.argv[1:])
