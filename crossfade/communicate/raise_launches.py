"""Collectives started as early as they can be."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from crossfade.graph import collectives
from crossfade.graph.order import Order, reorder
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.program import Program


@dataclass(frozen=True)
class RaiseLaunches(Pass):
    """Move the start of each collective up to just after what it needs; the order within a group stays.

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

    def run(self, program: Program) -> PassResult:
        """One walk: each start is emitted right after the last node it must follow."""
        order = Order(program.graph)
        following: dict[fx.Node, list[fx.Node]] = {}
        verdicts = []
        for one in collectives.find(program.graph):
            last = order.last_predecessor(one.node)
            distance = 0
            if last is not None and last.op != "placeholder":
                following.setdefault(last, []).append(one.node)
                distance = order.position[one.node] - order.position[last] - 1
            verdicts.append(self._verdict(one, last, distance))
        moved = reorder(program.graph, _emit(order.nodes, following))
        count = sum(v.outcome is Outcome.MOVED for v in verdicts)
        return PassResult(moved, {"raised": count}, tuple(verdicts))

    def _verdict(self, one: collectives.Collective, last: fx.Node | None, distance: int) -> Verdict:
        name = last.name if last is not None else "the inputs"
        if distance:
            return Verdict.of(
                one.node, Outcome.MOVED, f"started {distance} nodes earlier, after {name}", bytes=one.bytes
            )
        return Verdict.of(one.node, Outcome.LEFT, f"already starts right after {name}", bytes=one.bytes)


def _emit(nodes: list[fx.Node], following: dict[fx.Node, list[fx.Node]]) -> list[fx.Node]:
    moved = {node for group in following.values() for node in group}
    result: list[fx.Node] = []
    for node in nodes:
        if node not in moved:
            stack = [node]
            while stack:  # a start may follow a start of its group, which follows its own last input
                one = stack.pop()
                result.append(one)
                stack.extend(reversed(following.get(one, [])))
    return result
