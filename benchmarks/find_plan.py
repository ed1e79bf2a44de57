"""Plans that are found, against reality: every candidate that is predicted is also measured, on four gloo ranks.

    python -m benchmarks.find_plan                              # loopback, all four models
    python -m benchmarks.find_plan --network 1gbit --save       # four namespaces on a switch of 1 Gbit/s; needs root
    python -m benchmarks.find_plan --models wide --steps 8      # quicker

The machine is calibrated on these ranks first, and then predicted with: nothing else of what is measured is known to
the search. Candidates take turns, a step of each; times are medians of the slowest rank. `chosen` is how much longer
the plan that was chosen takes than the fastest one measured, `rank` the rank correlation of both orders.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import crossfade as cf
from benchmarks.figures import save
from benchmarks.network import hosts_on_a_switch, reason_against
from benchmarks.two_ranks import slowest
from crossfade import Ranks
from crossfade.cost.calibrate import calibrate, rows
from crossfade.cost.machine import ANY_AXIS, Machine
from crossfade.demo.model import SIZES, build
from crossfade.demo.model import next_token_loss as gpt_loss
from crossfade.search.plan_found import FoundPlan, Row

RANKS = 4
ENOUGH, WITHIN = 0.9, 0.05
_PATIENCE = 7200.0


class Llama(nn.Module):
    """Norm, rotary attention, gated products: a small Llama."""

    def __init__(self, width: int, layers: int, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(LlamaLayer(width, width // 32) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class LlamaLayer(nn.Module):
    """One layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attend to earlier positions, then products."""
        y = self.before(x)
        query, key, value = (
            own(y).view(*y.shape[:2], -1, self.size).transpose(1, 2) for own in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(_turned(query), _turned(key), value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _turned(x: Tensor) -> Tensor:
    """Rotary positions."""
    half = x.shape[-1] // 2
    rates = 1e4 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * rates
    one, two = x[..., :half], x[..., half:]
    return torch.cat([one * angles.cos() - two * angles.sin(), one * angles.sin() + two * angles.cos()], -1)


class Words(nn.Module):
    """One huge embedding and little else."""

    def __init__(self, words: int, width: int, classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of classes."""
        return self.down(F.gelu(self.up(self.words(tokens).mean(1))))


@dataclass(frozen=True)
class Model:
    """A model, what it is trained on, and the batch of all ranks."""

    make: Callable[[], nn.Module]
    loss_fn: Callable[..., Tensor]
    batch: Callable[[], tuple[Tensor, ...]]


def _tokens(samples: int, length: int, words: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(words, (samples, length), generator=generator) for _ in range(2))


def _gpt(size: str, samples: int) -> Model:
    chosen = SIZES[size]
    return Model(lambda: build(chosen), gpt_loss, lambda: _tokens(samples, chosen.length, chosen.vocabulary))


def _of_classes(samples: int) -> tuple[Tensor, ...]:
    tokens, targets = _tokens(samples, 64, 65536)
    return tokens, targets[:, 0] % 64


MODELS: Mapping[str, Model] = {
    "wide": _gpt("wide", 8),
    "deep": _gpt("deep", 8),
    "llama, long": Model(lambda: Llama(256, 4, 1024), gpt_loss, lambda: _tokens(4, 1024, 1024)),
    "embedding": Model(lambda: Words(65536, 128, 64), F.cross_entropy, lambda: _of_classes(64)),
}


def work(options: argparse.Namespace) -> dict[str, Any]:
    """What each rank does: calibrate, find, measure every candidate of every model."""
    logging.getLogger("crossfade").setLevel(logging.ERROR)
    machine = calibrate("calibrated", {ANY_AXIS: dist.group.WORLD}, seconds=options.calibrate)
    models = {name: compare(MODELS[name], machine, options) for name in options.models}
    return {"calibrated": json.loads(machine.to_json()), "models": models}


def compare(chosen: Model, machine: Machine, options: argparse.Namespace) -> dict[str, Any]:
    """The predicted and measured seconds of every candidate of one model."""
    found = find(chosen, machine, options.accumulate)
    _tell(f"{len(found.rows)} candidates predicted in {found.seconds:.0f} s")
    measured = measure(chosen, found, [row for row in found.rows if row.figures is not None], options.steps)
    return {"predicted_in": found.seconds, "candidates": measured, **account(measured)}


def find(chosen: Model, machine: Machine, accumulate: Sequence[int]) -> FoundPlan:
    """The plan that the first rank finds."""
    shared: list[Any] = [None]
    if not dist.get_rank():
        model = chosen.make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        given: dict[str, Any] = {"ranks": RANKS, "machine": machine, "accumulate": accumulate, "in_full": True}
        shared = [cf.find_plan(model, chosen.loss_fn, optimizer, chosen.batch(), **given).to_json()]
    dist.broadcast_object_list(shared)
    return FoundPlan.from_dict(json.loads(shared[0]), machine)


