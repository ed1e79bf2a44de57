"""Collectives started as early as they can be."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from torch import fx

from crossfade.communicate.rising import HELD, Rising, stays
from crossfade.graph import collectives
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.program import Program, paused_garbage_collection


@dataclass(frozen=True)
class RaiseLaunches(Pass):
    """Move the start of each collective up to just after what it needs; the order within a group stays.

    What only prepares its input moves with it: views, conversions, element-by-element operators, packing. What is made
    earlier is held longer: no start rises so far that more is alive at some time than the program held at its peak.

    All-gathers stay unless `gathers` is set: what they gather is larger than what they need, and starting them early
    holds it for longer; of parameters, which are ready at once, all would start at the top.

    Also known as: Inductor's raise_comms.

    Before:
        x: f32[4] = input("x")
        neg: f32[4] = aten.neg(x)
        exp: f32[4] = aten.exp(x)
        s: f32[4] = c10d.all_reduce(neg, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        add: f32[4] = aten.add.Tensor(exp, w)
        return output("y", add)

    After:
        x: f32[4] = input("x")
        neg: f32[4] = aten.neg(x)
        s: f32[4] = c10d.all_reduce(neg, "sum", "dp")
        exp: f32[4] = aten.exp(x)
        w: f32[4] = c10d.wait_tensor(s)
        add: f32[4] = aten.add.Tensor(exp, w)
        return output("y", add)
    """

    name = "raise-launches"
    numerics = Numerics.BITWISE

    gathers: bool = False

    def run(self, program: Program) -> PassResult:
        """One walk: each start goes right after the lowest node it must follow, which may be one that rose."""
        with paused_garbage_collection():
            return self._run(program)

    def _run(self, program: Program) -> PassResult:
        everything = collectives.find(program.graph)
        kinds = {*collectives.Kind} if self.gathers else {*collectives.Kind} - {collectives.Kind.ALL_GATHER}
        starts = {collective.node: collective for collective in everything if collective.kind in kinds}
        still = [_held_longer(collective) for collective in everything if collective.node not in starts]
        if all(map(stays, starts)):
            verdicts = [_verdict(collective, _above(start, starts), 0) for start, collective in starts.items()]
            return PassResult(False, {"raised": 0}, (*verdicts, *still))
        rising = Rising(program.graph)
        held = {start for start in starts if rising.place(start).held}
        said: dict[fx.Node, Verdict] = {}
        above = program.graph.output_node()
        for place, node in enumerate(rising.nodes()):
            if node in starts:
                said[node] = _verdict(starts[node], above, rising.order.position[node] - place, node in held)
            else:
                above = node
        verdicts = [said[start] for start in starts]
        count = sum(v.outcome is Outcome.MOVED for v in verdicts)
        return PassResult(rising.apply(), {"raised": count}, (*verdicts, *still))


def _above(start: fx.Node, starts: Container[fx.Node]) -> fx.Node:
    """The last node above that is no start."""
    above = start.prev
    while above in starts:
        above = above.prev
    return above


def _held_longer(collective: collectives.Collective) -> Verdict:
    reason = "starting it earlier would hold what it gathers for longer"
    remedy = "gathers=True starts it early"
    return Verdict.of(collective.node, Outcome.LEFT, reason, remedy=remedy, bytes=collective.bytes)


def _verdict(collective: collectives.Collective, last: fx.Node, passed: int, held: bool = False) -> Verdict:
    size = collective.bytes
    if passed > 0:
        reason = "started as early as the peak of live memory allows" if held else "started as early as it can be"
        detail = f"{passed} nodes earlier, after {last.name}"
        return Verdict.of(collective.node, Outcome.MOVED, reason, detail=detail, bytes=size)
    reason, detail = HELD if held else "it already starts as early as it can", f"after {last.name}"
    return Verdict.of(collective.node, Outcome.LEFT, reason, detail=detail, bytes=size)
