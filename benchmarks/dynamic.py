"""Batches of 200 lengths: captures and time of symbolic sizes, against a capture for every length, and eager torch.

    python -m benchmarks.dynamic                    # one device, a small GPT
    python -m benchmarks.dynamic --size tiny --lengths 50

The second table is of one length: steps of a program of symbolic sizes and of one for this length alone, in turns, in
one run; medians. What all lengths would take with a capture each is measured on a few of them, and scaled up.
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import crossfade as cf
from crossfade.demo.model import GPT, Size, next_token_loss

SIZES = {
    "tiny": Size(width=64, heads=2, layers=2, vocabulary=256, length=256, batch=4),
    "small": Size(width=256, heads=4, layers=4, vocabulary=1024, length=256, batch=4),
}
_MEASURED = 5
"""Lengths that are captured one by one, of which the time of all follows."""


def main() -> None:
    """Parse the command line, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--lengths", type=int, default=200)
    parser.add_argument("--turns", type=int, default=60)
    options = parser.parse_args()
    size = SIZES[options.size]
    lengths = random.Random(0).sample(range(8, size.length + 1), min(options.lengths, size.length - 8))
    console = Console()
    console.print(_over_lengths(size, lengths))
    console.print(_in_turns(size, options.turns))


def _compiled(size: Size, dynamic: bool | None) -> cf.Step:
    torch.manual_seed(0)
    model = GPT(size)
    return cf.compile_step(model, next_token_loss, torch.optim.AdamW(model.parameters(), lr=1e-3), dynamic=dynamic)


def _eager(size: Size) -> Callable[[Tensor, Tensor], Tensor]:
    torch.manual_seed(0)
    model = GPT(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = next_token_loss(model(tokens), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _batch(size: Size, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    tokens, labels = (torch.randint(0, size.vocabulary, (size.batch, length), generator=generator) for _ in range(2))
    return tokens, labels


def _seconds(step: Callable[..., Tensor], size: Size, lengths: list[int]) -> tuple[float, list[float]]:
    start = time.perf_counter()
    losses = [float(step(*_batch(size, length))) for length in lengths]
    return time.perf_counter() - start, losses


def _over_lengths(size: Size, lengths: list[int]) -> Table:
    """One row each for eager torch, symbolic sizes, and a capture for every length."""
    table = Table(
        "", "captures", "seconds", "largest difference of a loss", "peak memory", title=f"{len(lengths)} lengths"
    )
    seconds, expected = _seconds(_eager(size), size, lengths)
    table.add_row("eager torch", "", f"{seconds:.1f}", "", _memory())
    for dynamic in (None, True):
        step = _compiled(size, dynamic)
        seconds, losses = _seconds(step, size, lengths)
        apart = max(abs(found - loss) for found, loss in zip(losses, expected, strict=True))
        table.add_row(f"dynamic={dynamic}", str(step.captures), f"{seconds:.1f}", f"{apart:.1e}", _memory())
    step = _compiled(size, False)
    seconds, losses = _seconds(step, size, lengths[:_MEASURED])
    apart = max(abs(found - loss) for found, loss in zip(losses, expected, strict=False))
    scaled = seconds * len(lengths) / step.captures
    words = f"{scaled:.0f}, from {seconds:.1f} for {step.captures}"
    table.add_row("dynamic=False", str(len(lengths)), words, f"{apart:.1e}", _memory())
    return table


def _in_turns(size: Size, turns: int) -> Table:
    """Step times at one length, of a program for it alone and of one of symbolic sizes."""
    batch = _batch(size, size.length // 2)
    steps = {"static": _compiled(size, False), "symbolic": _compiled(size, True)}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(3):
            step(*batch)
    for turn in range(turns):
        for name in sorted(steps, reverse=bool(turn % 2)):
            start = time.perf_counter()
            steps[name](*batch)
            times[name].append(time.perf_counter() - start)
    table = Table("", "median ms", "fastest ms", title=f"steps of length {size.length // 2}, in turns")
    for name, found in times.items():
        table.add_row(name, f"{1e3 * statistics.median(found):.2f}", f"{1e3 * min(found):.2f}")
    ratios = [symbolic / static for static, symbolic in zip(times["static"], times["symbolic"], strict=True)]
    table.add_row(
        "symbolic / static", f"{statistics.median(ratios):.3f}", f"{min(times['symbolic']) / min(times['static']):.3f}"
    )
    return table


def _memory() -> str:
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB"


if __name__ == "__main__":
    main()
