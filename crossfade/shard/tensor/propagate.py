"""Placements of every value, from the plan's parameters on: one walk forward, operator by operator.

Partial sums are carried on as long as what follows is linear, and reduced once where it is not: one all-reduce for
attention and one for the feed-forward part of a layer, or one for both where they are added. A value that some users
take as a partial sum and others whole is reduced where it arises, and the walk starts again.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from crossfade.graph.passes import Outcome, Verdict
from crossfade.graph.program import source_line, tensor_bytes
from crossfade.shard.tensor import rules_experts, rules_images, rules_lookup, rules_norms, rules_table, rules_views  # noqa: F401
from crossfade.shard.tensor.factors import Decision, Operand, WeightStuck, refuse, replicated
from crossfade.shard.tensor.placements import REPLICATE, Partial, Placement, Shard
from crossfade.shard.tensor.rules import PlacedCall, rule_of


@dataclass(frozen=True)
class Settings:
    """What a propagation starts from: placements of inputs by node name, of values at the plan's boundaries."""

    ranks: int
    inputs: Mapping[str, Placement]
    weights: Mapping[str, str]
    """Which placeholder is which parameter."""
    boundaries: Mapping[str, Placement] = field(default_factory=dict)
    """The placement a value is brought to as soon as it is made, by node name."""
    allow_weight_gather: bool = False
    constants: frozenset[str] = frozenset()
    """Placeholders that hold no activation."""


@dataclass
class Propagated:
    """The placement of every value, how every operator runs, and what had to be said about it."""

    placements: dict[fx.Node, Any] = field(default_factory=dict)
    decisions: dict[fx.Node, Decision] = field(default_factory=dict)
    brought: dict[fx.Node, Placement] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)


def propagate(graph: fx.Graph, settings: Settings) -> Propagated:
    """Place every value of a graph."""
    reduce_here: set[fx.Node] = set()
    while True:
        walk = _Walk(settings, reduce_here)
        for node in graph.nodes:
            walk.visit(node)
        again = walk.reduced & walk.carried - reduce_here
        if not again:
            return walk.done
        reduce_here |= again


class _Walk:
    def __init__(self, settings: Settings, reduce_here: set[fx.Node]) -> None:
        self.settings, self.reduce_here = settings, reduce_here
        self.done = Propagated()
        self.reduced: set[fx.Node] = set()
        self.carried: set[fx.Node] = set()
        self.weight_of: dict[fx.Node, str] = {}
        self.constant: set[fx.Node] = set()
        self.said: set[tuple[str, str]] = set()

    def visit(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self.done.placements[node] = self.settings.inputs.get(node.name, REPLICATE)
            if node.name in self.settings.weights:
                self.weight_of[node] = self.settings.weights[node.name]
            if node.name in self.settings.constants:
                self.constant.add(node)
        elif node.op == "get_attr":
            self.done.placements[node] = REPLICATE
            self.constant.add(node)
        elif node.op == "call_function":
            self._visit_call(node)

    def _visit_call(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            self._visit_element(node)
            return
        tensors = tensor_operands(node)
        if all(source in self.constant for source in tensors):
            self.constant.add(node)
        if not tensors:
            self.done.placements[node] = REPLICATE
            return
        operands = [self._operand(source) for source in tensors]
        decision = self._decide(node, tensors, operands)
        self.done.decisions[node] = decision
        for source, operand, want in zip(tensors, operands, decision.wants, strict=True):
            self._note_use(node, source, operand.placement, want, decision.why)
        several = isinstance(node.meta.get("val"), (tuple, list))
        results = decision.results
        placement = results if several else (results[0] if results else REPLICATE)
        self.done.placements[node] = placement
        if len(tensors) == 1 and tensors[0] in self.weight_of and isinstance(placement, Shard):
            self.weight_of[node] = self.weight_of[tensors[0]]
        if not several:
            self._bring(node)

    def _visit_element(self, node: fx.Node) -> None:
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        held = self.done.placements.get(source, REPLICATE)
        self.done.placements[node] = held[index] if isinstance(held, tuple) else held
        if source in self.weight_of:
            self.weight_of[node] = self.weight_of[source]
        if source in self.constant:
            self.constant.add(node)
        self._bring(node)

    def _bring(self, node: fx.Node) -> None:
        """Bring a value to the placement that its boundary, or its users together, want it in."""
        placement = self.done.placements[node]
        wanted = self.settings.boundaries.get(node.name)
        if node in self.reduce_here and isinstance(placement, Partial):
            wanted = wanted or REPLICATE
        elif wanted == REPLICATE and isinstance(placement, Partial):
            return  # reduced where it must be, not before
        if wanted is None or wanted == placement or not _is_tensor(node):
            return
        self.done.brought[node] = wanted
        self._note_use(node, node, placement, wanted, "the plan's boundary" if node not in self.reduce_here else "")
        self.done.placements[node] = wanted

    def _operand(self, source: fx.Node) -> Operand:
        placement = self.done.placements[source]
        if isinstance(placement, Partial) and source in self.reduced:
            placement = REPLICATE
        value = source.meta["val"]
        is_weight = source in self.weight_of and isinstance(placement, Shard)
        return Operand(placement, tuple(value.shape), tensor_bytes(value), is_weight, source in self.constant)

    def _decide(self, node: fx.Node, tensors: list[fx.Node], operands: list[Operand]) -> Decision:
        rule = rule_of(node.target)
        call = PlacedCall(node, operands, tensors, self.settings.ranks)
        if rule is None:
            why = "there is no rule for this operator"
            if any(operand.placement != REPLICATE for operand in operands):
                remedy = f"register_rule({str(node.target)!r}, ...) says how it may be split"
                self._say(node, Outcome.REPLACED, why, f"{node.target}: its operands are replicated", remedy)
            return replicated(len(operands), len(call.results), why)
        try:
            return rule(call)
        except WeightStuck as stuck:
            name = self.weight_of[tensors[stuck.operand]]
            if not self.settings.allow_weight_gather:
                raise refuse(name, operands[stuck.operand].placement, f"{node.name}: {stuck.why}") from stuck
            return replicated(len(operands), len(call.results), stuck.why)

    def _note_use(self, node: fx.Node, source: fx.Node, given: Placement, want: Placement, why: str) -> None:
        if isinstance(given, Partial):
            (self.carried if isinstance(want, Partial) else self.reduced).add(source)
        if given in (want, REPLICATE):
            return
        if isinstance(given, Shard) and not isinstance(want, Partial):
            if source in self.weight_of and not self.settings.allow_weight_gather:
                raise refuse(self.weight_of[source], given, f"{node.name} wants it {want}: {why}")
            self._say(source, Outcome.INSERTED, "gathered", f"for {node.name}: {why}" if why else f"for {node.name}")
        elif isinstance(given, Partial):
            self._say(source, Outcome.INSERTED, "reduced", f"for {node.name}")

    def _say(self, node: fx.Node, outcome: Outcome, reason: str, detail: str, remedy: str = "") -> None:
        """Once for each value and reason."""
        if (node.name, reason) in self.said:
            return
        self.said.add((node.name, reason))
        size = tensor_bytes(node.meta["val"])
        self.done.verdicts.append(Verdict(node.name, outcome, reason, source_line(node), remedy, size, detail))


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    """Every tensor among the arguments, in order, as often as it occurs."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return [source for source in found if _is_tensor(source)]


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)
