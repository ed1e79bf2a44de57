"""All-gathers started as early as the memory that the program needs anyway allows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from crossfade.graph import collectives
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.memory import memory_curve
from crossfade.graph.order import Order, reorder
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.program import Program, tensor_bytes
from crossfade.graph.prologues import prologue_of


@dataclass(frozen=True)
class RaiseGathers(Pass):
    """Move the start of each all-gather up, as far as what it needs, the order within its group, and the program's peak
    of live memory allow: what is gathered early is held longer, but never makes that peak higher.

    What only prepares its input moves with it. It needs no costs; `overlap-communication` finds better places on a
    machine, and holds less.

    Also known as: Inductor's `simple_overlap`, the prefetch of FSDP, within memory.

    Before:
        p: f32[64, 128] = parameter("p")
        x: f32[128, 128] = input("x")
        a: f32[128, 128] = aten.mm(x, x)
        b: f32[128, 128] = aten.mm(a, x)
        c: f32[] = aten.sum(b)
        g: f32[128, 128] = c10d.all_gather_into_tensor(p, 2, "dp")
        w: f32[128, 128] = c10d.wait_tensor(g)
        y: f32[128, 128] = aten.mm(w, x)
        return output("y", y), output("c", c)

    After:
        p: f32[64, 128] = parameter("p")
        x: f32[128, 128] = input("x")
        a: f32[128, 128] = aten.mm(x, x)
        b: f32[128, 128] = aten.mm(a, x)
        g: f32[128, 128] = c10d.all_gather_into_tensor(p, 2, "dp")
        c: f32[] = aten.sum(b)
        w: f32[128, 128] = c10d.wait_tensor(g)
        y: f32[128, 128] = aten.mm(w, x)
        return output("y", y), output("c", c)
    """

    name = "raise-gathers"
    numerics = Numerics.BITWISE

    def run(self, program: Program) -> PassResult:
        """One walk over the gathers: each goes below the last place that keeps it down."""
        gathers = [each for each in collectives.find(program.graph) if each.kind is Kind.ALL_GATHER]
        if not gathers:
            return PassResult(False, {"raised": 0})
        order = Order(program.graph)
        rising = _Rising(program, order)
        verdicts = tuple(rising.consider(gather) for gather in gathers)
        moved = reorder(program.graph, rising.order_now())
        return PassResult(moved, {"raised": sum(v.outcome is Outcome.MOVED for v in verdicts)}, verdicts)


class _Rising:
    """Where nodes stand, and what is alive there, while gathers rise one after the other.

    Live bytes are bounded from above: what a gather's preparation lets go of earlier is not counted.
    """

    def __init__(self, program: Program, order: Order) -> None:
        self.order = order
        curve = memory_curve(program)
        self.during, self.after = torch.tensor(curve.during), torch.tensor(curve.after)
        self.peak = max(curve.during, default=0)
        self.place = dict(order.position)
        self.turn = dict.fromkeys(order.nodes, 0)
        self.first = max((order.position[node] for node in order.nodes if node.op == "placeholder"), default=0)

    def consider(self, gather: Collective) -> Verdict:
        """Raise one gather, and say how far."""
        if gather.out is not None:
            return Verdict.of(gather.node, Outcome.LEFT, "its memory is there before it starts", bytes=gather.bytes)
        start, along = gather.node, prologue_of(gather.node)
        together = {start, *along}
        here = self.order.position[start]
        needed = [self.place[b] for node in together for b in self.order.predecessors(node) if b not in together]
        end = max([min(self.first, here), *needed])
        made = sum(tensor_bytes(node.meta.get("val")) for node in together)
        found = self._least_place(end, here, made)
        if found >= here - 1:
            why = "it already starts as early as it can"
            why = "earlier it would hold more than the peak of live memory" if end < here - 1 else why
            return Verdict.of(start, Outcome.LEFT, why, bytes=gather.bytes)
        for node in (*along, start):
            if node is start or found < self.order.position[node]:
                self.place[node], self.turn[node] = found, len(self.order.nodes) + here
        self.during[found + 1 : here] += made
        self.after[found:here] += made
        detail = f"{here - 1 - found} nodes earlier, after {self.order.nodes[found].name}"
        why = "started as early as what it needs and the peak of live memory allow"
        return Verdict.of(start, Outcome.MOVED, why, detail=detail, bytes=gather.bytes)

    def _least_place(self, end: int, here: int, made: int) -> int:
        """The first place from `end` on after which `made` bytes more, up to `here`, stay below the peak."""
        limit = self.peak - made
        running = (self.during[end + 1 : here] > limit).nonzero()
        between = (self.after[end:here] > limit).nonzero()
        least = end if not len(running) else end + 1 + int(running[-1])
        return max(least, end + 1 + int(between[-1])) if len(between) else least

    def order_now(self) -> list[fx.Node]:
        """All nodes, each gather right after its place, in the order of the gathers."""
        return sorted(self.order.nodes, key=lambda n: (self.place[n], self.turn[n], self.order.position[n]))
