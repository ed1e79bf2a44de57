"""Matmuls that have nothing to do with a scatter that they stand near: to be computed while its pieces travel.

In a backward these are the gradients of weights, beside the gradient that is scattered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from crossfade.communicate.pipelines import raised
from crossfade.cost.timeline import Costs
from crossfade.graph.effects import is_pure
from crossfade.graph.order import Order

_REACH = 64
"""How far from a scatter is looked, in nodes to either side."""

_MOST_SUNK = 32
"""Nodes that may be put below a scatter because they read such a matmul: transposed and converted, a handful."""


@dataclass(frozen=True)
class Spare:
    """One such matmul: what must stand above the scatter for it, and what reads it and must stand below."""

    matmul: fx.Node
    raises: tuple[fx.Node, ...]
    sinks: tuple[fx.Node, ...]

    @property
    def touched(self) -> set[fx.Node]:
        """Every node that is moved."""
        return {self.matmul, *self.raises, *self.sinks}

    @property
    def read(self) -> set[fx.Node]:
        """What it is computed from, here or on the way."""
        return {source for node in (self.matmul, *self.raises) for source in node.all_input_nodes}

    def needs(self, other: Spare) -> bool:
        """Whether it reads what another makes: they cannot both be computed at one place."""
        return not self.read.isdisjoint((other.matmul, *other.sinks))


class SpareMatmuls:
    """Finds them, each once; `taken` are the nodes that are spoken for."""

    def __init__(self, order: Order, costs: Costs, written: set[fx.Node], taken: Collection[fx.Node]) -> None:
        self._order, self._costs, self._written, self._taken = order, costs, written, set(taken)
        self._read = set[fx.Node]()
        """What those read that are taken: it must not sink below them."""

    def near(self, start: fx.Node, way: Collection[fx.Node], wanted: float) -> list[Spare]:
        """The nearest to where a collective starts that `way` leads to, until they take so many seconds."""
        found: list[Spare] = []
        touched, seconds = set(way), 0.0
        for node in self._nearest(start):
            if seconds >= wanted:
                break
            spare = self._spare(node, start)
            if spare is not None and touched.isdisjoint(spare.touched) and self._is_free(spare, found):
                found.append(spare)
                touched |= spare.touched
                seconds += self._costs.compute.get(node, 0.0)
        return found

    def _is_free(self, spare: Spare, found: Sequence[Spare]) -> bool:
        """Whether nobody has it already, and nothing that is computed as early needs it or is needed by it."""
        if not self._taken.isdisjoint(spare.touched) or not self._read.isdisjoint((spare.matmul, *spare.sinks)):
            return False
        return not any(spare.needs(one) or one.needs(spare) for one in found)

    def seconds(self, found: Sequence[Spare]) -> float:
        """What these take together."""
        return sum(self._costs.compute.get(spare.matmul, 0.0) for spare in found)

    def take(self, found: Sequence[Spare]) -> None:
        """Let nobody else have these."""
        for spare in found:
            self._taken |= spare.touched
            self._read |= spare.read

    def _nearest(self, start: fx.Node) -> Iterator[fx.Node]:
        nodes, place = self._order.nodes, self._order.position[start]
        near = nodes[max(0, place - _REACH) : place + _REACH + 1]
        matmuls = [node for node in near if node.target is torch.ops.aten.mm.default and len(node.args) == 2]
        yield from sorted(matmuls, key=lambda node: abs(self._order.position[node] - place))

    def _spare(self, matmul: fx.Node, start: fx.Node) -> Spare | None:
        """How a matmul can be computed where a collective starts; None if it cannot."""
        if self._written & {matmul, *matmul.all_input_nodes}:
            return None
        if not matmul < start:
            raises = raised(self._order, [matmul], start, self._written)
            return None if isinstance(raises, str) else Spare(matmul, tuple(raises[:-1]), ())
        sinks = self._readers_above(matmul, start)
        if sinks is None or any(self._order.may_sink_above(node, start, sinks) for node in sinks):
            return None
        return Spare(matmul, (), tuple(sorted(sinks - {matmul}, key=self._order.position.__getitem__)))

    def _readers_above(self, matmul: fx.Node, start: fx.Node) -> set[fx.Node] | None:
        """A matmul and what is made from it above a place; None if that is much, or more than data orders it."""
        found, stack = {matmul}, [matmul]
        while stack:
            for user in stack.pop().users:
                if user in found or not user < start:
                    continue
                found.add(user)
                stack.append(user)
                if len(found) > _MOST_SUNK or not is_pure(user.target) or user in self._written:
                    return None
        return found
