"""All-gathers started as early as the memory that the program needs anyway allows."""

from __future__ import annotations

from dataclasses import dataclass

from crossfade.communicate.rising import HELD, Rising, stays
from crossfade.graph import collectives
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.program import Program, paused_garbage_collection


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
        with paused_garbage_collection():
            return self._run(program)

    def _run(self, program: Program) -> PassResult:
        gathers = [each for each in collectives.find(program.graph) if each.kind is Kind.ALL_GATHER]
        if all(gather.out is None and stays(gather.node) for gather in gathers):
            return PassResult(False, {"raised": 0}, tuple(_stays(gather, EARLY) for gather in gathers))
        rising = Rising(program.graph)
        verdicts = tuple(_raised(gather, rising) for gather in gathers)
        return PassResult(rising.apply(), {"raised": sum(v.outcome is Outcome.MOVED for v in verdicts)}, verdicts)


def _raised(gather: Collective, rising: Rising) -> Verdict:
    if gather.out is not None:
        return _stays(gather, "its memory is there before it starts")
    here, place = rising.order.position[gather.node], rising.place(gather.node)
    if place.after >= here - 1:
        return _stays(gather, HELD if place.held else EARLY)
    detail = f"{here - 1 - place.after} nodes earlier, after {rising.order.nodes[place.after].name}"
    why = "started as early as what it needs and the peak of live memory allow"
    return Verdict.of(gather.node, Outcome.MOVED, why, detail=detail, bytes=gather.bytes)


def _stays(gather: Collective, why: str) -> Verdict:
    return Verdict.of(gather.node, Outcome.LEFT, why, bytes=gather.bytes)


EARLY = "it already starts as early as it can"
