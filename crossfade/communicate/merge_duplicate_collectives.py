"""Collectives that do the same to the same value become one."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from crossfade.graph import collectives
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.effects import alias_roots, is_random, written_inputs, written_owners
from crossfade.graph.own_results import return_copies
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.private import OpOverload
from crossfade.graph.program import Program
from crossfade.graph.splice import erase_if_dead

_aten = torch.ops.aten
_TOLD_BY_SHAPES = {
    *(_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.expand.default),
    *(_aten.permute.default, _aten.transpose.int, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.dims),
}
"""Operators whose numbers are sizes and dims, which all ranks have in common."""


@dataclass(frozen=True)
class MergeDuplicateCollectives(Pass):
    """Let a collective take the result of an earlier one of the same kind, group and arguments on the same value.

    Values are the same if the same pure operators made them of the same values; operators told by numbers which part
    to take or what to scale by do not count, since the numbers may be others on another rank. A gather is merged only
    if at most `near` launches of its group lie between: a parameter gathered again for its backward is not to be held
    until then, unless `hold` is set. Results that the program returns are copied, since no two may share memory.

    Before:
        x: f32[4] = input("x")
        a: f32[4] = aten.neg(x)
        s: f32[4] = c10d.all_reduce(a, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        b: f32[4] = aten.neg(x)
        s2: f32[4] = c10d.all_reduce(b, "sum", "dp")
        w2: f32[4] = c10d.wait_tensor(s2)
        add: f32[4] = aten.add.Tensor(w, w2)
        return output("y", add)

    After:
        x: f32[4] = input("x")
        a: f32[4] = aten.neg(x)
        s: f32[4] = c10d.all_reduce(a, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        w2: f32[4] = c10d.wait_tensor(s)
        add: f32[4] = aten.add.Tensor(w, w2)
        return output("y", add)
    """

    name = "merge-duplicate-collectives"
    numerics = Numerics.BITWISE

    hold: bool = False
    near: int = 4

    def run(self, program: Program) -> PassResult:
        """One walk that numbers values; equal collectives meet under one key."""
        nodes = list(program.graph.nodes)
        roots = alias_roots(nodes)
        written = written_owners(nodes, roots)
        values = _Values(roots)
        first: dict[Hashable, Collective] = {}
        merged: dict[fx.Node, fx.Node] = {}
        verdicts = []
        launches: Counter[str] = Counter()
        turn: dict[fx.Node, int] = {}
        for node in nodes:
            number = values.number(node)
            later = collectives.view(node)
            if later is not None:
                turn[node] = launches[later.group]
                launches[later.group] += 1
            if later is None or not later.plain:
                continue
            earlier = first.setdefault(number, later)
            if earlier is later:
                continue
            if (verdict := self._verdict_against(earlier, later, written, turn)) is not None:
                first[number] = later
                verdicts.append(verdict)
                continue
            verdicts.append(_verdict(earlier, later))
            turn[earlier.node] = turn[later.node]  # in use until here, now
            merged[later.node] = earlier.node
        _merge(program, merged)
        _unshare_results(program, roots, merged)
        counts = {"merged": len(merged), "left": len(verdicts) - len(merged)}
        return PassResult(bool(merged), counts, tuple(verdicts))

    def _verdict_against(
        self, earlier: Collective, later: Collective, written: set[fx.Node], turn: Mapping[fx.Node, int]
    ) -> Verdict | None:
        if earlier.node in written or later.node in written:
            return Verdict.of(later.node, Outcome.LEFT, "a result is written in place", bytes=later.bytes)
        far = turn[later.node] - turn[earlier.node] - 1 > self.near
        if later.kind is Kind.ALL_GATHER and far and not self.hold:
            reason, remedy = "it would be held in memory between its uses", "hold=True merges it"
            return Verdict.of(later.node, Outcome.LEFT, reason, remedy=remedy, bytes=later.bytes)
        return None


class _Values:
    """Numbers values so that equal numbers mean equal values. Ask in the order of the graph.

    Memory that is written has another value after each write: a reference to it names the last one.
    """

    def __init__(self, roots: dict[fx.Node, fx.Node]) -> None:
        self.roots = roots
        self.numbers: dict[fx.Node, int] = {}
        self.known: dict[Hashable, int] = {}
        self.last_write: dict[fx.Node, int] = {}
        self.writes = itertools.count()

    def number(self, node: fx.Node) -> int:
        """The number of a node's value as the node makes it."""
        number = self.known.setdefault(self._key(node), len(self.numbers))
        self.numbers[node] = number
        for target in written_inputs(node):
            self.last_write[self.roots[target]] = next(self.writes)
        return number

    def _key(self, node: fx.Node) -> Hashable:
        if (one := collectives.view(node)) is not None and one.plain:
            return node.target, self._reference(one.inputs[0]), repr(collectives.settings(node))
        if collectives.is_wait(node):
            return node.target, self._reference(collectives.waited_value(node))
        if node.op == "get_attr":
            return node.op, node.target
        if not _is_function_of_its_inputs(node) or not _is_alike_on_all_ranks(node):
            return node
        return node.target, repr(fx.map_arg((node.args, node.kwargs), self._reference))

    def _reference(self, node: fx.Node) -> Any:
        return _Reference(self.numbers[node], self.last_write.get(self.roots[node]))


@dataclass(frozen=True, slots=True)
class _Reference:
    """A value at one moment: a class, since map_arg would take a tuple apart."""

    number: int
    last_write: int | None


def _is_function_of_its_inputs(node: fx.Node) -> bool:
    if node.op != "call_function" or collectives.group_of(node) is not None:
        return False
    if not (isinstance(node.target, OpOverload) or getattr(node.target, "__module__", "") == "_operator"):
        return False
    return not (written_inputs(node) or is_random(node) or node.is_impure())


def _is_alike_on_all_ranks(node: fx.Node) -> bool:
    """Whether equal calls are equal on every rank: numbers may differ there, unless they are of a shape."""
    return node.target in _TOLD_BY_SHAPES or not _has_numbers((node.args, node.kwargs))


def _has_numbers(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_has_numbers(item) for item in value)
    if isinstance(value, dict):
        return any(_has_numbers(item) for item in value.values())
    return isinstance(value, (int, float, complex)) and not isinstance(value, bool)


def _verdict(earlier: Collective, later: Collective) -> Verdict:
    reason, detail = "an equal one has the result already", f"that of {earlier.node.name}"
    return Verdict.of(later.node, Outcome.REMOVED, reason, detail=detail, bytes=later.bytes)


def _merge(program: Program, merged: dict[fx.Node, fx.Node]) -> None:
    """Let the waits of each later collective wait for the earlier one; what only the later one needed goes."""
    for later, earlier in merged.items():
        inputs = later.all_input_nodes
        later.replace_all_uses_with(earlier)
        program.graph.erase_node(later)
        for source in inputs:
            erase_if_dead(source)


def _unshare_results(program: Program, roots: dict[fx.Node, fx.Node], merged: dict[fx.Node, fx.Node]) -> None:
    """Copy what would be returned beside another collective's result in the same memory."""
    returned_by: dict[fx.Node, fx.Node] = {}
    apart = set()
    for value in program.results:
        root = roots[value] if isinstance(value, fx.Node) else None
        if root is not None and returned_by.setdefault(merged.get(root, root), root) is not root:
            apart.add(root)
    waits = (node for node in program.graph.nodes if collectives.is_wait(node)) if apart else ()
    return_copies(program, {wait: roots[wait] for wait in waits if roots[wait] in apart})
