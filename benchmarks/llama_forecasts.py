"""Llama 3.1 on H100, forecast from a preset to which nothing is fitted, beside what torchtitan published.

    python -m benchmarks.llama_forecasts [--save]

Rows with asynchronous tensor parallelism are left out: its products in pieces are not part of these ways to run.
"""

from __future__ import annotations

import argparse
import csv
import resource
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from benchmarks.figures import save
from crossfade.cost.presets import preset
from crossfade.forecast.forecast import GIB
from crossfade.forecast.simulate import Forecaster, Setting
from crossfade.forecast.sources import source_of
from crossfade.forecast.ways import way_named

PUBLISHED = Path(__file__).parent / "published" / "torchtitan_llama3.csv"
MACHINE = "h100-96gb-cluster"

_PIECE = Shard(1)
SEQUENCE_PARALLEL: dict[str, object] = {
    "model.embed_tokens": RowwiseParallel(output_layouts=_PIECE),
    "model.norm": SequenceParallel(),
    "model.layers.*.*_layernorm": SequenceParallel(),
    **{f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=_PIECE),
    **{f"model.layers.*.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
    "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=_PIECE),
    "lm_head": ColwiseParallel(use_local_output=False),
}
"""How torchtitan splits Llama over ranks of tensor parallelism: between products, each has a piece of the sequence."""


def rows() -> list[Mapping[str, str]]:
    """The published rows that can be forecast."""
    with PUBLISHED.open() as file:
        return [row for row in csv.DictReader(file) if row["async_tp"] == "no"]


def forecast(row: Mapping[str, str]) -> dict[str, float | str]:
    """One row: what was measured, what is forecast, and what forecasting took."""
    begun = time.process_time()
    source = source_of(row["model"], f"{row['local_batch']}x{row['sequence']}")
    ranks = int(row["tensor_parallel"])
    mesh = {"dp": int(row["fsdp"]), **({"tp": ranks} if ranks > 1 else {})}
    float8, compiled = row["dtype"] == "float8", row["compiled"] == "yes"
    setting = Setting(mesh, way_named("fsdp"), row["checkpointing"], float8, compiled, expandable=True)
    forecaster = Forecaster(
        source.model, source.batch, source.loss_fn, SEQUENCE_PARALLEL, name=row["model"], tokens=source.tokens
    )
    found = forecaster.forecast(setting, preset(MACHINE), helps=False)
    how = [row["checkpointing"], row["dtype"], *(["compiled"] if compiled else [])]
    measured = {"tokens": float(row["tokens_per_second_per_gpu"])}
    if row["memory_gib"]:
        measured["gib"] = float(row["memory_gib"])
    return {
        "row": f"{row['model']}, {row['gpus']} GPUs, length {row['sequence']}, {', '.join(how)}",
        **{f"measured_{name}": value for name, value in measured.items()},
        "tokens": found.tokens_per_second_per_gpu,
        "gib": found.memory.bytes / GIB,
        "processor_s": time.process_time() - begun,
    }


def main() -> None:
    """Forecast every row and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--only", default="", help="rows of models whose name has this in it")
    options = parser.parse_args()
    table = Table("", "tokens a second a GPU", "measured", "off", "GiB", "measured", "off", "processor s")
    kept = []
    for row in (row for row in rows() if options.only in row["model"]):
        found = forecast(row)
        kept.append(found)
        cells = [str(found["row"])]
        for name, digits in (("tokens", 0), ("gib", 1)):
            value, measured = found[name], found.get(f"measured_{name}")
            off = f"{value / measured - 1:+.1%}" if measured else ""  # type: ignore[operator]
            cells += [f"{value:,.{digits}f}", f"{measured:,.{digits}f}" if measured else "", off]
        table.add_row(*cells, f"{found['processor_s']:.0f}")
        print(*cells, sep=" | ", flush=True)
    Console(width=150).print(table)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{peak:.1f} GiB of memory at most")
    if options.save:
        save("llama-forecasts", {"rows": kept, "peak_gib": peak})


if __name__ == "__main__":
    main()
