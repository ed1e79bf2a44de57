"""Matmuls that have nothing to do with a scatter that they stand near: to be computed while its pieces travel.

In a backward these are the gradients of weights, beside the gradient that is scattered.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from crossfade.communicate.collective_matmul import WRITTEN, raised
from crossfade.cost.timeline import Costs
from crossfade.graph.effects import is_pure
from crossfade.graph.order import Order

READ = "what reads it stands above a scatter that it could hide, and cannot stand below"
NEEDED = "another matmul that hides a scatter needs it, or what it needs"

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

    def near(self, start: fx.Node, wanted: float) -> tuple[list[Spare], list[tuple[fx.Node, str]]]:
        """The nearest to where a collective starts, until they take so many seconds; and why others are not taken.

        What leads to it or follows from it is not asked, nor what is taken already.
        """
        found, declined, seconds = list[Spare](), list[tuple[fx.Node, str]](), 0.0
        for node in self._nearest(start):
            if seconds >= wanted:
                break
            spare = self._spare(node, start)
            if isinstance(spare, Spare) and not self._is_free(spare, found):
                spare = NEEDED
            if isinstance(spare, str):
                declined.append((node, spare))
            else:
                found.append(spare)
                seconds += self._costs.compute.get(node, 0.0)
        return found, declined

    def seconds(self, found: Sequence[Spare]) -> float:
        """What these take together."""
        return sum(self._costs.compute.get(spare.matmul, 0.0) for spare in found)

    def take(self, found: Sequence[Spare]) -> None:
        """Let nobody else have these."""
        for spare in found:
            self._taken |= spare.touched
            self._read |= spare.read

    def _nearest(self, start: fx.Node) -> list[fx.Node]:
        nodes, place = self._order.nodes, self._order.position[start]
        near = nodes[max(0, place - _REACH) : place + _REACH + 1]
        related = _related(start, near)
        free = [node for node in near if _is_plain(node) and node not in related and node not in self._taken]
        return sorted(free, key=lambda node: abs(self._order.position[node] - place))

    def _is_free(self, spare: Spare, found: Sequence[Spare]) -> bool:
        """Whether nobody moves it already, and nothing that is computed as early needs it or is needed by it."""
        if not self._taken.isdisjoint(spare.touched) or not self._read.isdisjoint((spare.matmul, *spare.sinks)):
            return False
        return not any(spare.needs(other) or other.needs(spare) or spare.touched & other.touched for other in found)

    def _spare(self, matmul: fx.Node, start: fx.Node) -> Spare | str:
        """How a matmul can be computed where a collective starts, or why it cannot."""
        if self._written & {matmul, *matmul.all_input_nodes}:
            return WRITTEN
        if not matmul < start:
            raises = raised(self._order, [matmul], start, self._written)
            return raises if isinstance(raises, str) else Spare(matmul, tuple(raises[:-1]), ())
        sinks = self._readers_above(matmul, start)
        if sinks is None or any(self._order.may_sink_above(node, start, sinks) for node in sinks):
            return READ
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


def _is_plain(node: fx.Node) -> bool:
    """Whether a node is a product of two matrices, and nothing more."""
    return node.target is torch.ops.aten.mm.default and len(node.args) == 2


def _related(start: fx.Node, near: Sequence[fx.Node]) -> set[fx.Node]:
    """Which of the nodes around a collective lead to it or follow from it."""
    window, above, below = set(near), {start}, {start}
    for found, links in ((above, lambda node: node.all_input_nodes), (below, lambda node: node.users)):
        stack = [start]
        while stack:
            new = [node for node in links(stack.pop()) if node in window and node not in found]
            found.update(new)
            stack += new
    return above | below
