"""One result of a coalesced collective written in place, its siblings' waits around it: what two gloo ranks make of it.

At each wait gloo copies every output of a coalesced reduce-scatter out. A wait that sinks below the write undoes it.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from crossfade.communicate.raise_launches import RaiseLaunches
from crossfade.communicate.sink_waits import SinkWaits
from crossfade.compile.pipeline import optimization, optimize
from crossfade.cost.presets import preset
from crossfade.finish.collect_small_operators import CollectSmallOperators
from crossfade.graph.passes import Pass
from crossfade.graph.text import parse
from crossfade.schedule.overlap_communication import OverlapCommunication
from crossfade.simplify.overwrite_dead_values import OverwriteDeadValues
from crossfade.simplify.reorder_for_locality import ReorderForLocality

STARTS = {
    "reduce-scatter": ("f32[2]", 'c10d.reduce_scatter_tensor_coalesced([a, b, c, d], "sum", 2, "{group}")'),
    "all-gather": ("f32[8]", 'c10d.all_gather_into_tensor_coalesced([a, b, c, d], 2, "{group}")'),
    "all-reduce": ("f32[4]", 'c10d.all_reduce_coalesced([a, b, c, d], "sum", "{group}")'),
}
WAITS = list(itertools.permutations(range(3)))
PASSES: dict[str, list[Pass]] = {
    "sink-waits": [SinkWaits()],
    "raise-launches": [RaiseLaunches(gathers=True), SinkWaits()],
    "overlap-communication": [OverlapCommunication(preset("ethernet-1gbit"))],
    "reorder-for-locality": [ReorderForLocality()],
    "overwrite-dead-values": [OverwriteDeadValues()],
    "collect-small-operators": [CollectSmallOperators()],
    "optimization": list(optimization()),
    "all": [*optimization(machine=preset("ethernet-1gbit")), OverwriteDeadValues()],
}


def program_of(kind: str, waits: tuple[int, ...], group: str) -> str:
    """One is dead after its wait, and may be written over; two are written when all have been waited for."""
    made, start = STARTS[kind]
    waited = "\n".join(f"w{i}: {made} = c10d.wait_tensor(g{i})" for i in waits)
    return f"""
a: f32[4] = input("a")
b: f32[4] = input("b")
c: f32[4] = input("c")
d: f32[4] = input("d")
both = {start.format(group=group)}
g0: {made} = both[0]
g1: {made} = both[1]
g2: {made} = both[2]
g3: {made} = both[3]
w3: {made} = c10d.wait_tensor(g3)
half: {made} = aten.mul.Tensor(w3, 0.5)
{waited}
view: f32[1, {made[4:-1]}] = aten.unsqueeze(w0, 0)
ten: f32[1, {made[4:-1]}] = aten.mul_.Tensor(view, 10)
sine: f32[4] = aten.sin(a)
one: {made} = aten.add_.Tensor(w1, 1)
two: {made} = aten.neg(w2)
three: {made} = aten.add.Tensor(two, one)
return output("0", w0), output("1", three), output("2", sine), output("3", half)
"""


def expected(kind: str, rank: int, given: list[list[Tensor]]) -> list[Tensor]:
    """The same in plain torch, from what all ranks are given."""
    mine: list[Tensor] = []
    for everyones in zip(*given, strict=True):
        total = torch.stack(everyones).sum(0)
        mine.append(
            {"reduce-scatter": total.chunk(2)[rank], "all-gather": torch.cat(everyones), "all-reduce": total}[kind]
        )
    return [mine[0] * 10, -mine[2] + (mine[1] + 1), given[rank][0].sin(), mine[3] / 2]


def given_to(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(1, 5, (4,), generator=generator).float() for _ in range(4)]


def what_differs(kind: str) -> list[str]:
    """On each rank: the orders of waits and the passes after which a result is not what plain torch makes."""
    rank, group = dist.get_rank(), dist.group.WORLD.group_name  # type: ignore[union-attr]
    right = expected(kind, rank, [given_to(rank) for rank in range(2)])
    wrong = []
    for waits, (name, passes) in itertools.product(WAITS, PASSES.items()):
        program = parse(program_of(kind, waits, group), groups={group: 2})
        found = optimize(program.module(), passes=passes, groups={group: 2}).module(*given_to(rank))
        if not all(torch.equal(value, wanted) for value, wanted in zip(found, right, strict=True)):
            wrong.append(f"{name} with waits {waits}")
    return wrong


@pytest.mark.ranks
@pytest.mark.parametrize("kind", STARTS)
def test_a_written_sibling_keeps_what_was_written(ranks: Any, kind: str) -> None:
    assert ranks(2).run(what_differs, kind) == [[], []]
