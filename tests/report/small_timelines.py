"""Timelines for tests: one measured, one predicted, and long ones."""

from __future__ import annotations

from crossfade.cost.timeline import Computed, Timeline, Travelled
from crossfade.graph.passes import Outcome, PassRecord, Verdict
from crossfade.report.rank_timelines import RankTimeline
from crossfade.report.report import Report

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


LAYERS = 24


def long_report() -> Report:
    """A step of 24 layers and 9,600 nodes on two ranks, with long diffs, many verdicts and the whole program."""
    phases = [("forward", LAYERS, 100), ("backward", LAYERS, 200), ("update", LAYERS, 100)]
    names, modules = [], {}
    for phase, layers, nodes in phases:
        for layer in range(layers) if phase == "forward" else reversed(range(layers)):
            for index in range(nodes):
                names.append(f"{phase}_{layer}_{index}")
                modules[names[-1]] = f"{phase} blocks.{layer}.{'attention.out' if index % 2 else 'norm1'}"
    runs = [_long_run(names, skew) for skew in (0, 3)]
    members = {"dp": (0, 1)}
    ranks = [RankTimeline(rank, run, 10.0 + rank / 100, "host", members) for rank, run in enumerate(runs)]
    program = "\n".join(f"{name}: f32[1024, 4096] = aten.mul.Tensor({name}_a, {name}_b)" for name in names)
    verdicts = [
        Verdict(f"all_reduce_{i}", Outcome.LEFT, f"reason {i % 20}", f"model.py:{i}", "raise it") for i in range(900)
    ]
    after = program.replace("mul.Tensor", "add.Tensor")
    records = tuple(
        PassRecord(f"pass-{i}", f"pass-{i}", "bitwise", 0.1, i % 2 == 0, {"done": i}, tuple(verdicts[i::26]), 96, 96,
                   program if i % 2 == 0 else "", after if i % 2 == 0 else "")
        for i in range(26)
    )  # fmt: skip
    memory = [(name, 1000 * min(index, len(names) - index)) for index, name in enumerate(names)]
    return Report("24 layers", records, {"all_reduce": (290, 10**8)}, {"all_reduce": (96, 10**8)}, 9600, 9600,
                  program=program, measured=runs[0], ranks=ranks, modules=modules, memory=memory,
                  alive=[(name, 4096) for name in names[:200]])  # fmt: skip


def _long_run(names: list[str], skew: int) -> Timeline:
    at, computed, travelled = 0.0, [], []
    for index, name in enumerate(names):
        seconds = (1 + (index * 7 + skew) % 11) * 1e-6
        computed.append(Computed(name, at, at + seconds, seconds * 0.8))
        at += seconds
        if index % 100 == 99:
            travelled.append(
                Travelled(f"all_reduce_{index // 100}", "all_reduce", "dp", 10**6, at, at, at + 4e-4, at + 3e-4, 1e-4)
            )
    return Timeline(tuple(computed), tuple(travelled), at + 1e-3, "measured")
