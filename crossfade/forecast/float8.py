"""Products in float8: which ones, what their casts move, and which gathers carry bytes instead of halves."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from crossfade.cost.keys import Keys
from crossfade.cost.products import factors_of, shape_of
from crossfade.forecast.repeat import layer_of
from crossfade.graph import collectives
from crossfade.graph.collectives import Kind
from crossfade.graph.program import Program

RATE = "float8_e4m3fn"
_LEAST = 256
"""Products with a smaller side stay as they are."""
_FIRST, _OTHER_WAY = 5, 2
"""Bytes moved for each element of two bytes: read for the largest value, read and written as a byte; and for the
product that wants it transposed, that byte read and written once more."""
_TURNS = (torch.ops.aten.t.default, torch.ops.aten.transpose.int, torch.ops.aten.permute.default)
_LAID_OUT = (torch.ops.aten.clone.default, torch.ops.aten.split_with_sizes_copy.default, operator.getitem)


@dataclass(frozen=True)
class Casts:
    """What one product casts that none before it has: bytes moved, and kernels."""

    bytes: float = 0.0
    kernels: int = 0


@dataclass(frozen=True)
class Float8:
    """The products of a program that are computed in float8, with their casts; bytes that gathers then carry."""

    casts: Mapping[fx.Node, Casts] = field(default_factory=dict)
    sent: Mapping[fx.Node, int] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, keys: Keys, is_view: Callable[[fx.Node], bool]) -> Float8:
        """Large products of layers, or of the whole program where it has none: heads of language models stay as they
        are. A value that several products use is cast once; what is gathered for such products alone is cast before.
        """
        nodes = list(program.graph.nodes)
        has_layers = any(layer_of(node) is not None for node in nodes)
        products = {node for node in nodes if not (has_layers and layer_of(node) is None) and _is_large(node, keys)}
        for_products = _Uses(products, is_view)
        sent: dict[fx.Node, int] = {}
        for gather in collectives.find(program.graph):
            if gather.kind is Kind.ALL_GATHER and gather.node.meta["val"].dtype.itemsize == 2:
                share = for_products.share(gather.node)
                if share:
                    sent[gather.node] = int(gather.bytes * (1 - share / 2))
        sources = _Sources(is_view, {node: program.groups[collectives.group_of(node) or ""] for node in sent})
        return cls({node: sources.cast(node, keys) for node in nodes if node in products}, sent)


def _is_large(node: fx.Node, keys: Keys) -> bool:
    shape = shape_of(node, keys) if node.op == "call_function" else None
    return shape is not None and shape[0] == 1 and min(shape[1:]) >= _LEAST


@dataclass
class _Uses:
    """Who uses a value, through whatever only lays it out."""

    products: set[fx.Node]
    is_view: Callable[[fx.Node], bool]
    known: dict[fx.Node, bool] = field(default_factory=dict)

    def only(self, node: fx.Node) -> bool:
        """Whether nothing but products uses a value."""
        if node not in self.known:
            self.known[node] = bool(node.users) and all(
                user in self.products or (self._passes(user) and self.only(user)) for user in node.users
            )
        return self.known[node]

    def share(self, gather: fx.Node) -> float:
        """The share of a gather's elements that only products use."""
        if self.only(gather):
            return 1.0
        node = gather
        while len(node.users) == 1 and self._passes(next(iter(node.users))):
            node = next(iter(node.users))
            if isinstance(node.meta["val"], (tuple, list)):
                parts = [user for user in node.users if user.target is operator.getitem]
                used = sum(part.meta["val"].numel() for part in parts if self.only(part))
                return float(used / sum(value.numel() for value in node.meta["val"]))
        return 0.0

    def _passes(self, node: fx.Node) -> bool:
        if node.op != "call_function":
            return False
        return collectives.is_wait(node) or node.target in _LAID_OUT or self.is_view(node)


@dataclass
class _Sources:
    """What has been cast so far, and for which way round."""

    is_view: Callable[[fx.Node], bool]
    ranks: Mapping[fx.Node, int]
    """Of each gather that carries bytes."""
    done: dict[fx.Node, set[bool]] = field(default_factory=dict)

    def cast(self, product: fx.Node, keys: Keys) -> Casts:
        moved, kernels = 0.0, 0
        for factor in factors_of(product):
            source, turned, elements = self._source(factor, keys)
            ways = self.done.setdefault(source, set())
            if turned not in ways:
                moved += elements * (_OTHER_WAY if ways else _FIRST)
                kernels += 1 if ways else 2
                ways.add(turned)
        return Casts(moved, kernels)

    def _source(self, node: fx.Node, keys: Keys) -> tuple[fx.Node, bool, int]:
        """Where a factor comes from, whether it is turned round on the way, and how many elements are cast."""
        turned, elements = False, math.prod(keys.tensors(node)[0].sizes)
        element: fx.Node | None = None
        while node.all_input_nodes and node.op == "call_function":
            if node in self.ranks:  # each rank has cast its part of what is gathered
                return element or node, turned, elements // self.ranks[node]
            if node.target is operator.getitem:
                element = node
            elif self.is_view(node):
                turned ^= node.target in _TURNS
            elif not (collectives.is_wait(node) or node.target in _LAID_OUT):
                break
            node = node.all_input_nodes[0]
        return element or node, turned, elements
