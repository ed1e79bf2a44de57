"""Forecasts checked against published measurements: one A100 machine fitted, all other rows predicted.

python -m benchmarks.forecasts [--save] [--split N]
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy

from benchmarks.forecast_models import GPT_PLAN, gpt, tokens
from crossfade.cost.fit import CONSTANTS, CollectiveTime, Fitted, StepTime, fit
from crossfade.cost.machine import Launching, Machine
from crossfade.cost.presets import preset
from crossfade.forecast.capture import Captured, capture_model
from crossfade.forecast.prepared import Prepared
from crossfade.forecast.recompute_layers import RecomputeLayers
from crossfade.forecast.step_time import Exchanged, Once, StepTimes
from crossfade.graph.collectives import Kind
from crossfade.graph.passes import run_passes
from crossfade.graph.program import InputKind, Program, tensor_bytes

PUBLISHED = Path(__file__).parent / "published"
_EVERY_ONE_NODE, _EVERY_SEVERAL = 11, 3
"""The rule by which rows are fitted: every 11th of those on one node, every 3rd of those on several, as they stand."""
_LAUNCHING = Launching(36e-6, 0.15)
"""Where the fit of the host starts: a Python framework of 2022 that calls every operator, on hosts of that time."""
_UPDATE_BYTES = 40
"""Bytes moved for each parameter that mixed-precision Adam updates: gradient of 2 read and of 4 written and read, three
states of 4 read and written, the parameter of 2 written, and the gradient read once more for its norm."""


@dataclass(frozen=True)
class Row:
    """One measured iteration."""

    gpus: int
    global_batch: int
    micro_batch: int
    hidden: int
    heads: int
    layers: int
    sequence: int
    tensor_parallel: int
    data_parallel: int
    seconds: float

    @property
    def several_nodes(self) -> bool:
        return self.gpus > 8

    @property
    def recomputes(self) -> bool:
        """Whether layers compute their forward again in the backward.

        The source says so of all. With it, the rows on one node would need products at the rate of the data sheet.
        """
        return self.several_nodes

    def __str__(self) -> str:
        return (f"{self.gpus} GPUs, tp={self.tensor_parallel} dp={self.data_parallel}, hidden {self.hidden} x "
                f"{self.layers}, length {self.sequence}, micro-batch {self.micro_batch} of "
                f"{self.global_batch}")  # fmt: skip


def rows(path: Path = PUBLISHED / "a100_gpt_iterations.csv") -> list[Row]:
    """The measured iterations without pipeline parallelism."""
    names = ("gpus", "global_batch", "micro_batch", "hidden", "heads", "layers", "sequence", "tensor_parallel",
             "data_parallel")  # fmt: skip
    with path.open() as file:
        found = [row for row in csv.DictReader(file) if int(row["pipeline_parallel"]) == 1]
    return [Row(*(int(row[name]) for name in names), float(row["iteration_ms"]) / 1e3) for row in found]


def all_reduces(path: Path = PUBLISHED / "a100_all_reduce.csv") -> list[CollectiveTime]:
    """The measured all-reduces inside a node."""
    with path.open() as file:
        return [
            CollectiveTime(Kind.ALL_REDUCE, int(row["gpus"]), int(row["bytes"]), float(row["microseconds"]) * 1e-6)
            for row in csv.DictReader(file)
        ]


@functools.cache
def captured(hidden: int, heads: int, length: int, batch: int, ranks: int) -> Captured:
    return capture_model(gpt(hidden, heads, 3, length, ranks), tokens(batch, length), ranks=ranks, plan=GPT_PLAN)


@functools.cache
def program(hidden: int, heads: int, layers: int, length: int, batch: int, ranks: int, again: bool) -> Program:
    """Forward and backward of a few layers, every layer's forward computed again if asked for."""
    plain = captured(hidden, heads, length, batch, ranks).with_layers(layers)
    return run_passes(plain, [RecomputeLayers()] if again else [])


@functools.cache
def prepared(
    hidden: int, heads: int, layers: int, length: int, batch: int, mesh: tuple[tuple[str, int], ...], again: bool
) -> Prepared:
    return Prepared.of(program(hidden, heads, layers, length, batch, dict(mesh)["tp"], again), dict(mesh))


def parameter_bytes(made: Program) -> int:
    return sum(tensor_bytes(node.meta["val"]) for item, node in made.named_inputs() if item.kind is InputKind.PARAMETER)


def step(row: Row) -> StepTimes:
    """The step of a row, as it ran: gradients reduced in half precision after the backward, in one piece."""
    mesh = (("dp", row.data_parallel), ("tp", row.tensor_parallel))
    few, more = (
        prepared(row.hidden, row.heads, layers, row.sequence, row.micro_batch, mesh, row.recomputes)
        for layers in (3, 4)
    )
    fewer, one_more = parameter_bytes(few.program), parameter_bytes(more.program)
    held = one_more + (row.layers - 4) * (one_more - fewer)
    reduced = (Exchanged(Kind.ALL_REDUCE, held, "dp"),) if row.data_parallel > 1 else ()
    micro_batches = row.global_batch // (row.micro_batch * row.data_parallel)
    once = Once(reduced, update_bytes=held / 2 * _UPDATE_BYTES, added_bytes=held * 3)
    return StepTimes(more, row.layers - 4, micro_batches, once)


