"""Step time of torch's ways to train in parallel and of Crossfade's, on the same model, alternating in one run.

    python -m benchmarks.step                                      # two ranks on loopback
    python -m benchmarks.step --network 1gbit                      # two hosts in network namespaces, as root
    python -m benchmarks.step --network emulated:64:ethernet-10gbit   # one process, rank 0 of 64, on an emulated fabric
    python -m benchmarks.step --size deep --save                   # also keep the figures in benchmarks/results/
    python -m benchmarks.step --contenders "ddp,zero2" --compiled  # some contenders; and torch's compiled ones

Times are medians, of the slowest rank. The reference is the larger of compute alone and of one all-reduce of all
gradients in pieces of 1 MB, both measured in the same run: what perfect overlap of these would give. Steps that compute
faster than eager torch, or send fewer bytes than the gradients, take less. In turns with others a step finds little of
its own in the caches, and connections that have been idle, unless it shares them with others as all of torch's
contenders do; `steady` steps run back to back, as in training, and are what predictions are to be compared with.
`predicted` is what was planned with, minutes before; `beside` it is predicted again between the steady steps, by
operators measured then, since the speed of a machine that others use changes within minutes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks import peers, two_ranks
from benchmarks.figures import save
from benchmarks.two_ranks import seconds_of, slowest
from crossfade import emulated
from crossfade.compile.carriers import Carriers
from crossfade.compile.overlap import predicted
from crossfade.cost.calibrate import calibrate
from crossfade.cost.machine import Machine
from crossfade.cost.measure import measure
from crossfade.cost.presets import preset
from crossfade.cost.timeline import Timeline
from crossfade.demo.contenders import Contender, compute_alone, crossfade, ddp, race
from crossfade.demo.model import SIZES, Size, batches, build
from crossfade.execute.codegen import native
from crossfade.ranks.launch import KEEPS_MEMORY

MODES = ("replicate", "zero1", "zero2", "zero3")


def main() -> None:
    """Parse the command line, run on the ranks and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="wide")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--contenders", default="", help="words that the names of contenders must have, by commas")
    parser.add_argument("--compiled", default="", help="anything: also torch's compiled contenders, minutes to start")
    two_ranks.add_options(parser)
    options = parser.parse_args()
    given = {key: getattr(options, key) for key in ("size", "steps", "contenders", "compiled", "network")}
    if options.network.startswith("emulated:"):
        _keep_memory()
        finish(_on_emulated_fabric(given), options)
    else:
        two_ranks.run("benchmarks.step", work, given, finish, options)


def _keep_memory() -> None:
    """Start again with the variables that hosts of the other networks have, unless they are set: allocators read them
    once."""
    if not KEEPS_MEMORY.keys() <= os.environ.keys():
        again = [sys.executable, "-m", "benchmarks.step", *sys.argv[1:]]
        os.execve(sys.executable, again, {**KEEPS_MEMORY, **os.environ})


def _on_emulated_fabric(given: dict[str, Any]) -> dict[str, Any]:
    """Run as one rank of a world that does not exist, on a fabric of which a preset gives the times."""
    _, ranks, machine = given["network"].split(":")
    torch.set_num_threads(1)
    with emulated.world(preset(machine), int(ranks)):
        return work(**given)


def work(size: str, steps: int, contenders: str, compiled: str, network: str) -> dict[str, Any]:
    """What each rank does: race, and measure the two parts of the reference."""
    chosen = SIZES[size]
    emulates = network.startswith("emulated:")
    machine = preset(network.split(":")[2]) if emulates else calibrate("calibrated", {"dp": dist.group.WORLD})
    entered = [compute_alone(chosen), *_chosen(chosen, contenders, compiled, machine)]
    measured = race(entered, chosen, steps=steps)
    compiled_steps = {contender.name: contender.compiled for contender in entered if contender.compiled is not None}
    batch = batches(chosen, dist.get_world_size(), 1)[0]
    steady, beside = back_to_back(entered, batch, machine)
    return {
        "times": {result.name: result.median for result in measured},
        "losses": {result.name: result.losses[-1] for result in measured},
        "communication": _communication(sum(p.numel() for p in build(chosen).parameters())),
        "collectives": {
            name: (step.report.total_before, step.report.total_after) for name, step in compiled_steps.items()
        },
        "predicted": {
            name: step.report.predicted.seconds for name, step in compiled_steps.items() if step.report.predicted
        },
        "steady": steady,
        "beside": beside,
        "profiled": {name: _summary(step.profile(*batch)) for name, step in compiled_steps.items()},
        "ranks": dist.get_world_size(),
    }


