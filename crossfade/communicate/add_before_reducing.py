"""Sums of reductions become reductions of sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph import collectives
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.effects import alias_roots, rewritten
from crossfade.graph.operators import arguments
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.program import Program
from crossfade.graph.splice import splice

_aten = torch.ops.aten
_SUMS = {_aten.add.Tensor, _aten.sub.Tensor}
_SCALINGS = {_aten.mul.Tensor, _aten.mul.Scalar, _aten.div.Tensor, _aten.div.Scalar}
_ELEMENTWISE = {_aten.neg.default, *_SCALINGS}
_VIEWS = {_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default}
_REARRANGING = {
    *_VIEWS,
    *(_aten.permute.default, _aten.transpose.int, _aten.t.default, _aten.clone.default),
    *(_aten.unsqueeze.default, _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims),
}
_LINEAR = {Kind.ALL_REDUCE: _ELEMENTWISE | _REARRANGING, Kind.REDUCE_SCATTER: _ELEMENTWISE}
"""What may stand between a reduction and the sum: operators that give the same before it, applied to each part."""


@dataclass(frozen=True)
class AddBeforeReducing(Pass):
    """Add, or subtract, the partial sums of two reductions of one group, and reduce once.

    So it is with the gradients of a parameter that is used twice. What scales, transposes or views a result on its way
    to the sum is done to its partial sum instead, or after the reduction if both results are treated alike. The one
    reduction starts where the later of the two did; sums of more collapse one after the other.

    Also known as: XLA's all-reduce-reassociate.

    Before:
        a: f32[4] = input("a")
        b: f32[4] = input("b")
        s: f32[4] = c10d.all_reduce(a, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        s2: f32[4] = c10d.all_reduce(b, "sum", "dp")
        e: f32[4] = aten.exp(a)
        w2: f32[4] = c10d.wait_tensor(s2)
        n: f32[4] = aten.neg(w2)
        y: f32[4] = aten.add.Tensor(w, n)
        return output("y", y), output("e", e)

    After:
        a: f32[4] = input("a")
        b: f32[4] = input("b")
        neg: f32[4] = aten.neg(b)
        add: f32[4] = aten.add.Tensor(a, neg)
        all_reduce: f32[4] = c10d.all_reduce(add, "sum", "dp")
        e: f32[4] = aten.exp(a)
        wait_tensor: f32[4] = c10d.wait_tensor(all_reduce)
        return output("y", wait_tensor), output("e", e)
    """

    name = "add-before-reducing"
    numerics = Numerics.REASSOCIATES

    def run(self, program: Program) -> PassResult:
        """One walk: when a sum is reached, all sums above it are settled."""
        nodes = list(program.graph.nodes)
        changing = rewritten(nodes, alias_roots(nodes))
        terms: dict[fx.Node, _Term] = {}
        verdicts: list[Verdict] = []
        for node in nodes:
            _see(node, terms)
            pair = _pair(node, terms)
            if pair is None:
                continue
            if (reason := _reason_against(node, pair, changing)) is not None:
                verdicts.append(Verdict.of(node, Outcome.LEFT, reason, bytes=sum(term.start.bytes for term in pair)))
                continue
            verdicts += [_fused(term, other) for term, other in (pair, pair[::-1])]
            for made in _combine(program, node, pair):
                _see(made, terms)
        fused = sum(verdict.outcome is Outcome.FUSED for verdict in verdicts) // 2
        return PassResult(bool(fused), {"fused": fused, "left": len(verdicts) - 2 * fused}, tuple(verdicts))


@dataclass(frozen=True)
class _Term:
    """The result of a reduction, or what a linear step makes of it; `alone` if nothing else has read it so far."""

    node: fx.Node
    start: Collective
    source: _Term | None
    alone: bool

    def steps(self) -> list[fx.Node]:
        """The linear steps from the wait to here."""
        found, term = [], self
        while term.source is not None:
            found.append(term.node)
            term = term.source
        return found[::-1]


_Pair = tuple[_Term, _Term]


def _see(node: fx.Node, terms: dict[fx.Node, _Term]) -> None:
    """Note a node that is a term of a possible sum."""
    if collectives.is_wait(node):
        begun = collectives.started_by(node)
        start = collectives.view(begun) if begun is not None else None
        if start is not None and start.plain and start.kind in _LINEAR:
            terms[node] = _Term(node, start, None, len(start.node.users) == 1)
    elif (source := terms.get(node.all_input_nodes[0]) if node.all_input_nodes else None) and _is_step(node, source):
        terms[node] = _Term(node, source.start, source, source.alone and len(source.node.users) == 1)


def _is_step(node: fx.Node, source: _Term) -> bool:
    """Whether a node does nothing to a term but what commutes with adding."""
    if (
        node.target not in _LINEAR[source.start.kind]
        or node.args[:1] != (source.node,)
        or len(node.all_input_nodes) > 1
    ):
        return False
    if node.target in _SCALINGS and not isinstance(arguments(node)["other"], (int, float, complex)):
        return False
    return node.meta["val"].dtype is source.node.meta["val"].dtype


def _pair(node: fx.Node, terms: dict[fx.Node, _Term]) -> _Pair | None:
    """The two terms of a sum of two reductions."""
    given = arguments(node) if node.target in _SUMS else {}
    if given.get("self") not in terms or given.get("other") not in terms:
        return None
    left, right = terms[given["self"]], terms[given["other"]]
    return None if left.start.node is right.start.node else (left, right)


def _reason_against(node: fx.Node, pair: _Pair, changing: set[fx.Node]) -> str | None:
    """The first reason to keep two reductions; that neither depends on the other follows from having no other use."""
    left, right = pair[0].start, pair[1].start
    values = [term.node.meta["val"] for term in pair]
    if left.kind is not right.kind:
        return "they are different kinds of collective"
    if left.group != right.group:
        return "they are of different groups"
    if left.reduce_op != right.reduce_op or left.reduce_op not in ("sum", "avg"):
        return "they reduce differently, or by something that is not linear"
    if values[0].dtype is not values[1].dtype or values[0].shape != values[1].shape:
        return "their shapes or dtypes differ"
    if values[0].dtype is torch.bool or (left.reduce_op == "avg" and not _is_divisible(values[0])):
        return "the reduction is not linear in its dtype"
    if isinstance(arguments(node)["alpha"], fx.Node):
        return "one of them is scaled by a computed number"
    if not all(term.alone and len(term.node.users) == 1 for term in pair):
        return "one of the results has another use"
    if any(start.inputs[0] in changing for start in (left, right)):
        return "a partial sum is written in place"
    way = _Way.of(node, pair)
    if (way.left or way.right) and not way.layout.is_contiguous():  # what collectives make is contiguous
        return "its layout in memory would change"
    return None


def _is_divisible(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


@dataclass(frozen=True)
class _Way:
    """The steps that each partial sum takes alone, the sum, and the steps that both took alike, taken once after it.

    `layout` is the sum as it was before the steps taken alike.
    """

    sum: fx.Node
    left: list[fx.Node]
    right: list[fx.Node]
    alike: list[fx.Node]
    layout: Tensor

    @classmethod
    def of(cls, node: fx.Node, pair: _Pair) -> _Way:
        """Take from the end of both terms' steps what is the same."""
        left, right = pair[0].steps(), pair[1].steps()
        alike: list[fx.Node] = []
        layout = node.meta["val"]
        while left and right and _settings(left[-1]) == _settings(right[-1]):
            alike.insert(0, left.pop())
            layout = right.pop().args[0].meta["val"]  # type: ignore[union-attr]
        return cls(node, left, right, alike, layout)

    def to_reduction(self, left: Tensor, right: Tensor) -> Tensor:
        """From the two partial sums to the one to reduce."""
        total = self.sum.target(  # type: ignore[operator]
            _take(self.left, left), _take(self.right, right), alpha=arguments(self.sum)["alpha"]
        )
        return total.contiguous() if self.layout.is_contiguous() else total

    def from_reduction(self, value: Tensor) -> Tensor:
        """From the reduced sum to what the sum was."""
        return _take(self.alike, collectives.wait(value))


def _settings(step: fx.Node) -> tuple[Any, ...]:
    """What decides what a step does."""
    source: Tensor = step.args[0].meta["val"]  # type: ignore[union-attr]
    return step.target, step.args[1:], step.kwargs, source.shape, source.stride()


def _take(steps: list[fx.Node], value: Tensor) -> Tensor:
    for step in steps:
        operation: Any = torch.reshape if step.target in _VIEWS else step.target  # a partial sum may not be dense
        value = operation(value, *step.args[1:], **step.kwargs)
    return value


def _fused(term: _Term, other: _Term) -> Verdict:
    reason, detail = "added to another before reducing", f"to {other.start.node.name}"
    return Verdict.of(term.start.node, Outcome.FUSED, reason, detail=detail, bytes=term.start.bytes)


def _combine(program: Program, node: fx.Node, pair: _Pair) -> list[fx.Node]:
    """Put one reduction where the later of the two started; return the nodes that lead from it to the sum's value."""
    start, way = pair[0].start, _Way.of(node, pair)
    later = max(term.start.node for term in pair)
    inputs = [term.start.inputs[0] for term in pair]

    def begin(left: Tensor, right: Tensor) -> Tensor:
        return _start_like(start, way.to_reduction(left, right))

    begun = splice(program, begin, *inputs, before=later, like=later)
    last = node.prev
    result = splice(program, way.from_reduction, begun, before=node, like=node)
    made = []
    while (last := last.next) is not node:
        made.append(last)
    node.replace_all_uses_with(result)
    program.graph.erase_node(node)
    for term in pair:
        for old in (*reversed(term.steps()), *term.start.waits, term.start.node):
            program.graph.erase_node(old)
    return made


def _start_like(collective: Collective, value: Tensor) -> Tensor:
    if collective.kind is Kind.ALL_REDUCE:
        return collectives.all_reduce(value, str(collective.reduce_op), collective.group)
    assert collective.group_size is not None  # every reduce-scatter says it
    return collectives.reduce_scatter(value, str(collective.reduce_op), collective.group_size, collective.group)
