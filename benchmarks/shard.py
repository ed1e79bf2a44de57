"""How long the tensor-parallel transform takes: `python -m benchmarks.shard [--layers 4,8,16,32] [--save]`.

A Llama of the transformers library with few channels and so many layers, split over 8 ranks: what counts is the number
of nodes. Static and dynamic, exported once, localized three times, best taken. Beside it, in the same run, torch's own
transform on the one kind of model that it takes: a stack of two-layer perceptrons on two-dimensional inputs.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.export import ExportedProgram

from benchmarks import graphs
from benchmarks.figures import save
from crossfade.shard.tensor.localize import Request, localize
from crossfade.shard.tensor.plan import Plan

RANKS, REPEATS = 8, 3


def main() -> None:
    """Measure what is asked for and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", default="4,8,16,32")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    layers = [int(number) for number in options.layers.split(",")]
    warnings.filterwarnings("ignore")
    graphs.start_fake_world()
    rows = [row for kind in ("static", "dynamic") for row in _llamas(kind, layers)] + _perceptrons(layers)
    table = Table("program", "layers", "nodes", "ours, s", "torch, s", "torch / ours", "growth")
    for row in rows:
        table.add_row(
            *(_cell(row[name]) for name in ("program", "layers", "nodes", "ours", "torch", "ratio", "growth"))
        )
    Console().print(table)
    if options.save:
        save("shard", {"rows": rows})


def _llamas(kind: str, layers: list[int]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for count in layers:
        exported, plan = _llama(count, dynamic=kind == "dynamic")
        seconds = _best(lambda exported=exported, plan=plan: _ours(exported, plan))
        rows.append(_row(f"llama, {kind}", count, exported, seconds, None, rows))
    return rows


def _perceptrons(layers: list[int]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for count in layers:
        blocks = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(count)]
        exported = torch.export.export(_Stack(*blocks), (torch.ones(8, 64),)).run_decompositions()
        first = {f"{index}.0": ColwiseParallel for index in range(count)}
        styles = first | {f"{index}.2": RowwiseParallel for index in range(count)}
        ours = _best(lambda exported=exported, styles=styles: _ours(exported, Plan(styles)))
        theirs = _best(lambda exported=exported, styles=styles: _torch(exported, styles))
        rows.append(_row("perceptrons, decomposed", count, exported, ours, theirs, rows))
    return rows


class _Stack(nn.Sequential):
    """Torch's transform stumbles over an input called `input`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)


def _llama(layers: int, *, dynamic: bool) -> tuple[ExportedProgram, Plan]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    sizes = {"input_ids": {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}} if dynamic else None
    tokens = {"input_ids": torch.zeros(2, 16, dtype=torch.int64)}
    exported = torch.export.export(model, (), tokens, dynamic_shapes=sizes, strict=False)
    return exported, Plan.from_model(model)


def _ours(exported: ExportedProgram, plan: Plan) -> None:
    localize(exported, plan.resolve(exported, RANKS), RANKS, "tp", Request())


def _torch(exported: ExportedProgram, styles: dict[str, Any]) -> None:
    from torch.distributed.tensor.experimental._tp_transform import tensor_parallel_transformation

    tensor_parallel_transformation(exported, 0, RANKS, "cpu", styles)


def _best(work: Callable[[], None]) -> float:
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _row(
    program: str,
    layers: int,
    exported: ExportedProgram,
    ours: float,
    theirs: float | None,
    before: list[dict[str, Any]],
) -> dict[str, Any]:
    nodes = len(exported.graph.nodes)
    first = before[0] if before else None
    growth = math.log(ours / first["ours"]) / math.log(nodes / first["nodes"]) if first else None
    ratio = theirs / ours if theirs is not None else None
    names = ("program", "layers", "nodes", "ours", "torch", "ratio", "growth")
    return dict(zip(names, (program, layers, nodes, ours, theirs, ratio, growth), strict=True))


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
