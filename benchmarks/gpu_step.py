"""A training step on one GPU: eager torch, `torch.compile`, and Crossfade, in one run.

    TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 python -m benchmarks.gpu_step --size gpt [--steps 20] [--save]
    ... --ranks 8 --machine h200-nvlink-node    # as rank 0 of an emulated world, against torch's DDP and FSDP2

`gpt` has 404 million parameters in bf16. Contenders take turns, step by step; medians. The first step is from the
call that compiles to its end; peak memory is what torch takes from the device for one step after the third, with the
model, the optimizer's state and the pools of CUDA graphs (whose replays allocate nothing that could be counted
otherwise), of our first contender only: all share one pool. The host waits for the device after each step; "back to
back" is the mean of steps in a row, without.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from benchmarks.figures import save
from crossfade import compile_step, emulated
from crossfade.compile.step import Step
from crossfade.cost.presets import preset
from crossfade.demo.model import SIZES, Size, batches, build, next_token_loss

GPT = Size(width=1024, heads=16, layers=24, vocabulary=32_768, length=1024, batch=8)
CONTENDERS = ("eager", "torch.compile", "torch.compile, reduce-overhead", "Crossfade, eager", "Crossfade")
MODES = ("replicate", "zero1", "zero2", "zero3")
ON_RANKS = (
    "torch.compile",
    "torch DDP",
    "torch DDP, compiled",
    "torch FSDP2, kept",
    "torch FSDP2, resharded",
    "torch FSDP2, kept, nothing travels",
    *(f"Crossfade {mode}" for mode in MODES),
)
PEER = "torch.compile"
CONTROL = "nothing travels"
"""On torch's group `fake`, whose collectives do nothing: the host's time for the emulated fabric is what is more."""
WARM_UP = 4


def stepping(
    name: str, size: Size, dtype: torch.dtype, ranks: int = 1, machine: str | None = None
) -> tuple[Callable[[], torch.Tensor], Step | None]:
    """One contender on one batch; of ours, the step. `torch.compile` alone exchanges nothing."""
    model = build(size).to("cuda", dtype)
    ours = name.startswith("Crossfade")
    if "FSDP2" in name:
        mesh = _where_nothing_travels() if CONTROL in name else None
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh, reshard_after_forward="resharded" in name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **({} if ours else {"fused": True}))
    whole = [part.to("cuda") for part in batches(size, ranks, 1)[0]]
    if ours:
        mode = next((mode for mode in MODES if mode in name), "replicate")
        mesh, execute = {"dp": ranks} if ranks > 1 else None, "eager" if "eager" in name else "auto"
        step = compile_step(
            model, next_token_loss, optimizer, mesh, data_parallel=mode, machine=machine, execute=execute
        )
        return lambda: step(*whole), step
    tokens, targets = (part.chunk(ranks)[0] for part in whole)
    if "DDP" in name:
        model = DistributedDataParallel(model)

    def loss_of(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return next_token_loss(model(tokens), targets)

    mode = "reduce-overhead" if "reduce" in name else None
    computed: Any = torch.compile(loss_of, mode=mode) if "compile" in name else loss_of

    def train() -> torch.Tensor:
        loss = computed(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().clone()

    return train, None


def _where_nothing_travels() -> DeviceMesh:
    """A mesh of as many ranks, on torch's own group that sends nothing."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401, makes the backend known

    return DeviceMesh.from_group(dist.new_group(backend="fake"), "cuda", mesh_dim_names=("fake",))