def measure(chosen: Model, found: FoundPlan, tried: Sequence[Row], steps: int) -> list[dict[str, Any]]:
    """The median seconds of a step of each candidate, all of which take turns."""
    batch, refused = chosen.batch(), []
    contenders: list[tuple[Row, cf.Step, list[float]]] = []
    for number, row in enumerate(tried, start=1):
        _tell(f"compiling {number} of {len(tried)}: {row.candidate}")
        torch.manual_seed(0)
        model = chosen.make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = cf.compile_step(model, chosen.loss_fn, optimizer, timeout=600.0, **found.options_of(row))
        try:
            for _ in range(3):
                step(*batch)
        except cf.CrossfadeError as error:
            refused.append({"candidate": str(row.candidate), "refused": error.found})
            continue
        contenders.append((row, step, []))
    for _ in range(steps):
        for _, step, seconds in contenders:
            dist.barrier()
            start = time.perf_counter()
            step(*batch)
            seconds.append(slowest(time.perf_counter() - start))
    measured = [
        {
            "candidate": str(row.candidate),
            "predicted": row.figures.seconds if row.figures is not None else None,
            "measured": statistics.median(seconds),
        }
        for row, _, seconds in contenders
    ]
    return [*measured, *refused]


def _tell(said: str) -> None:
    """What the first rank is at, on the error stream: a model takes many minutes."""
    if not dist.get_rank():
        print(said, file=sys.stderr, flush=True)


def account(measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How good the choice is, and the order."""
    both = [(each["predicted"], each["measured"]) for each in measured if "measured" in each]
    fastest, chosen = min(seconds for _, seconds in both), min(both)[1]
    return {"chosen_longer": chosen / fastest - 1, "rank_correlation": rank_correlation(both)}


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's, of pairs of numbers.

    >>> rank_correlation([(1, 10), (2, 20), (3, 30)]), rank_correlation([(1, 30), (2, 20), (3, 10)])
    (1.0, -1.0)
    """
    ranks = [_ranks([pair[side] for pair in pairs]) for side in range(2)]
    return statistics.correlation(*ranks)


def _ranks(values: Sequence[float]) -> list[float]:
    """The place of each in order; equal ones share the middle of theirs."""
    return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]  # type: ignore[attr-defined]


def finish(figures: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Print, and keep if asked to."""
    console = Console()
    for row in rows(Machine.from_json(json.dumps(figures["calibrated"]))):
        console.print("  ".join(row), highlight=False)
    for name, found in figures["models"].items():
        table = Table(title=f"{name} on {RANKS} ranks, {options.network}")
        for column in ("candidate", "predicted ms", "measured ms"):
            table.add_column(column, justify="left" if column == "candidate" else "right")
        for each in sorted(found["candidates"], key=lambda each: each.get("measured", float("inf"))):
            if "refused" in each:
                table.add_row(each["candidate"], "", each["refused"])
            else:
                table.add_row(each["candidate"], *(f"{1e3 * each[side]:.1f}" for side in ("predicted", "measured")))
        console.print(table)
        good = found["chosen_longer"] <= WITHIN and found["rank_correlation"] >= ENOUGH
        said = f"chosen {found['chosen_longer']:+.1%}, rank {found['rank_correlation']:.3f}"
        console.print(f"{name}: {said}: {'as hoped' if good else 'NOT good enough'}")
    if options.save:
        network = options.network.replace(" ", "-")
        save(f"find-plan-{network}", {**figures, "steps": options.steps, "load": os.getloadavg()[0]})


def main() -> None:
    """Parse the command line; start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--network", default="loopback", help="loopback, or a rate such as 1gbit")
    parser.add_argument("--accumulate", nargs="+", type=int, default=[1, 2], help="numbers of micro-batches")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--calibrate", type=float, default=10.0, help="seconds to measure the machine for")
    parser.add_argument("--save", action="store_true", help="keep the figures as JSON")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        figures = work(options)
        if not dist.get_rank():
            Path(options.worker).write_text(json.dumps(figures))
        dist.barrier()
        dist.destroy_process_group()
        return
    finish(run(options), options)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """What the first of the ranks says."""
    if options.network == "loopback":
        with Ranks(RANKS, timeout=_PATIENCE) as ranks:
            return ranks.run(work, options)[0]  # type: ignore[no-any-return]
    if why_not := reason_against():
        raise SystemExit(f"found --network {options.network}, but {why_not}. Remedy: run as root, or leave it out.")
    with tempfile.TemporaryDirectory() as folder, hosts_on_a_switch(RANKS, options.network) as hosts:
        file = Path(folder) / "figures.json"
        given = ["--models", *options.models, "--accumulate", *map(str, options.accumulate), "--worker", str(file)]
        given += ["--steps", str(options.steps), "--calibrate", str(options.calibrate)]
        hosts.torchrun("benchmarks.find_plan", *given, timeout=_PATIENCE)
        return json.loads(file.read_text())  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