def split(found: Sequence[Row], offset: int) -> tuple[list[Row], list[Row]]:
    """The rows to fit and those to predict."""
    one = [row for row in found if not row.several_nodes]
    several = [row for row in found if row.several_nodes]
    fitted = one[offset % _EVERY_ONE_NODE :: _EVERY_ONE_NODE] + several[offset % _EVERY_SEVERAL :: _EVERY_SEVERAL]
    return fitted, [row for row in found if row not in fitted]


def fitted_a100(fitted: Sequence[Row], collectives: Sequence[CollectiveTime]) -> Fitted:
    """One machine from the all-reduces (every 4th of them) and some rows."""
    start = dataclasses.replace(preset("a100-cluster"), launching=_LAUNCHING)
    constants = [dataclasses.replace(each, spread=0.5) if each.path == "overhead" else each for each in CONSTANTS]
    steps = [StepTime(str(row), row.seconds, step(row).seconds) for row in fitted]
    return fit(start, list(collectives)[::4], steps, constants)


def errors(machine: Machine, found: Sequence[Row]) -> dict[Row, float]:
    return {row: step(row).seconds(machine) / row.seconds - 1 for row in found}


def summary(found: Mapping[Row, float]) -> dict[str, float]:
    """Mean and worst error, signed bias, and how well the order of the rows is told."""
    values = numpy.array(list(found.values()))
    measured = numpy.array([row.seconds for row in found])
    ranks = [numpy.argsort(numpy.argsort(each)) for each in (measured, measured * (1 + values))]
    return {
        "rows": len(values),
        "mean": float(numpy.abs(values).mean()),
        "worst": float(numpy.abs(values).max()),
        "bias": float(values.mean()),
        "rank_correlation": float(numpy.corrcoef(*ranks)[0, 1]) if len(values) > 2 else 1.0,
    }


def groups(found: Mapping[Row, float]) -> dict[str, dict[str, float]]:
    """Summaries by one or several nodes, tensor parallelism, and size."""
    keys = [
        ("all", lambda row: True),
        ("one node", lambda row: not row.several_nodes),
        ("several nodes", lambda row: row.several_nodes),
        *((f"tp={ranks}", lambda row, ranks=ranks: row.tensor_parallel == ranks) for ranks in (1, 2, 4, 8, 16)),
        *((f"hidden {size}", lambda row, size=size: row.hidden == size) for size in (1024, 2048, 3072, 6144)),
        *((f"micro-batch {n}", lambda row, n=n: row.micro_batch == n) for n in (1, 2, 4, 8)),
    ]
    chosen = {name: {row: error for row, error in found.items() if belongs(row)} for name, belongs in keys}
    return {name: summary(some) for name, some in chosen.items() if some}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--split", type=int, default=0, help="which rows are fitted: those from this one on")
    parser.add_argument("--rows", type=Path, default=PUBLISHED / "a100_gpt_iterations.csv")
    parser.add_argument("--save", action="store_true")
    chosen = parser.parse_args()
    begun = time.perf_counter()
    fitted, others = split(rows(), chosen.split)
    if chosen.rows.resolve() != (PUBLISHED / "a100_gpt_iterations.csv").resolve():
        others = rows(chosen.rows)
    for row in fitted:
        step(row)
    print(f"programs of {len(fitted)} fitted rows: {time.perf_counter() - begun:.0f} s", flush=True)
    found = fitted_a100(fitted, all_reduces())
    print(found)
    missed = errors(found.machine, others)
    by_group = groups(missed)
    for name, each in by_group.items():
        print(f"{name:16} {each['rows']:4} rows  mean {each['mean']:6.2%}  worst {each['worst']:6.1%}  "
              f"bias {each['bias']:+6.2%}  rank correlation {each['rank_correlation']:.4f}")  # fmt: skip
    worst = sorted(missed.items(), key=lambda item: -abs(item[1]))[:10]
    for row, error in worst:
        print(f"{error:+6.1%}  {row.seconds * 1e3:9.1f} ms  {row}")
    print(f"{time.perf_counter() - begun:.0f} s in all")
    if chosen.save:
        path = Path(__file__).parent / "results" / "forecasts-a100.json"
        path.write_text(json.dumps({
            "date": time.strftime("%Y-%m-%d"), "command": "python -m benchmarks.forecasts --save",
            "fitted_rows": len(fitted), "constants": found.constants, "groups": by_group,
            "worst": [{"row": str(row), "seconds": row.seconds, "error": error} for row, error in worst],
        }, indent=2) + "\n")  # fmt: skip
        print(f"saved {path}")


if __name__ == "__main__":
    main()
