"""Communication under computation: nodes put in the order that is predicted to be fastest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from crossfade.cost.estimate import estimate
from crossfade.cost.machine import Machine
from crossfade.cost.presets import preset
from crossfade.graph import collectives
from crossfade.graph.collectives import Collective
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict, from_context
from crossfade.graph.program import MADE_FOR, Program
from crossfade.schedule.arrange_nodes import ArrangeNodes, stretches
from crossfade.schedule.plan import HIDDEN, MEMORY, CollectiveOutlook, apply_schedule, plan_schedule


@dataclass(frozen=True)
class OverlapCommunication(Pass):
    """Put all nodes in the order that is predicted to be fastest on a machine: launches as early and waits as late as
    pays, first what others wait for, and independent computation where communication would stand exposed.

    What is gathered is launched just early enough to be hidden, with a little in stock on the link. With
    `memory_limit`, live bytes beside inputs and constants stay within it, or the pass refuses and says how much it
    needs. Data, random numbers, writes to memory and the meaning of the program stay; collectives of one group may
    change places, in the same way on every rank that has the same program, machine and measured times. `machine` should
    be the one the program runs on: measured, or a preset (by default ethernet-1gbit). `measured` has the seconds of
    single nodes by key (`crossfade.cost.keys`).

    Also known as: XLA's latency-hiding scheduler, Inductor's reorder_for_compute_comm_overlap, FSDP2's prefetch.

    Before:
        x: f32[512, 512] = input("x")
        w: f32[512, 512] = parameter("w")
        mm: f32[512, 512] = aten.mm(x, w)
        s: f32[512, 512] = c10d.all_reduce(mm, "sum", "dp")
        d: f32[512, 512] = c10d.wait_tensor(s)
        relu: f32[512, 512] = aten.relu(d)
        mm_1: f32[512, 512] = aten.mm(w, x)
        return output("y", relu), output("z", mm_1)

    After:
        x: f32[512, 512] = input("x")
        w: f32[512, 512] = parameter("w")
        mm: f32[512, 512] = aten.mm(x, w)
        s: f32[512, 512] = c10d.all_reduce(mm, "sum", "dp")
        mm_1: f32[512, 512] = aten.mm(w, x)
        d: f32[512, 512] = c10d.wait_tensor(s)
        relu: f32[512, 512] = aten.relu(d)
        return output("y", relu), output("z", mm_1)
    """

    name = "overlap-communication"
    numerics = Numerics.BITWISE

    machine: Machine | None = from_context()
    memory_limit: int | None = None
    measured: Mapping[str, float] | None = from_context()

    def run(self, program: Program) -> PassResult:
        """Estimate, plan, apply; a verdict for each collective."""
        machine = self.machine if self.machine is not None else preset("ethernet-1gbit")
        costs = estimate(program, machine, dict(self.measured or {}))
        schedule = plan_schedule(program, costs, self.memory_limit)
        found = {collective.node.name: collective for collective in collectives.find(program.graph)}
        decided = ArrangeNodes(stretches(program, schedule.order))
        changed = apply_schedule(program, schedule)
        verdicts = tuple(_verdict(found[outlook.name], outlook, program, machine) for outlook in schedule.collectives)
        hidden = sum(verdict.outcome is Outcome.HIDDEN for verdict in verdicts)
        return PassResult(changed, {"hidden": hidden, "exposed": len(verdicts) - hidden}, verdicts, decided)


_CONVERTING = 3.0
"""To send what is of 32 bits in 16 and to widen it again, each byte is read or written about so many times."""


def _verdict(start: Collective, outlook: CollectiveOutlook, program: Program, machine: Machine) -> Verdict:
    travels = f"travels {1e3 * outlook.travel:.3f} ms"
    if outlook.reason == HIDDEN:
        return Verdict.of(start.node, Outcome.HIDDEN, HIDDEN, detail=travels, bytes=start.bytes)
    detail = f"{travels}, exposed {1e3 * outlook.exposed:.3f} ms"
    if (saved := _saved_in_16_bits(start, outlook.exposed, program, machine)) > 0:
        detail += f"; reduce_dtype=torch.bfloat16 would save {1e3 * saved:.3f} ms"
    remedy = "raise memory_limit" if outlook.reason == MEMORY else ""
    return Verdict.of(start.node, Outcome.EXPOSED, outlook.reason, detail=detail, remedy=remedy, bytes=start.bytes)


def _saved_in_16_bits(start: Collective, exposed: float, program: Program, machine: Machine) -> float:
    """How much less of a gradient's exchange would be exposed in half the bytes, less what it takes to convert them."""
    wide = start.dtype == torch.float32 and start.exact_op == start.reduce_op and start.reduce_op in ("sum", "avg")
    ranks = program.groups.get(start.group) or start.group_size or 0
    if MADE_FOR not in start.node.meta or not wide or ranks < 2:
        return 0.0
    size, walks = start.bytes, _CONVERTING * start.bytes / machine.memory_bandwidth
    whole, half = (machine.collective_seconds(start.kind, each, ranks, start.group) for each in (size, size // 2))
    return min(exposed, whole - half) - walks
