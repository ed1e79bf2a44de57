"""Copying a bucket's members in and out: ours against torch's copies, alternating in one run.

    python -m benchmarks.buckets                # on CUDA if there is one, else on CPU
    python -m benchmarks.buckets --save         # also keep the figures in benchmarks/results/

The bucket is a layer of Llama 8B (on CPU a quarter as wide). Bandwidth counts bytes read and written; times are
medians. `plain copy` clones one tensor of as many bytes: about the best there is on CUDA. On CPU smaller ones can be
faster, as fresh memory costs page faults.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.figures import save
from crossfade.graph.packing import implementation, pack, unpack

COPY = "plain copy"
NAMES = {torch.bfloat16: "bf16", torch.float32: "f32"}


@dataclass(frozen=True, slots=True)
class Case:
    """One direction, dtype (and the bucket's, if another) and number of rows."""

    direction: str
    source: torch.dtype
    target: torch.dtype
    rows: int

    def __str__(self) -> str:
        dtypes = dict.fromkeys([NAMES[self.source], NAMES[self.target]])
        return f"{self.direction} {' to '.join(dtypes)}, rows={self.rows}"


CASES = [
    Case("pack", source, target, rows)
    for source, target in [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)]
    for rows in (1, 8, 64)
] + [Case("unpack", torch.bfloat16, torch.bfloat16, rows) for rows in (8, 64)]


def layer(hidden: int) -> list[tuple[int, ...]]:
    """The shapes of one layer's parameters: attention, feed-forward, norms."""
    square, narrow, wide = (hidden, hidden), (hidden // 4, hidden), (hidden * 7 // 2, hidden)
    return [square, narrow, narrow, square, wide, wide, wide[::-1], (hidden,), (hidden,)]


def contenders(case: Case, shapes: list[tuple[int, ...]], device: str) -> tuple[int, dict[str, Callable[[], Any]]]:
    """The bytes that one call reads and writes, and the calls."""
    values = [torch.randn(shape, device=device).to(case.source) for shape in shapes]
    rows, sizes = case.rows, [value.numel() // case.rows for value in values]
    elements = sum(value.numel() for value in values)
    moved = elements * (case.source.itemsize + case.target.itemsize)
    flat = torch.randint(256, (moved // 2,), dtype=torch.uint8, device=device)
    calls: dict[str, Callable[[], Any]] = {COPY: flat.clone}
    if case.direction == "pack":
        calls["Crossfade"] = lambda: pack(values, rows, dtype=case.target)
        calls["torch.cat"] = lambda: torch.cat([value.view(rows, -1) for value in values], 1).to(case.target)
        calls["_foreach_copy_"] = lambda: _copy_each(values, rows, sizes, case.target)
    else:
        packed = pack(values, rows)
        calls["Crossfade"] = lambda: unpack(packed, rows, sizes)
        calls["split, clone"] = lambda: [part.contiguous() for part in packed.view(rows, -1).split(sizes, 1)]
        calls["split_with_sizes_copy"] = lambda: torch.split_with_sizes_copy(packed.view(rows, -1), sizes, 1)
    return moved, calls


def _copy_each(values: list[Tensor], rows: int, sizes: list[int], dtype: torch.dtype) -> Tensor:
    packed = torch.empty(rows, sum(sizes), dtype=dtype, device=values[0].device)
    torch._foreach_copy_(packed.split(sizes, 1), [value.view(rows, -1) for value in values])
    return packed


def race(calls: dict[str, Callable[[], Any]], device: str, rounds: int) -> dict[str, float]:
    """Median seconds of each call; on CUDA several are queued at once, so that the device never waits for Python."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    timed, queued = (_seconds_on_cuda, 10) if device == "cuda" else (_seconds_on_cpu, 1)
    names = list(calls)
    for turn in range(rounds + 2):
        first = turn % len(names)  # each in every place, for what the one before leaves in the caches
        for name in names[first:] + names[:first]:
            measured = timed(calls[name], queued)
            if turn >= 2:  # the first two warm up
                seconds[name].append(measured)
    return {name: statistics.median(measured) for name, measured in seconds.items()}


def _seconds_on_cpu(call: Callable[[], Any], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def _seconds_on_cuda(call: Callable[[], Any], times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()  # the device works while Python queues the rest
    start.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / times


def main() -> None:
    """Parse the command line, measure every case, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--save", action="store_true", help="keep the figures as JSON")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden = 4096 if device == "cuda" else 1024
    bandwidths: dict[str, dict[str, float]] = {}
    with torch.no_grad():
        for case in CASES:
            moved, calls = contenders(case, layer(hidden), device)
            seconds = race(calls, device, options.rounds)
            bandwidths[str(case)] = {name: moved / elapsed / 1e9 for name, elapsed in seconds.items()}
    code = implementation(torch.device(device))
    table = Table("bucket", "contender", "GB/s", "of a plain copy", title=f"{device}, Crossfade's code: {code}")
    for name, measured in bandwidths.items():
        for contender, bandwidth in measured.items():
            table.add_row(name, contender, f"{bandwidth:.0f}", f"{bandwidth / measured[COPY]:.0%}")
        table.add_section()
    Console().print(table)
    if options.save:
        where = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads"
        save(f"buckets-{device}", {"device": where, "implementation": code, "hidden": hidden, "GB/s": bandwidths})


if __name__ == "__main__":
    main()
