"""What it costs to see, before every step, that nothing has changed that the program was captured with.

    python -m benchmarks.guards                  # the demo's `deep`: 293 parameters, on one device
    python -m benchmarks.guards --size wide --save

Steps with guards and with guards off run in turns, on one compiled step; times are medians, and the ratio is the median
of those of steps that ran one after the other, since the speed of a shared machine changes within seconds. A check is
also timed alone, between steps, when little of what it reads is in the caches.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from operator import truediv
from typing import Any

import torch
from rich.console import Console

from benchmarks.figures import save
from crossfade import Step, compile_step
from crossfade.capture.baked_in import BakedIn
from crossfade.demo.model import SIZES, batches, build, next_token_loss

LIMIT = 0.01
"""The part of a step that a check may take."""


def main() -> None:
    """Parse the command line, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="deep")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--save", action="store_true", help="keep the figures as JSON")
    options = parser.parse_args()
    figures = measure(options.size, options.rounds)
    _show(figures)
    if options.save:
        save(f"guards-{options.size}", figures)


def measure(size: str, rounds: int) -> dict[str, Any]:
    """Medians of steps and of checks, in seconds.

    >>> sorted(measure("tiny", 1))
    ['check', 'off', 'on', 'parameters', 'ratio', 'size', 'watched']
    """
    torch.set_num_threads(1)
    model, batch = build(SIZES[size]), batches(SIZES[size], 1, 1)[0]
    step = compile_step(model, next_token_loss, torch.optim.AdamW(model.parameters()))
    step(*batch)
    on, off, checks = [], [], []
    for number in range(rounds):
        for turn in sorted((False, True), reverse=bool(number % 2)):
            with guards_off(step) if turn else contextlib.nullcontext():
                (off if turn else on).append(_seconds(lambda: step(*batch)))
        checks.append(_seconds(_baked_in(step).number))
    times = {name: statistics.median(found) for name, found in {"on": on, "off": off, "check": checks}.items()}
    return {
        "size": size,
        "parameters": len(list(model.parameters())),
        "watched": step.report.facts["guards"],
        **times,
        "ratio": statistics.median(map(truediv, on, off)),
    }


@contextlib.contextmanager
def guards_off(step: Step) -> Iterator[None]:
    """Let a step take for granted that nothing has changed."""
    baked_in = _baked_in(step)
    number = baked_in.number()
    baked_in.number = lambda: number  # type: ignore[method-assign]
    try:
        yield
    finally:
        del baked_in.number  # the class's is there again


def _baked_in(step: Step) -> BakedIn:
    return step._key.__self__.baked_in  # type: ignore[attr-defined]


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _show(figures: dict[str, Any]) -> None:
    part = figures["check"] / figures["off"]
    console = Console()
    console.print(f"{figures['size']}: {figures['parameters']} parameters; {figures['watched']}")
    console.print(f"step with guards     {figures['on'] * 1e3:8.2f} ms")
    console.print(f"step with guards off {figures['off'] * 1e3:8.2f} ms, ratio {figures['ratio']:.4f}")
    verdict = "within" if part < LIMIT else "MORE THAN"
    console.print(f"one check            {figures['check'] * 1e6:8.0f} us, {part:.2%} of a step: {verdict} {LIMIT:.0%}")


if __name__ == "__main__":
    main()
