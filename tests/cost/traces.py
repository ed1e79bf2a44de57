"""Chrome traces as torch's profiler writes them, made by hand: of ranks with NCCL, whose kernels take known times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from crossfade.cost.machine_parts import Link
from crossfade.graph.collectives import NAMESPACE, Kind

NCCL_NAMES = {
    Kind.ALL_REDUCE: "allreduce",
    Kind.ALL_GATHER: "_allgather_base",
    Kind.REDUCE_SCATTER: "_reduce_scatter_base",
    Kind.ALL_TO_ALL: "all_to_allv",
    Kind.BROADCAST: "broadcast",
}
LINK = Link(latency=2e-5, bandwidth=1e10)


def collective(
    kind: Kind, elements: int, *, ranks: int = 8, dtype: str = "BFloat16", late: float = 0.0, group: str = "mesh_dp"
) -> dict[str, Any]:
    """A kernel of a collective whose larger side has so many elements of two bytes, begun `late` by another rank."""
    inside, outside = elements, elements
    if kind is Kind.ALL_GATHER:
        inside = elements // ranks
    if kind is Kind.REDUCE_SCATTER:
        outside = elements // ranks
    args = {
        "Collective name": NCCL_NAMES[kind], "In msg nelems": inside, "Out msg nelems": outside, "dtype": dtype,
        "Group size": ranks, "Process Group Name": "3", "Process Group Description": group, "External id": 7,
    }  # fmt: skip
    seconds = LINK.seconds(kind, 2 * elements, ranks) + late
    return {"ph": "X", "cat": "kernel", "name": "ncclDevKernel", "ts": 1, "dur": seconds * 1e6, "args": args}


def operator(
    number: int, name: str, dims: list[Any], kinds: list[str], kernel: float | None, host: float = 9.0
) -> list[dict[str, Any]]:
    """A call on the host, and its kernel on the device, if it has one; in microseconds."""
    args = {"External id": number, "Input Dims": dims, "Input type": kinds}
    call = {"ph": "X", "cat": "cpu_op", "name": name, "ts": 1, "dur": host, "args": args}
    run = {"ph": "X", "cat": "kernel", "name": "kernel", "ts": 2, "dur": kernel, "args": {"External id": number}}
    return [call, run] if kernel is not None else [call]


def write(path: Path, events: list[dict[str, Any]], **more: Any) -> Path:
    """A trace file of these events."""
    path.write_text(json.dumps({"schemaVersion": 1, **more, "traceEvents": events}))
    return path


def whole_step() -> list[dict[str, Any]]:
    """A step on a GPU with everything in it: all kinds but broadcasts, products, elementwise operators."""
    kinds = [kind for kind in Kind if kind is not Kind.BROADCAST]
    events = [collective(kind, 2**size, late=late) for kind in kinds for size in (10, 20, 24) for late in (0.0, 3e-4)]
    half = "c10::BFloat16"
    events += operator(20, "aten::mm", [[1024, 1024], [1024, 1024]], [half, half], 20.0)
    events += operator(21, "aten::addmm", [[8], [1024, 512], [512, 1024], [], []], [half] * 3 + ["Scalar"] * 2, 10.0)
    events += operator(22, "aten::mm", [[8, 8], [8, 8]], [half, half], 2.0)
    events += operator(23, "aten::bmm", [[2, 512, 512], [2, 512, 512]], ["float", "float"], 40.0)
    events += operator(24, "aten::add", [[2**24], [2**24], []], ["float", "float", "Scalar"], 100.0)
    events += operator(25, "aten::mul_", [[16], []], ["float", "double"], 1.5)
    events += operator(26, f"{NAMESPACE}::all_reduce", [[1024]], [half], None, host=30.0)
    return [*events, {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}]
