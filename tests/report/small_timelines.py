"""Timelines for tests: one measured, one predicted, and long ones."""

from __future__ import annotations

from crossfade.cost.timeline import Computed, Timeline, Travelled

# Three seconds: mm computes for one, stands still for one, add computes for one. r travels from 0.5 to 2.
REDUCE = Travelled("r", "all_reduce", "dp", 2048, launch=0.25, start=0.5, finish=2.0, needed=1.0, exposed=1.0)
MEASURED = Timeline((Computed("mm", 0.0, 1.0), Computed("add", 2.0, 3.0)), (REDUCE,), 3.0, "measured")
QUICK = Travelled("r", "all_reduce", "dp", 2048, launch=0.25, start=0.25, finish=0.75, needed=1.0, exposed=0.0)
PREDICTED = Timeline((Computed("mm", 0.0, 1.0), Computed("add", 1.0, 2.0)), (QUICK,), 2.0, "a machine")


def long_timeline(nodes: int) -> Timeline:
    computed = [Computed(f"node_{i}", i * 1e-5, (i + 1) * 1e-5) for i in range(nodes)]
    travelled = [
        Travelled(f"r_{i}", "all_reduce", f"g{i % 3}", 4096, i * 1e-5, i * 1e-5, i * 1e-5 + 9e-5, i * 1e-5 + 8e-5, 1e-5)
        for i in range(0, nodes - 10, 25)
    ]
    return Timeline(tuple(computed), tuple(travelled), nodes * 1e-5, "measured")
