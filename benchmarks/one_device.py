"""A training step on one device, nothing exchanged: eager torch with each form of AdamW, and Crossfade.

    python -m benchmarks.one_device --size deep [--device cuda] [--save]

Contenders take turns, step by step, so that a busy machine is fair to all; medians. On CUDA also how many kernels a
step launches: calling them is most of what steps of small models take.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from benchmarks.figures import save
from crossfade import compile_step
from crossfade.demo.contenders import eager_step
from crossfade.demo.model import SIZES, Size, batches, build, next_token_loss

OPTIONS: dict[str, dict[str, Any]] = {
    "eager, one parameter at a time": {"foreach": False},
    "eager, foreach": {"foreach": True},
    "eager, fused": {"fused": True},
    "Crossfade": {},
}
WARM_UP = 5


def stepping(name: str, size: Size, device: str) -> Callable[[], torch.Tensor]:
    """One contender on one batch."""
    model = build(size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **OPTIONS[name])
    tokens, targets = (part.to(device) for part in batches(size, 1, 1)[0])
    ours = name == "Crossfade"
    step = compile_step(model, next_token_loss, optimizer) if ours else eager_step(model, model, optimizer)
    return lambda: step(tokens, targets)


def race(size: Size, device: str, steps: int) -> dict[str, dict[str, float]]:
    """Median seconds of each contender's step, its last loss, and on CUDA its launches."""
    made = {name: stepping(name, size, device) for name in OPTIONS}
    seconds: dict[str, list[float]] = {name: [] for name in made}
    losses: dict[str, float] = {}
    for number in range(WARM_UP + steps):
        for name, step in made.items():
            _finish(device)
            start = time.perf_counter()
            loss = step()
            _finish(device)
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
            losses[name] = float(loss)
    return {
        name: {"seconds": statistics.median(seconds[name]), "loss": losses[name], **_launches(step, device)}
        for name, step in made.items()
    }


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _launches(step: Callable[[], Any], device: str) -> dict[str, int]:
    if device != "cuda":
        return {}
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        step()
        _finish(device)
    calls = [event for event in profiled.key_averages() if "LaunchKernel" in event.key]
    return {"launches": sum(event.count for event in calls)}


def main() -> None:
    """Race, print, keep if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="deep")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save", action="store_true", help="keep the figures as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = race(SIZES[options.size], options.device, options.steps)
    best = min(figures["seconds"] for name, figures in found.items() if name != "Crossfade")
    table = Table(title=f"{options.size}, one {options.device} device")
    for column in ("contender", "ms a step", "speed against torch's best", "launches"):
        table.add_column(column)
    for name, figures in found.items():
        ratio = f"{best / figures['seconds']:.2f}"
        table.add_row(name, f"{1e3 * figures['seconds']:.2f}", ratio, str(figures.get("launches", "")))
    console = Console()
    console.print(table)
    losses = [figures["loss"] for figures in found.values()]
    console.print(f"losses after the last step differ by at most {max(losses) - min(losses):.1e}", highlight=False)
    if options.save:
        gpu = {"gpu": torch.cuda.get_device_name()} if options.device == "cuda" else {}
        save(f"one-device-{options.size}-{options.device}", {**gpu, "steps": options.steps, "contenders": found})


if __name__ == "__main__":
    main()
