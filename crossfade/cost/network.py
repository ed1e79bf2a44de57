"""Networks that are hierarchies: links inside a node and between nodes, and what rings and trees over them cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from crossfade.cost.machine_parts import Link, bytes_sent
from crossfade.graph.collectives import Kind

_TREE_SHARE = 0.9
"""What trees carry of a ring's bandwidth: an inner rank sends both up and down."""


@dataclass(frozen=True)
class Wire:
    """What joins neighbours: seconds of one step, and bytes a second that each device sends (its rail)."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Network:
    """Nodes of `per_node` devices, joined `inside` by one kind of wire and `between` each other by another.

    `start` is what any collective takes before its first step; `copy` is the rate in bytes a second at which a device
    passes what it is given once through its own memory, beside what travels.

        >>> network = Network(8, Wire(4e-6, 280e9), Wire(10e-6, 25e9), start=2e-5, copy=600e9)
        >>> network.along({"dp": 32, "tp": 8}, "dp")
        Route(within=1, nodes=32)
    """

    per_node: int
    inside: Wire
    between: Wire
    start: float = 0.0
    copy: float = math.inf

    def along(self, mesh: Mapping[str, int], axis: str) -> Route:
        """Where the ranks of an axis lie: the last axis of a mesh is that of neighbours."""
        names = list(mesh)
        stride = math.prod(mesh[name] for name in names[names.index(axis) + 1 :])
        return self.route(mesh[axis], stride)

    def route(self, ranks: int, stride: int = 1) -> Route:
        """Where so many ranks lie of which neighbours are `stride` devices apart."""
        within = max(1, min(ranks, self.per_node // stride))
        return Route(within, -(-ranks // within))

    def seconds(self, kind: Kind, size: float, ranks: int, route: Route) -> float:
        """Seconds of a collective alone, for the bytes of its larger side: by a ring or a tree, whichever is sooner."""
        if ranks < 2:
            return 0.0
        once = self.start + size / self.copy
        if kind is Kind.ALL_TO_ALL:
            return once + self._exchange(size, ranks, route)
        ring = self._ring_latency(kind, ranks, route) + bytes_sent(kind, int(size), ranks) / self._rate(route)
        if kind is not Kind.ALL_REDUCE:
            return once + ring
        tree = self._tree_latency(route) + 2 * size / (self._rate(route) * _TREE_SHARE)
        return once + min(ring, tree)

    def _rate(self, route: Route) -> float:
        """What a rank sends to the next: a group of several ranks a node uses as many rails."""
        if route.nodes == 1:
            return self.inside.bandwidth
        return min(self.inside.bandwidth if route.within > 1 else math.inf, self.between.bandwidth * route.within)

    def _ring_latency(self, kind: Kind, ranks: int, route: Route) -> float:
        rounds = 2 if kind is Kind.ALL_REDUCE else 1
        crossing = rounds * (route.nodes - 1)
        return crossing * self.between.latency + (rounds * (ranks - 1) - crossing) * self.inside.latency

    def _tree_latency(self, route: Route) -> float:
        up = math.ceil(math.log2(route.nodes)) * self.between.latency + (route.within - 1) * self.inside.latency
        return 2 * up

    def _exchange(self, size: float, ranks: int, route: Route) -> float:
        """Every rank sends a part to every other one, over the wire that it takes to get there."""
        inside = size * (route.within - 1) / ranks / self.inside.bandwidth
        between = size * (ranks - route.within) / ranks / self.between.bandwidth
        steps = math.ceil(math.log2(ranks)) * (self.between if route.nodes > 1 else self.inside).latency
        return steps + max(inside, between)


@dataclass(frozen=True)
class Route:
    """Where the ranks of a group lie: so many on each node, on so many nodes."""

    within: int
    nodes: int


@dataclass(frozen=True)
class RoutedLink(Link):
    """A link whose cost is that of a way through a network."""

    network: Network | None = None
    route: Route | None = None

    def seconds(self, kind: Kind, size: int, ranks: int) -> float:
        """Seconds that a collective takes alone, for the bytes of its larger side."""
        assert self.network is not None
        return self.network.seconds(kind, size, ranks, self.route or self.network.route(ranks))


def routed(network: Network, route: Route | None = None) -> RoutedLink:
    """A link through a network; without a route, of ranks that are neighbours."""
    return RoutedLink(network.inside.latency, network.inside.bandwidth, None, network, route)
