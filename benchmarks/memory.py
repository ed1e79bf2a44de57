"""Peak memory of a training step: eager torch, torch's DDP and Crossfade, each in processes of its own.

    python -m benchmarks.memory
    python -m benchmarks.memory --device cuda [--budgets 22 16 6] [--seconds 280] [--only "Crossfade, 16 GiB"] [--save]

What is printed is how far the resident set of a rank grows above what it was before the first step, after a few steps;
then what steps of one device within budgets hold, by their own account, with and without moving values to the host.

On a GPU: milliseconds and peak GiB (`max_memory_allocated` of a step, the model and the optimizer's state included;
beside it what was predicted) of the GPT of `benchmarks.gpu_step` at batch 32, one contender after the other: eager
torch, every block checkpointed, `torch.compile` with budgets of its own (`activation_memory_budget`), and Crossfade
within budgets in GiB, computing again only, and offloading too. After so many seconds no other contender begins.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.utils.checkpoint import checkpoint

from benchmarks.figures import save
from benchmarks.gpu_step import GPT
from crossfade import Ranks, compile_step
from crossfade.demo import contenders
from crossfade.demo.model import SIZES, Size, batches, build, next_token_loss
from crossfade.errors import MemoryLimitError

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


def accounted(size: Size) -> list[tuple[str, float, float]]:
    """Of steps on this device, each with its budget in words: peak in MB and predicted milliseconds for it."""

    def memory_of(**options: Any) -> Any:
        torch.manual_seed(0)
        model = build(size)
        step = compile_step(model, next_token_loss, torch.optim.AdamW(model.parameters()), **options)
        return step.prepare(*batches(size, 1, 1)[0]).memory

    natural = memory_of(memory=1e15).peak
    rows = [("no budget", natural / 1e6, 0.0)]
    for share in (0.8, 0.6, 0.4):
        for name, options in (("computing again", {}), ("offloading too", {"offload": "auto"})):
            try:
                found = memory_of(memory=share * natural, **options)
                rows.append((f"{share:.0%}, {name}", found.peak / 1e6, 1e3 * found.seconds))
            except MemoryLimitError as refused:
                rows.append((f"{share:.0%}, {name}: least {refused.least / 1e6:.0f} MB", float("nan"), float("nan")))
    return rows


BUDGETS = (0.5, 0.2)
"""Of torch.compile: shares of what it would save between nothing and everything computed again."""
STEPS = 8


Begun = tuple[Callable[[], Any], Callable[[], dict[str, float]]]
"""What runs a step, and, once it ran, what was predicted of it."""


def on_gpu(budgets: list[float]) -> dict[str, Callable[[], Begun]]:
    """What begins each contender, by name."""
    size = replace(GPT, batch=32)

    def crossfade(**options: Any) -> Begun:
        model = build(size).to("cuda", torch.bfloat16)
        step = compile_step(model, next_token_loss, torch.optim.AdamW(model.parameters(), lr=1e-3), **options)
        batch = [part.to("cuda") for part in batches(size, 1, 1)[0]]
        return lambda: step(*batch), lambda: {"predicted": step.memory.peak / 2**30} if options else {}

    def peer(compiled: bool, budget: float | None = None, checkpointed: bool = False) -> Begun:
        model = build(size).to("cuda", torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        tokens, targets = (part.to("cuda") for part in batches(size, 1, 1)[0])
        for block in model.blocks if checkpointed else ():
            forward = block.forward
            block.forward = lambda *given, forward=forward: checkpoint(forward, *given, use_reentrant=False)

        def loss_of(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return next_token_loss(model(tokens), targets)

        computed = torch.compile(loss_of) if compiled else loss_of

        def train() -> torch.Tensor:
            with torch._functorch.config.patch(activation_memory_budget=1.0 if budget is None else budget):
                loss = computed(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return train, dict

    rows: dict[str, Callable[[], Begun]] = {
        "eager": lambda: peer(False),
        "eager, every block checkpointed": lambda: peer(False, checkpointed=True),
        "torch.compile": lambda: peer(True),
        "Crossfade": crossfade,
    }
    for budget in budgets:
        given = {"memory": budget * 2**30}
        rows[f"Crossfade, {budget:g} GiB"] = lambda given=given: crossfade(**given)
        rows[f"Crossfade, {budget:g} GiB, offloading too"] = lambda given=given: crossfade(**given, offload="auto")
    rows["Crossfade, offload=True"] = lambda: crossfade(offload=True)
    for share in BUDGETS:
        rows[f"torch.compile, budget {share:g}"] = lambda share=share: peer(True, share)
    return rows


def race_on_gpu(budgets: list[float], seconds: float, only: list[str]) -> dict[str, dict[str, Any]]:
    """For each contender the milliseconds of a step and its peak, printed as they come."""
    began, found = time.perf_counter(), dict[str, dict[str, Any]]()
    for name, begin in on_gpu(budgets).items():
        if only and name not in only:
            continue
        if time.perf_counter() - began > seconds:
            found[name] = {"left": "no time left: name it with --only"}
        else:
            torch.compiler.reset()
            gc.collect()
            torch.cuda.empty_cache()
            try:
                found[name] = _measured_on_gpu(begin)
            except MemoryLimitError as refused:
                found[name] = {"left": f"least {refused.least / 2**30:.1f} GiB"}
        print(f"{name}: {found[name]}", flush=True)
    return found


def _measured_on_gpu(begin: Callable[[], Begun]) -> dict[str, Any]:
    before = torch.cuda.memory_allocated()  # what contenders before this one did not give back
    run, predicted = begin()
    run()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):  # the second step may be recorded as CUDA graphs
        run()
    torch.cuda.synchronize()
    peak, taken = torch.cuda.max_memory_allocated(), []
    for _ in range(STEPS):
        start = time.perf_counter()
        loss = run()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    gib = {"peak": (peak - before) / 2**30, "before": before / 2**30, **predicted()}
    return {"ms": 1e3 * statistics.median(taken), "loss": float(loss), **gib}


def main() -> None:
    """Measure each contender in fresh processes and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="wide")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--budgets", type=float, nargs="+", default=[22.0, 16.0, 6.0], help="GiB, on a GPU")
    parser.add_argument("--seconds", type=float, default=280.0, help="after these no other contender begins, on a GPU")
    parser.add_argument("--only", nargs="+", default=[], help="contenders on a GPU, by name")
    parser.add_argument("--save", action="store_true", help="keep the figures as JSON")
    options = parser.parse_args()
    if options.device == "cuda":
        raced = race_on_gpu(options.budgets, options.seconds, options.only)
        table = Table("contender", "ms a step", "peak GiB", "predicted", title="GPT, 404 million parameters, batch 32")
        for name, row in raced.items():
            peaks = (f"{row[key]:.1f}" if key in row else "" for key in ("peak", "predicted"))
            table.add_row(name, f"{row['ms']:.1f}" if "ms" in row else row["left"], *peaks)
        Console().print(table)
        if options.save:
            save("memory-cuda", {"contenders": raced})
        return
    figures = {}
    table = Table("contender", "MB above the start", title=options.size)
    for name in CONTENDERS:
        with Ranks(2) as ranks:
            results: list[Any] = ranks.run(grown, name, options.size, 5)
        figures[name] = max(results)
        table.add_row(name, f"{figures[name]:.0f}")
    Console().print(table)
    within = Table("budget", "peak MB", "ms for it", title="by the step's own account")
    for words, peak, milliseconds in accounted(SIZES[options.size]):
        within.add_row(words, f"{peak:.0f}", f"{milliseconds:.1f}")
    Console().print(within)
    if options.save:
        save(f"memory-{options.size}", {"megabytes_above_the_start": figures})


if __name__ == "__main__":
    main()
