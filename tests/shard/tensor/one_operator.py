"""One operator on all ranks: its operands placed as asked, its results put together again."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, OutputKind, OutputSpec
from torch.export.graph_signature import TensorArgument as Named
from torch.utils._pytree import tree_leaves, tree_map_only

from crossfade.graph.private import FakeTensorMode, exported_program
from crossfade.shard.tensor.factors import Decision, Operand
from crossfade.shard.tensor.localize import Request, localize
from crossfade.shard.tensor.parts import joined
from crossfade.shard.tensor.placements import REPLICATE, Partial, Placement, Shard, divides
from crossfade.shard.tensor.plan_resolved import ResolvedPlan
from crossfade.shard.tensor.rules import PlacedCall, rule_of
from tests.shard.tensor.lockstep import run_ranks

aten = torch.ops.aten


@cache
def _template() -> Any:
    return torch.export.export(nn.Identity(), (torch.ones(1),))


class OneOperator:
    """A program of one call. An operand that is a partial sum arrives as the addends of all ranks, a dim in front."""

    def __init__(
        self, target: Any, args: Sequence[Any], kwargs: dict[str, Any], places: Sequence[Placement], ranks: int
    ):
        self.places, self.ranks = list(places), ranks
        self.mode, self.graph = FakeTensorMode(), fx.Graph()
        self.given, self.operands = [], []
        placed = iter(places)
        args, kwargs = tree_map_only(Tensor, lambda value: self._operand(value, next(placed)), (tuple(args), kwargs))
        self.node = self._call(target, args, kwargs)
        self.results = [self.node]
        if isinstance(self.node.meta["val"], (tuple, list)):
            self.results = [self._call(operator.getitem, (self.node, i), {}) for i in range(len(self.node.meta["val"]))]
        self.graph.output(tuple(self.results))

    def _operand(self, value: Tensor, place: Placement) -> fx.Node:
        index = len(self.given)
        node = self.graph.placeholder(f"x{index}")
        if isinstance(place, Partial):
            value = _addends(value, self.ranks)
        self.given.append(value)
        node.meta["val"] = self.mode.from_tensor(value)
        self.operands.append(self._call(aten.sum.dim_IntList, (node, [0]), {}) if isinstance(place, Partial) else node)
        return self.operands[-1]

    def _call(self, target: Any, args: Any, kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        values, named = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
        with self.mode, torch.no_grad():
            node.meta["val"] = target(*values, **named)
        return node

    def decision(self) -> Decision:
        """What the operator's rule says."""
        rule = rule_of(self.node.target)
        assert rule is not None
        values = [node.meta["val"] for node in self.operands]
        operands = [
            Operand(place, tuple(value.shape), value.numel() * value.itemsize)
            for place, value in zip(self.places, values, strict=True)
        ]
        return rule(PlacedCall(self.node, operands, self.operands, self.ranks))

    def whole(self) -> list[Tensor]:
        """What one device computes."""
        known: dict[fx.Node, Any] = {}
        given = iter(self.given)
        for node in self.graph.nodes:
            if node.op == "placeholder":
                known[node] = next(given)
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
                known[node] = node.target(*args, **kwargs)
        return [known[node] for node in self.results]

    def on_ranks(self, *, left_split: bool) -> list[list[Tensor]]:
        """The results, put together by every rank, or left split and put together here."""
        placed = {
            f"x{i}": Shard(0) if isinstance(place, Partial) else place
            for i, place in enumerate(self.places)
            if place != REPLICATE
        }
        kept = self.decision().results if left_split else ()
        outputs = {index: place for index, place in enumerate(kept) if isinstance(place, Shard)}
        local = localize(self._exported(), ResolvedPlan({}, {}), self.ranks, "tp", Request(placed, outputs))
        found = run_ranks(local, {}, self.given)
        for index, place in outputs.items():
            whole = joined([results[index] for results in found], place)
            for results in found:
                results[index] = whole
        return found

    def _exported(self) -> Any:
        names = [node.name for node in self.graph.find_nodes(op="placeholder")]
        signature = ExportGraphSignature(
            [InputSpec(InputKind.USER_INPUT, Named(name=name), None) for name in names],
            [OutputSpec(OutputKind.USER_OUTPUT, Named(name=node.name), None) for node in self.results],
        )
        return exported_program(_template(), self.graph, signature, {})


def _addends(value: Tensor, ranks: int) -> Tensor:
    """Addends, of all signs, whose sum is about the value: exactly it, for whole numbers."""
    if value.is_floating_point():
        noise = torch.randn(ranks, *value.shape, generator=torch.Generator().manual_seed(0))
    else:
        noise = torch.randint(-5, 6, (ranks, *value.shape), generator=torch.Generator().manual_seed(0))
    noise = noise.to(value.dtype)
    return torch.cat([noise[1:], (value - noise[1:].sum(0, dtype=value.dtype))[None]])


def tensors_of(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The operands of a call, in order."""
    return [leaf for leaf in tree_leaves((tuple(args), kwargs)) if isinstance(leaf, Tensor)]


def placements_of(value: Tensor, ranks: int) -> list[Placement]:
    """Every placement that a test may ask of an operand, partial sums only of what can be added."""
    found: list[Placement] = [REPLICATE]
    for dim, size in enumerate(value.shape):
        blocks = [Shard(dim), Shard(dim, outer=2), Shard(dim, sizes=(size - 2 * ranks, 2 * ranks))]
        usable = [split for split in blocks if divides(split, size, ranks) and min(split.sizes or (1,)) > 0]
        found += usable[:2] if size == 4 * ranks else usable
    if value.dtype in (torch.float32, torch.float64, torch.int64):
        found.append(Partial())
    return found
