"""Step time of experts between two all-to-alls, plain and in pieces that are computed on while others travel.

    python -m benchmarks.all_to_alls                            # two ranks on loopback
    python -m benchmarks.all_to_alls --network 1gbit            # two hosts in network namespaces, as root
    python -m benchmarks.all_to_alls --network 1gbit --save     # also keep the figures in benchmarks/results/

A forward of experts with buffers of equal size: tokens are sent to the ranks of their experts, go through two matmuls,
and come back. The machine is calibrated on the ranks; both programs are optimized for it, one without
`pipeline-all-to-alls`. They take turns in one run; times are medians of the slowest rank. Predicted is what the same
machine says of both.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks import two_ranks
from benchmarks.figures import save
from benchmarks.two_ranks import seconds_of, slowest
from crossfade.compile import pipeline
from crossfade.cost.calibrate import calibrate
from crossfade.cost.estimate import estimate
from crossfade.cost.machine import Machine
from crossfade.cost.timeline import simulate
from crossfade.graph import collectives
from crossfade.graph.program import from_graph_module
from crossfade.report.report import Report

_SIZES = (("experts", 4), ("places", 256), ("width", 512), ("hidden", 1024), ("rounds", 12))
PASS = "pipeline-all-to-alls"


def main() -> None:
    """Parse the command line, run on the ranks and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in _SIZES:
        parser.add_argument(f"--{name}", type=int, default=size)
    two_ranks.add_options(parser)
    options = parser.parse_args()
    given = {name: getattr(options, name) for name, _ in _SIZES}
    two_ranks.run("benchmarks.all_to_alls", work, given, finish, options)


def work(experts: int, places: int, width: int, hidden: int, rounds: int) -> dict[str, Any]:
    """What each rank does: optimize both ways, and time them in turns."""
    ranks, world = dist.get_world_size(), dist.group.WORLD
    assert world is not None
    group = world.group_name
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randn(ranks, experts, places, width, generator=generator)
    up, down = torch.randn(experts, width, hidden), torch.randn(experts, hidden, width)

    def forward(tokens: Tensor, up: Tensor, down: Tensor) -> Tensor:
        here = collectives.wait(collectives.all_to_all(tokens, ranks, group))
        rows = here.permute(1, 0, 2, 3).reshape(experts, ranks * places, width)
        made = torch.bmm(torch.nn.functional.gelu(torch.bmm(rows, up)), down)
        leaving = made.view(experts, ranks, places, width).permute(1, 0, 2, 3).contiguous()
        return collectives.wait(collectives.all_to_all(leaving, ranks, group))

    traced = make_fx(forward, tracing_mode="fake")(tokens, up, down)
    machine = _alike(calibrate("here", {"*": world}, seconds=4.0))
    passes = pipeline.optimization({group: "gloo"}, machine, {group: ranks})
    ways = {"plain": passes.without(PASS), "in pieces": passes}
    done = {name: _optimized(traced, machine, way, {group: ranks}) for name, way in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in done}
    for turn in range(rounds + 2):
        for name, (module, _, _) in done.items():
            took = slowest(seconds_of(lambda module=module: module(tokens, up, down)))  # type: ignore[misc]
            seconds[name] += [took] if turn >= 2 else []
    plain, pieces = (module(tokens, up, down) for module, _, _ in done.values())
    return {
        "measured": {name: statistics.median(some) for name, some in seconds.items()},
        "predicted": {name: predicted for name, (_, predicted, _) in done.items()},
        "difference": float((plain - pieces).abs().max() / plain.abs().max()),
        "verdicts": [str(verdict) for name, verdict in done["in pieces"][2].verdicts if name == PASS],
    }


def _alike(machine: Machine) -> Machine:
    """The machine of rank 0, on all ranks: they must make one program."""
    shared = [machine]
    dist.broadcast_object_list(shared, 0)
    return dataclasses.replace(shared[0])


def _optimized(
    module: fx.GraphModule, machine: Machine, passes: Any, groups: dict[str, int]
) -> tuple[fx.GraphModule, float, Report]:
    """A program made for a machine, what it is predicted to take, and what its passes said."""
    made = pipeline.optimize(module, machine=machine, passes=passes, groups=groups)
    program = from_graph_module(made.module, groups=groups)
    return made.module, simulate(program, estimate(program, machine)).seconds, made.report


def finish(figures: dict[str, Any], options: argparse.Namespace) -> None:
    """Print the figures, and keep them if asked to."""
    table = Table("", "predicted, ms", "measured, ms", title=f"experts between all-to-alls, {options.network}")
    for name in figures["measured"]:
        table.add_row(name, *(f"{figures[kind][name] * 1e3:.1f}" for kind in ("predicted", "measured")))
    ratios = (figures[kind]["plain"] / figures[kind]["in pieces"] for kind in ("predicted", "measured"))
    table.add_row("times faster", *(f"{ratio:.2f}" for ratio in ratios))
    Console().print(table)
    print(f"results differ by {figures['difference']:.1e} of the largest")
    print(*figures["verdicts"], sep="\n")
    if options.save:
        sizes = {name: getattr(options, name) for name, _ in _SIZES}
        save(f"all-to-alls-{options.network}", {**figures, **sizes})


if __name__ == "__main__":
    main()
