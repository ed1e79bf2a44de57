"""Results of collectives waited for as late as they can be."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from itertools import accumulate

from torch import fx

from crossfade.graph import collectives, packing
from crossfade.graph.effects import alias_roots
from crossfade.graph.order import Order, reorder
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.private import schema_of
from crossfade.graph.program import Program


@dataclass(frozen=True)
class SinkWaits(Pass):
    """Move each wait, and the views that take its result apart, down to just before the first real use.

    Copies that take a result apart, such as those of `bucket-all-gathers`, sink with its wait, and no further: made one
    by one, they would keep the whole result alive until the last of them.

    Also known as: Inductor's sink_waits.

    Before:
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        v: f32[2, 2] = aten.view(w, [2, 2])
        exp: f32[4] = aten.exp(x)
        neg: f32[2, 2] = aten.neg(v)
        return output("a", exp), output("b", neg)

    After:
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        exp: f32[4] = aten.exp(x)
        w: f32[4] = c10d.wait_tensor(s)
        v: f32[2, 2] = aten.view(w, [2, 2])
        neg: f32[2, 2] = aten.neg(v)
        return output("a", exp), output("b", neg)
    """

    name = "sink-waits"
    numerics = Numerics.BITWISE

    def run(self, program: Program) -> PassResult:
        """One walk from the end: what sinks is emitted right before the first node that keeps it up."""
        order = Order(program.graph)
        anchor = self._anchors(order)
        held: dict[fx.Node, list[fx.Node]] = {}
        for node in order.nodes:
            held.setdefault(anchor[node], []).append(node)
        result = [node for end in order.nodes if anchor[end] is end for node in held[end]]
        stay_above = list(accumulate((anchor[node] is node for node in order.nodes), initial=0))
        verdicts = tuple(
            _verdict(node, anchor[node], stay_above[order.position[anchor[node]]] - stay_above[order.position[node]])
            for node in order.nodes
            if collectives.is_wait(node)
        )
        moved = reorder(program.graph, result)
        return PassResult(moved, {"sunk": sum(v.outcome is Outcome.MOVED for v in verdicts)}, verdicts)

    def _anchors(self, order: Order) -> dict[fx.Node, fx.Node]:
        """For each node, the node it is emitted just before: itself unless it sinks."""
        roots = alias_roots(order.nodes)
        copied = _copied_results(order, roots)
        sinking = [node for node in order.nodes if _sinks(node, roots, copied)]
        anchor = _sunk(order, sinking, {})
        if not copied:
            return anchor
        first: dict[fx.Node, fx.Node] = {}
        """For each result, where the first of its waits sinks to."""
        for wait in filter(collectives.is_wait, sinking):
            result = roots[wait]
            first[result] = min(first.get(result, anchor[wait]), anchor[wait], key=order.position.__getitem__)
        return _sunk(order, sinking, {copy: first[result] for copy, result in copied.items() if result in first})


def _copied_results(order: Order, roots: dict[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """The copies of collectives' results, or of parts of them, and which results these are."""
    copied: dict[fx.Node, fx.Node] = {}
    for node in order.nodes:
        source = node.args[0] if node.target in packing.COPIES_OUT and node.args else None
        if isinstance(source, fx.Node) and _is_result(roots[source]):
            copied[node] = roots[source]
    return copied


def _sinks(node: fx.Node, roots: dict[fx.Node, fx.Node], copied: dict[fx.Node, fx.Node]) -> bool:
    """Whether a node is a wait, or takes a collective's result apart."""
    if collectives.is_wait(node) or node in copied:
        return True
    root = roots[node]
    source = root.args[0] if root.target is operator.getitem else root  # a member, if copied out with others
    return _takes_apart(node) and (source in copied or _is_result(root))


def _sunk(order: Order, sinking: list[fx.Node], at_most: dict[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """For each node, the first node that keeps it up, but for some no lower than the node that is given."""
    anchor = {node: node for node in order.nodes}
    for node in reversed(sinking):
        ends = [anchor[after] for after in order.successors(node)]
        ends += [at_most[node]] if node in at_most else []
        first = min(ends, key=order.position.__getitem__, default=node)
        anchor[node] = max(first, node, key=order.position.__getitem__)
    return anchor


def _verdict(wait: fx.Node, end: fx.Node, passed: int) -> Verdict:
    start = collectives.started_by(wait)
    subject = start if start is not None else wait
    if not passed:
        return Verdict.of(subject, Outcome.LEFT, "its result is needed at once")
    detail = f"{passed} nodes later, before {end.name}"
    return Verdict.of(subject, Outcome.MOVED, "waited for just before its first use", detail=detail)


def _is_result(root: fx.Node) -> bool:
    """Whether memory belongs to a collective's result: its start, or an element of a coalesced one."""
    source = root.args[0] if root.target is operator.getitem else root
    return isinstance(source, fx.Node) and collectives.is_collective(source)


def _takes_apart(node: fx.Node) -> bool:
    """Views and `getitem`: they cost nothing and write nothing."""
    schema = schema_of(node.target)
    if schema is None:
        return node.target is operator.getitem
    return not schema.is_mutable and not collectives.is_collective(node)
