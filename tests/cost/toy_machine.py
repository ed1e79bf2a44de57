"""A machine of round numbers, to compute costs by hand."""

from __future__ import annotations

from typing import Any

from crossfade.cost.machine import Fabric, Link, Machine
from crossfade.graph.collectives import Kind


def toy_machine(**changes: Any) -> Machine:
    """1 GFLOP/s in float32 and 4 in bfloat16, 1 MB/s of memory, 1 kB/s of links; 1 ms of everything that starts."""
    fabric = Fabric(dict.fromkeys(Kind, Link(latency=1e-3, bandwidth=1e3)), launch=1e-3, slows_compute=0.5)
    settings: dict[str, Any] = {
        "fabrics": {"*": fabric},
        "flops": {"float32": 1e9, "bfloat16": 4e9},
        "memory_bandwidth": 1e6,
        "overhead": 1e-3,
    }
    return Machine("toy", **settings | changes)
