"""Collectives started as early as they can be."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from torch import fx

from crossfade.graph import collectives
from crossfade.graph.order import Order, reorder
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.program import Program


@dataclass(frozen=True)
class RaiseLaunches(Pass):
    """Move the start of each collective up to just after what it needs; the order within a group stays.

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
        """One walk: each start goes right after the lowest node it must follow, which may be a start that rose."""
        order = Order(program.graph)
        everything = collectives.find(program.graph)
        kinds = {*collectives.Kind} if self.gathers else {*collectives.Kind} - {collectives.Kind.ALL_GATHER}
        found = [collective for collective in everything if collective.kind in kinds]
        place = _places(order, [collective.node for collective in found])
        starts = {collective.node for collective in found}
        moved = reorder(program.graph, sorted(order.nodes, key=lambda n: (place[n], n in starts, order.position[n])))
        others_above = list(accumulate((node not in starts for node in order.nodes), initial=0))
        verdicts = []
        for collective in found:
            passed = others_above[order.position[collective.node]] - others_above[place[collective.node] + 1]
            verdicts.append(_verdict(collective, order.nodes[place[collective.node]], passed))
        verdicts += [_held_longer(collective) for collective in everything if collective.node not in starts]
        count = sum(v.outcome is Outcome.MOVED for v in verdicts)
        return PassResult(moved, {"raised": count}, tuple(verdicts))


def _places(order: Order, starts: list[fx.Node]) -> dict[fx.Node, int]:
    """For each start the position of the node it rises to, for all others their own."""
    place = dict(order.position)
    first = max((order.position[node] for node in order.nodes if node.op == "placeholder"), default=0)
    for start in starts:
        needed = max((place[before] for before in order.predecessors(start)), default=0)
        place[start] = max(needed, min(first, order.position[start]))
    return place


def _held_longer(collective: collectives.Collective) -> Verdict:
    reason = "starting it earlier would hold what it gathers for longer"
    remedy = "gathers=True starts it early"
    return Verdict.of(collective.node, Outcome.LEFT, reason, remedy=remedy, bytes=collective.bytes)


def _verdict(collective: collectives.Collective, last: fx.Node, passed: int) -> Verdict:
    if passed:
        reason, detail = "started as early as it can be", f"{passed} nodes earlier, after {last.name}"
        return Verdict.of(collective.node, Outcome.MOVED, reason, detail=detail, bytes=collective.bytes)
    reason, detail = "it already starts as early as it can", f"after {last.name}"
    return Verdict.of(collective.node, Outcome.LEFT, reason, detail=detail, bytes=collective.bytes)