def back_to_back(
    entered: Sequence[Contender], batch: tuple[torch.Tensor, torch.Tensor], machine: Machine
) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of back-to-back steps, as in training, and of predictions made beside them.

    Steps run by fours, the first not counted, of each in turn, since a machine's speed changes within seconds.
    """
    here = Carriers({"dp": dist.get_backend()}, machine).run_on(machine)
    seconds: dict[str, list[float]] = {contender.name: [] for contender in entered}
    beside: dict[str, list[float]] = {}
    for contender in [*entered] * 4:
        if contender.compiled is not None and contender.compiled.report.predicted:
            program = contender.compiled.program
            found = predicted(program, here, measure(program, binding=native)).seconds
            beside.setdefault(contender.name, []).append(found)
        seconds[contender.name] += [slowest(seconds_of(partial(contender.step, *batch))) for _ in range(4)][1:]
    return _medians(seconds), _medians(beside)


def _medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(found) for name, found in seconds.items()}


def _summary(timeline: Timeline) -> dict[str, float]:
    return {"seconds": timeline.seconds, "busy": timeline.busy, "exposed": timeline.exposed}


def _chosen(size: Size, words: str, compiled: str, machine: Machine) -> list[Contender]:
    """The contenders whose names have one of the words; made one by one, since each holds a model."""
    makers: dict[str, Callable[[], Contender]] = {
        "torch ddp default": lambda: ddp(size),
        "torch ddp 2": lambda: ddp(size, 2),
        "torch ddp 1": lambda: ddp(size, 1),
        "torch fsdp kept": lambda: peers.fsdp(size, reshard=False),
        "torch fsdp resharded": lambda: peers.fsdp(size, reshard=True),
    }
    if compiled:
        makers |= {
            "torch compiled ddp": lambda: peers.compiled_ddp(size, 2),
            "torch compiled simple fsdp": lambda: peers.simple_fsdp(size),
        }
    makers["crossfade unplanned"] = lambda: crossfade(size, "Crossfade replicate, no machine")
    for mode in MODES:
        makers[f"crossfade {mode}"] = lambda mode=mode: crossfade(
            size, f"Crossfade {mode}", data_parallel=mode, machine=machine
        )
    makers["crossfade zero2 whole"] = lambda: crossfade(
        size, "Crossfade zero2, some kept whole", data_parallel="zero2", keep_whole="auto", machine=machine
    )
    return [make() for name, make in makers.items() if any(word in name for word in words.split(","))]


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


def _against(predicted: float | None, steady: float | None) -> str:
    return f"{predicted * 1e3:.1f} ({predicted / steady:.2f}x)" if predicted and steady else ""


def finish(figures: dict[str, Any], options: argparse.Namespace) -> None:
    """Print the table and keep the figures if asked."""
    times: dict[str, float] = figures["times"]
    reference = max(next(iter(times.values())), figures["communication"])
    best = min((seconds for name, seconds in times.items() if name.startswith("torch")), default=reference)
    title = f"{options.size}, {options.network}, {figures['ranks']} ranks"
    columns = (
        "contender",
        "ms a step",
        "x reference",
        "speed against torch's best",
        "steady ms",
        "predicted",
        "beside",
        "profiled: exposed",
    )
    table = Table(*columns, title=title)
    for name, seconds in [*times.items(), ("one all-reduce of all gradients", figures["communication"])]:
        steady, profiled = figures["steady"].get(name), figures["profiled"].get(name)
        table.add_row(
            name,
            f"{seconds * 1e3:.1f}",
            f"{seconds / reference:.2f}",
            f"{best / seconds:.2f}",
            f"{steady * 1e3:.1f}" if steady else "",
            *(_against(figures[key].get(name), steady) for key in ("predicted", "beside")),
            f"{profiled['seconds'] * 1e3:.1f}: {profiled['exposed'] * 1e3:.1f}" if profiled else "",
        )
    Console(width=140).print(table)
    steady, alone = figures["steady"], next(iter(times))
    torchs = [seconds for name, seconds in steady.items() if name.startswith("torch")]
    ours = [seconds for name, seconds in steady.items() if name.startswith("Crossfade")]
    if torchs and ours:
        at_least = max(steady[alone], figures["communication"])
        ratios = f"{min(ours) / at_least:.2f}x the reference, {min(torchs) / min(ours):.2f}x torch's best"
        line = f"steady: Crossfade's best {min(ours) * 1e3:.1f} ms, {ratios} ({min(torchs) * 1e3:.1f} ms)"
        Console(width=140).print(line)
    together = [loss for name, loss in figures["losses"].items() if not name.startswith("compute")]
    if together:
        Console().print(f"losses after the last step differ by at most {max(together) - min(together):.1e}")
    if options.save:
        save(f"step-{options.size}-{options.network.replace(':', '-')}", {"steps": options.steps, **figures})


if __name__ == "__main__":
    main()
