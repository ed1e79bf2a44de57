"""Step time on a mesh of four ranks, two by two: FSDP2 with DTensor's tensor parallelism against Crossfade's.

    python -m benchmarks.step_on_mesh                       # four ranks on loopback
    python -m benchmarks.step_on_mesh --size deep --save    # also keep the figures in benchmarks/results/

All ranks share this machine's processors and its loopback: with fewer cores than ranks, times say how much work and
how many messages a step takes, and little about hiding. Steps are planned for the preset of a
loopback. Contenders take turns in one run, a step of each; times are medians, of the slowest rank. `steady` steps run
back to back, by fours of each in turn, the first not counted.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from benchmarks.figures import save
from benchmarks.two_ranks import seconds_of, slowest
from crossfade import Ranks
from crossfade.compile.training import compile_step
from crossfade.demo.contenders import Contender, eager_step, race
from crossfade.demo.model import SIZES, Attention, Size, batches, build, next_token_loss

MESH = {"dp": 2, "tp": 2}
PLAN = {
    **dict.fromkeys([f"blocks.*.attention.{name}" for name in ("query", "key", "value")], "colwise"),
    "blocks.*.attention.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}


class Apart(nn.Module):
    """Causal self-attention with three projections instead of a fused one, which DTensor cannot split by heads."""

    def __init__(self, fused: Attention) -> None:
        super().__init__()
        self.head_width = fused.out.in_features // fused.heads
        self.query, self.key, self.value = (nn.Linear(fused.out.in_features, fused.out.in_features) for _ in range(3))
        self.out = fused.out
        with torch.no_grad():
            for place, own in enumerate((self.query, self.key, self.value)):
                own.weight.copy_(fused.query_key_value.weight.chunk(3)[place])
                own.bias.copy_(fused.query_key_value.bias.chunk(3)[place])

    def forward(self, x: Tensor) -> Tensor:
        """Attend to earlier positions."""
        heads = (*x.shape[:2], -1, self.head_width)
        query, key, value = (own(x).view(heads).transpose(1, 2) for own in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def model_of(size: Size) -> nn.Module:
    """The demonstration's GPT, its attention in three projections."""
    model = build(size)
    for block in model.blocks:
        block.attention = Apart(block.attention)
    return model


def torchs(size: Size, *, reshard: bool) -> Contender:
    """FSDP2 over dp, one unit a block, of modules that DTensor splits over tp."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = model_of(size), init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    parallelize_module(model, mesh["tp"], {name: styles[style]() for name, style in PLAN.items()})
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"], reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh["dp"], reshard_after_forward=reshard)
    step = eager_step(model, model)

    def on_own_part(*batch: Tensor) -> Tensor:
        return step(*(part.chunk(MESH["dp"])[mesh.get_local_rank("dp")] for part in batch))

    return Contender(f"torch FSDP2 + TP, {'resharded' if reshard else 'kept'} after the forward", on_own_part)


def ours(size: Size, mode: Any, machine: str | None) -> Contender:
    """The whole step as one graph."""
    model = model_of(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    given: dict[str, Any] = {"data_parallel": mode, "tensor_parallel": PLAN, "machine": machine}
    step = compile_step(model, next_token_loss, optimizer, MESH, **given)
    return Contender(f"Crossfade {mode} + plan{', planned' if machine else ''}", step, compiled=step)


def work(size: str, steps: int) -> dict[str, Any]:
    """What each rank does: race, then steady steps."""
    chosen = SIZES[size]
    makers: list[Callable[[], Contender]] = [
        *(partial(torchs, chosen, reshard=reshard) for reshard in (False, True)),
        *(partial(ours, chosen, mode, "loopback-gloo") for mode in ("zero1", "zero2", "zero3")),
        partial(ours, chosen, "replicate", "loopback-gloo"),
    ]
    entered = [make() for make in makers]
    measured = race(entered, chosen, steps=steps)
    batch = batches(chosen, dist.get_world_size(), 1)[0]
    steady: dict[str, list[float]] = {contender.name: [] for contender in entered}
    for contender in [*entered] * 4:
        steady[contender.name] += [slowest(seconds_of(partial(contender.step, *batch))) for _ in range(4)][1:]
    return {
        "times": {result.name: result.median for result in measured},
        "losses": {result.name: result.losses[-1] for result in measured},
        "steady": {name: statistics.median(seconds) for name, seconds in steady.items()},
        "collectives": {c.name: c.compiled.report.total_after[0] for c in entered if c.compiled is not None},
        "ranks": dist.get_world_size(),
    }


def finish(figures: dict[str, Any], options: argparse.Namespace) -> None:
    """Print, and keep if asked to."""
    table = Table(title=f"{options.size} on {' x '.join(f'{n}={s}' for n, s in MESH.items())}, loopback")
    for column in ("contender", "ms, in turns", "ms, steady", "last loss", "collectives"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for name, seconds in sorted(figures["times"].items(), key=lambda item: item[1]):
        counts = figures["collectives"].get(name)
        row = [f"{1e3 * seconds:.0f}", f"{1e3 * figures['steady'][name]:.0f}", f"{figures['losses'][name]:.5f}"]
        table.add_row(name, *row, "" if counts is None else str(counts))
    Console().print(table)
    if options.save:
        save(f"on-mesh-{options.size}-loopback", {**figures, "steps": options.steps})


def main() -> None:
    """Parse the command line, run on four ranks and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="wide")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save", action="store_true", help="keep the figures as JSON")
    options = parser.parse_args()
    with Ranks(4, timeout=1800) as ranks:
        finish(ranks.run(work, options.size, options.steps)[0], options)


if __name__ == "__main__":
    main()
