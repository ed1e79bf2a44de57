"""What is forecast for matmuls that travel in pieces, against what they take: every form and number of pieces.

    python -m benchmarks.collective_matmul_forecasts --network 1gbit       # two hosts in network namespaces, as root
    python -m benchmarks.collective_matmul_forecasts --network emulated:8  # rank 0 of 8, on a fabric of one gigabit

Forecasts are those of `crossfade.cost.collective_matmul` on a machine that is measured in the same run. Times are
medians of the slowest rank; the ratio is what was measured over what was forecast.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import crossfade.collective_matmul
from benchmarks import two_ranks
from benchmarks.figures import save
from benchmarks.two_ranks import seconds_of, slowest
from crossfade import emulated
from crossfade.cost.calibrate import calibrate
from crossfade.cost.collective_matmul import CHUNKS, Exchange, Forecast, forecast
from crossfade.cost.machine import Machine
from crossfade.cost.presets import preset
from crossfade.graph import collectives
from crossfade.graph.collective_matmul import ANYWHERE, gather_matmul, matmul_scatter
from crossfade.graph.collectives import Kind

_GIVEN = ("rows", "inner", "columns", "rounds")


def main() -> None:
    """Parse the command line, run on the ranks and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in (("rows", 4096), ("inner", 512), ("columns", 512), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=size)
    two_ranks.add_options(parser)
    options = parser.parse_args()
    given = {key: getattr(options, key) for key in _GIVEN}
    if options.network.startswith("emulated:"):
        finish(_on_emulated_fabric(int(options.network.split(":")[1]), given), options)
    else:
        two_ranks.run("benchmarks.collective_matmul_forecasts", work, given, finish, options)


def _on_emulated_fabric(ranks: int, given: dict[str, int]) -> dict[str, Any]:
    torch.set_num_threads(1)
    machine = dataclasses.replace(preset("ethernet-1gbit"), device="cpu")
    with emulated.world(machine, ranks):
        fabric = dataclasses.replace(machine.fabric("*"), launch=launch_seconds(ranks, given["rows"] * given["inner"]))
        return work(**given, machine=dataclasses.replace(machine, fabrics={"*": fabric}))


def launch_seconds(ranks: int, numbers: int) -> float:
    """Seconds for which starting a collective of so many numbers in four pieces keeps this process busy.

    An emulated one is started by Python, which takes longer than gloo.
    """
    part, found = torch.zeros(numbers // ranks // 4), []
    for _ in range(9):
        start = time.perf_counter()
        begun = collectives.all_gather(part, ranks, _group())
        found.append(time.perf_counter() - start)
        collectives.wait(begun)
    return statistics.median(found)


def work(rows: int, inner: int, columns: int, rounds: int, machine: Machine | None = None) -> dict[str, Any]:
    """What each rank does: every form and number of pieces in turns, and the matmul and the collectives alone."""
    assert crossfade.collective_matmul is not None  # runs the operators
    ranks = dist.get_world_size()
    if machine is None:
        machine = calibrate("here", {"*": dist.group.WORLD}, seconds=4.0).with_scatters_as_exchanges(["*"])
    torch.manual_seed(0)
    whole, right = torch.randn(rows, inner), torch.randn(inner, columns)
    part, back = whole[: rows // ranks].contiguous(), torch.randn(columns, inner)
    product = torch.mm(whole, right)
    runs: dict[tuple[str, str, int], Callable[[], Any]] = {}
    for form in ANYWHERE:
        for chunks in CHUNKS:
            how: Any = {"dim": 0, "ranks": ranks, "group": _group(), "form": form, "chunks": chunks}
            runs[Kind.ALL_GATHER, form, chunks] = partial(gather_matmul, part, [right], ["mk,kn->mn"], **how)
            runs[Kind.REDUCE_SCATTER, form, chunks] = partial(matmul_scatter, product, back, "mk,kn->mn", **how)
    matmul = statistics.median(seconds_of(lambda: torch.mm(whole, right)) for _ in range(rounds))
    seconds: dict[tuple[str, str, int], list[float]] = {key: [] for key in runs}
    for turn in range(rounds + 1):
        for key, run in runs.items():
            took = slowest(seconds_of(run))
            seconds[key] += [took] if turn else []
    exchange = Exchange(machine, "*", ranks, rows * inner * 4, matmul, rows // ranks)
    found = []
    for (kind, form, chunks), some in seconds.items():
        expected: Forecast = forecast(exchange, Kind(kind), form, chunks)
        found.append((str(kind), form, chunks, statistics.median(some), expected.seconds, expected.plain))
    return {"ranks": ranks, "matmul": matmul, "fabric": machine.name, "found": found}


def _group() -> str:
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name


def finish(figures: dict[str, Any], options: argparse.Namespace) -> None:
    """Print the table and keep the figures if asked."""
    sizes = f"{options.rows} x {options.inner} x {options.columns}"
    table = Table("what", "form", "pieces", "ms", "forecast", "ratio", title=f"{sizes}, {options.network}")
    for kind, form, chunks, seconds, expected, _ in figures["found"]:
        table.add_row(
            kind,
            form,
            str(chunks),
            *(f"{1e3 * value:.1f}" for value in (seconds, expected)),
            f"{seconds / expected:.2f}",
        )
    Console(width=120).print(table)
    ratios = sorted(seconds / expected for *_, seconds, expected, _ in figures["found"])
    Console().print(f"measured over forecast: median {statistics.median(ratios):.2f}, {ratios[0]:.2f}-{ratios[-1]:.2f}")
    for asked in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER):
        own = [row for row in figures["found"] if row[0] == str(asked)]
        best, chosen = min(own, key=lambda row: row[3]), min(own, key=lambda row: row[4])
        Console().print(
            f"{asked}: forecast best {chosen[1]} in {chosen[2]}, {1e3 * chosen[3]:.1f} ms; "
            f"measured best {best[1]} in {best[2]}, {1e3 * best[3]:.1f} ms"
        )
    if options.save:
        given = {name: getattr(options, name) for name in (*_GIVEN, "network")}
        save(f"collective-matmul-forecasts-{options.network.replace(':', '-')}", {**given, **figures})


if __name__ == "__main__":
    main()