def race(
    names: list[str],
    size: Size,
    dtype: torch.dtype,
    steps: int,
    phases: bool = False,
    ranks: int = 1,
    machine: str | None = None,
) -> dict[str, dict[str, float]]:
    """For each contender the seconds of its first and of its median step, its peak memory, launches, and last loss."""
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    made, pooled = {}, False
    for name in names:
        torch.compiler.reset()
        before = _reserved()
        try:
            made[name], step = stepping(name, size, dtype, ranks, machine)
            found[name]["first_s"] = _timed(made[name])
        except Exception as error:  # a peer may not run in an emulated world: its row says so
            if name.startswith("Crossfade"):
                raise
            made.pop(name, None)
            found.pop(name)
            print(f"{name} fails: {error}"[:500], flush=True)
            continue
        if step is not None and step.report.predicted is not None:
            found[name]["predicted_s"] = step.report.predicted.seconds
        if phases and step is not None:
            print(f"{step.pipeline}\n{step.report.facts.get('CUDA graphs')}", flush=True)
        for _ in range(WARM_UP - 1):
            made[name]()
        _reserved()
        torch.cuda.reset_peak_memory_stats()
        made[name]()
        torch.cuda.synchronize()
        print(f"{name}: first step {found[name]['first_s']:.1f} s", flush=True)
        if step is None or not pooled:  # later ones of ours record into memory that the first has left
            found[name]["peak_gib"] = (torch.cuda.max_memory_reserved() - before) / 2**30
        pooled |= step is not None
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(steps):
        for name, run in made.items():
            seconds[name].append(_timed(run))
    for name, run in made.items():
        found[name] |= {"seconds": statistics.median(seconds[name]), "steady_s": _back_to_back(run, steps)}
        found[name] |= {**_launches(run), "loss": float(run())}
    return found


def _reserved() -> int:
    """Bytes that torch holds of the device, once it has given back what is unused."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def _back_to_back(step: Callable[[], Any], steps: int) -> float:
    return _timed(lambda: [step() for _ in range(steps)]) / steps


def _timed(step: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _launches(step: Callable[[], Any]) -> dict[str, float]:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    events = profiled.key_averages()
    calls = sum(event.count for event in events if "LaunchKernel" in event.key or "cudaGraphLaunch" in event.key)
    busy = sum(event.self_device_time_total for event in events)
    return {"launches": calls, "kernels_s": busy / 1e6}


def main() -> None:
    """Race and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=["gpt", *SIZES], default="gpt")
    parser.add_argument("--layers", type=int, help="another number of layers")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", nargs="*", help="some contenders")
    parser.add_argument("--ranks", type=int, default=1, help="as rank 0 of an emulated world")
    parser.add_argument("--machine", default="h200-nvlink-node", help="its machine, a preset")
    parser.add_argument("--phases", action="store_true", help="print what each phase of our compiler took")
    parser.add_argument("--save", action="store_true", help="keep the figures in benchmarks/results")
    given = parser.parse_args()
    size = GPT if given.size == "gpt" else SIZES[given.size]
    size = replace(size, layers=given.layers or size.layers)
    names = given.only or list(CONTENDERS if given.ranks == 1 else ON_RANKS)
    dtype = torch.bfloat16 if given.size == "gpt" else torch.float32
    machine = given.machine if given.ranks > 1 else None
    with emulated.world(preset(machine), given.ranks) if machine else contextlib.nullcontext():
        found = race(names, size, dtype, given.steps, given.phases, given.ranks, machine)
    columns = ["contender", "step ms", f"of {PEER}", "back to back", "of it", "predicted", "first s", "peak GiB"]
    table = Table(*columns, "launches", "kernels ms", "loss")
    peer = found.get(PEER, {})
    for name, figures in found.items():
        ratios = [figures[kind] / peer.get(kind, float("nan")) for kind in ("seconds", "steady_s")]
        table.add_row(
            name,
            f"{figures['seconds'] * 1e3:.2f}",
            f"{ratios[0]:.2f}",
            f"{figures['steady_s'] * 1e3:.2f}",
            f"{ratios[1]:.2f}",
            f"{figures['predicted_s'] * 1e3:.1f}" if "predicted_s" in figures else "",
            f"{figures['first_s']:.1f}",
            f"{figures['peak_gib']:.2f}" if "peak_gib" in figures else "",
            f"{figures['launches']:.0f}",
            f"{figures['kernels_s'] * 1e3:.2f}",
            f"{figures['loss']:.4f}",
        )
    Console(width=150).print(table)
    if given.save:
        where = f"-emulated-{given.ranks}-{machine}" if machine else ""
        kept = {"gpu": torch.cuda.get_device_name(), "layers": size.layers, "steps": given.steps, "contenders": found}
        save(f"gpu-step-{given.size}{where}", kept)


if __name__ == "__main__":
    main()
