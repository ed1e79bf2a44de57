"""Collectives started as early as they can be."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from crossfade.graph import collectives
from crossfade.graph.order import Order, reorder
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.program import Program
from crossfade.graph.prologues import prologue_of


@dataclass(frozen=True)
class RaiseLaunches(Pass):
    """Move the start of each collective up to just after what it needs; the order within a group stays.

    What only prepares its input moves with it: views, conversions, element-by-element operators, packing.

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
        order = Order(program.graph)
        everything = collectives.find(program.graph)
        kinds = {*collectives.Kind} if self.gathers else {*collectives.Kind} - {collectives.Kind.ALL_GATHER}
        found = [collective for collective in everything if collective.kind in kinds]
        starts = {collective.node: collective for collective in found}
        risen = _risen(order, list(starts))
        moved = reorder(program.graph, risen)
        said: dict[fx.Node, Verdict] = {}
        above = risen[0]
        for place, node in enumerate(risen):
            if node in starts:
                said[node] = _verdict(starts[node], above, order.position[node] - place)
            else:
                above = node
        verdicts = [said[start] for start in starts]
        verdicts += [_held_longer(collective) for collective in everything if collective.node not in starts]
        count = sum(v.outcome is Outcome.MOVED for v in verdicts)
        return PassResult(moved, {"raised": count}, tuple(verdicts))


def _risen(order: Order, starts: list[fx.Node]) -> list[fx.Node]:
    """All nodes, each start with its prologue right after the lowest node that the two must follow."""
    place = dict(order.position)
    turn = dict.fromkeys(order.nodes, 0)
    first = max((order.position[node] for node in order.nodes if node.op == "placeholder"), default=0)
    for start in starts:
        along = prologue_of(start)
        together = {start, *along}
        needed = [place[b] for node in together for b in order.predecessors(node) if b not in together]
        end = max([min(first, order.position[start]), *needed])
        for node in (*along, start):
            if node is start or end < order.position[node]:
                place[node], turn[node] = end, len(order.nodes) + order.position[start]
    return sorted(order.nodes, key=lambda node: (place[node], turn[node], order.position[node]))


def _held_longer(collective: collectives.Collective) -> Verdict:
    reason = "starting it earlier would hold what it gathers for longer"
    remedy = "gathers=True starts it early"
    return Verdict.of(collective.node, Outcome.LEFT, reason, remedy=remedy, bytes=collective.bytes)


def _verdict(collective: collectives.Collective, last: fx.Node, passed: int) -> Verdict:
    if passed > 0:
        reason, detail = "started as early as it can be", f"{passed} nodes earlier, after {last.name}"
        return Verdict.of(collective.node, Outcome.MOVED, reason, detail=detail, bytes=collective.bytes)
    reason, detail = "it already starts as early as it can", f"after {last.name}"
    return Verdict.of(collective.node, Outcome.LEFT, reason, detail=detail, bytes=collective.bytes)
