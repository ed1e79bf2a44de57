"""Order: what must come before what, how far a node may move, and who reaches whom.

Beyond data, three things order nodes: writes to memory that others read, draws from the random generator, and the
collectives of one process group, which every rank must start in the same order. All of it is found in one walk.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from crossfade.errors import RewriteError
from crossfade.graph import collectives

_MAY_ALIAS = frozenset({"aten::reshape", "aten::contiguous", "aten::flatten", "aten::to", "aten::reshape_as"})
"""Composite ops that return their input or a copy, by layout: taken as aliases, which is the safe side."""


class Order:
    """A snapshot of a graph's order: positions and dependencies. Build it anew after changing the graph.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4] = input("x")
    ... a: f32[4] = aten.relu(x)
    ... b: f32[4] = aten.neg(x)
    ... c: f32[4] = aten.add.Tensor(a, b)
    ... return output("c", c)
    ... ''')
    >>> order = Order(program.graph)
    >>> x, a, b, c, out = program.graph.nodes
    >>> order.may_rise_above(b, a), str(order.may_rise_above(c, b))
    (None, 'b is an input of c')
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.nodes: list[fx.Node] = list(graph.nodes)
        self.position = {node: index for index, node in enumerate(self.nodes)}
        self._roots = alias_roots(self.nodes)
        self._ordered_after = _ordering_edges(self.nodes, self._roots)
        self._ordered_before: dict[fx.Node, list[tuple[fx.Node, str]]] = {}
        for node, edges in self._ordered_after.items():
            for before, why in edges:
                self._ordered_before.setdefault(before, []).append((node, why))

    def predecessors(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that must stay above `node`."""
        return [*node.all_input_nodes, *(before for before, _ in self._ordered_after.get(node, ()))]

    def successors(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that must stay below `node`."""
        return [*node.users, *(after for after, _ in self._ordered_before.get(node, ()))]

    def last_predecessor(self, node: fx.Node) -> fx.Node | None:
        """The lowest node that must stay above `node`: the node may rise to just below it."""
        return max(self.predecessors(node), key=self.position.__getitem__, default=None)

    def first_successor(self, node: fx.Node) -> fx.Node | None:
        """The highest node that must stay below `node`: the node may sink to just above it."""
        return min(self.successors(node), key=self.position.__getitem__, default=None)

    def may_rise_above(self, node: fx.Node, other: fx.Node) -> Blocker | None:
        """None if `node` alone may move up to just before `other`; else the lowest node in its way, and why."""
        blockers = [Blocker(before, node, "is an input of") for before in node.all_input_nodes]
        blockers += [Blocker(before, node, why) for before, why in self._ordered_after.get(node, ())]
        if node.op in ("placeholder", "output"):
            return Blocker(node, node, "is fixed at the border of the graph with")
        low = self.position[other]
        in_the_way = [b for b in blockers if self.position[b.node] >= low]
        return max(in_the_way, key=lambda b: self.position[b.node], default=None)

    def may_sink_below(self, node: fx.Node, other: fx.Node) -> Blocker | None:
        """None if `node` alone may move down to just after `other`; else the highest node in its way, and why."""
        if node.op in ("placeholder", "output"):
            return Blocker(node, node, "is fixed at the border of the graph with")
        blockers = [Blocker(after, node, "uses") for after in node.users]
        blockers += [Blocker(after, node, why) for after, why in self._ordered_before.get(node, ())]
        high = self.position[other]
        in_the_way = [b for b in blockers if self.position[b.node] <= high]
        return min(in_the_way, key=lambda b: self.position[b.node], default=None)

    def sorted(self, key: Callable[[fx.Node], Any] | None = None) -> list[fx.Node]:
        """A topological order of all nodes; among the ready ones the smallest `key` first (default: as they stood)."""
        rank = key or self.position.__getitem__
        waiting = {node: len(set(self.predecessors(node))) for node in self.nodes}
        ready = [(rank(n), self.position[n], n) for n in self.nodes if not waiting[n] and n.op != "output"]
        heapq.heapify(ready)
        result: list[fx.Node] = []
        while ready:
            _, _, node = heapq.heappop(ready)
            result.append(node)
            for after in set(self.successors(node)):
                waiting[after] -= 1
                if not waiting[after] and after.op != "output":
                    heapq.heappush(ready, (rank(after), self.position[after], after))
        return [*result, *(n for n in self.nodes if n.op == "output")]


@dataclass(frozen=True, slots=True)
class Blocker:
    """A node that stands in the way of a move, and why."""

    node: fx.Node
    mover: fx.Node
    why: str

    def __str__(self) -> str:
        return f"{self.node.name} {self.why} {self.mover.name}"


def reorder(graph: fx.Graph, nodes: Sequence[fx.Node]) -> bool:
    """Put the graph's nodes in the given order (all of them, output last); True if that changed anything."""
    if list(graph.nodes) == list(nodes):
        return False
    if len(nodes) != len(graph.nodes) or nodes[-1].op != "output":
        raise RewriteError(
            f"an order of {len(nodes)} nodes",
            expected=f"all {len(graph.nodes)} nodes of the graph, the output last",
            remedy="start from list(graph.nodes) and move nodes in it",
        )
    end = nodes[-1]
    for node in nodes[:-1]:
        end.prepend(node)
    return True


class Reachability:
    """Exact reachability from a few marked nodes to all others, by bitsets: one walk, one bit a marked node.

    All pairs of 100,000 nodes would take a gigabyte; passes only ever ask about their candidates.

        >>> from crossfade.graph.text import parse
        >>> program = parse('''
        ... x: f32[4] = input("x")
        ... a: f32[4] = aten.relu(x)
        ... b: f32[4] = aten.neg(x)
        ... c: f32[4] = aten.exp(a)
        ... return output("b", b), output("c", c)
        ... ''')
        >>> x, a, b, c, out = program.graph.nodes
        >>> reach = Reachability(Order(program.graph), [a, b, c])
        >>> reach.reaches(a, c), reach.reaches(b, c)
        (True, False)
    """

    def __init__(self, order: Order, marked: Iterable[fx.Node]) -> None:
        self.bit = {node: 1 << index for index, node in enumerate(marked)}
        self.ancestors: dict[fx.Node, int] = {}
        """For each node, the marked nodes strictly above it in the dependency order, as a bitset."""
        ancestors, bit = self.ancestors, self.bit
        for node in order.nodes:
            found = 0
            for before in order.predecessors(node):
                found |= ancestors[before] | bit.get(before, 0)
            ancestors[node] = found

    def reaches(self, source: fx.Node, target: fx.Node) -> bool:
        """Whether `target` depends, directly or not, on the marked node `source`."""
        return bool(self.ancestors[target] & self.bit[source])


def alias_roots(nodes: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """For each node, the node that owns its memory: views, in-place results and waits share their input's.

    An op that may return any of several inputs is given the first; ATen has none among the ops of captured graphs.
    """
    roots: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        shared = _aliased_input(node)
        roots[node] = roots[shared] if shared is not None else node
    return roots


def written_inputs(node: fx.Node) -> list[fx.Node]:
    """The argument nodes whose memory this node writes, from its operator's schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    written: list[fx.Node] = []
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.kwargs.get(argument.name) if argument.name in node.kwargs else _positional(node, index)
            fx.map_arg(value, written.append)
    return written


def is_random(node: fx.Node) -> bool:
    """Whether this node draws from the random generator."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _aliased_input(node: fx.Node) -> fx.Node | None:
    if node.op != "call_function":
        return None
    if collectives.is_wait(node):
        return node.args[0]  # type: ignore[return-value]
    schema = getattr(node.target, "_schema", None)
    if schema is None:  # operator.getitem on a tuple of results
        return node.all_input_nodes[0] if node.all_input_nodes else None
    shared = {alias for item in schema.returns if item.alias_info is not None for alias in item.alias_info.before_set}
    for index, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if schema.name in _MAY_ALIAS and index == 0 or info is not None and shared & info.before_set:
            found: list[fx.Node] = []
            fx.map_arg(_positional(node, index) if index < len(node.args) else node.kwargs.get(argument.name), found.append)
            if found:
                return found[0]
    return None


def _ordering_edges(
    nodes: Sequence[fx.Node], roots: dict[fx.Node, fx.Node]
) -> dict[fx.Node, list[tuple[fx.Node, str]]]:
    """For each node, the earlier nodes it must stay below for a reason other than data."""
    edges: dict[fx.Node, list[tuple[fx.Node, str]]] = {}
    written = {roots[target] for node in nodes for target in written_inputs(node)}
    readers: dict[fx.Node, list[fx.Node]] = {}
    writer: dict[fx.Node, fx.Node] = {}
    last_random: fx.Node | None = None
    last_effect: fx.Node | None = None
    last_started: dict[str, fx.Node] = {}

    def after(node: fx.Node, before: fx.Node | None, why: str) -> None:
        if before is not None and before is not node:
            edges.setdefault(node, []).append((before, why))

    for node in nodes:
        if node.op != "call_function":
            continue
        if written:
            touched = {roots[source] for source in _read_until(node)} & written
            targets = {roots[target] for target in written_inputs(node)}
            for root in touched:
                after(node, writer.get(root), "writes memory read by")
            for root in targets:
                for reader in readers.pop(root, []):
                    after(node, reader, "reads memory written by")
                writer[root] = node
            for root in touched - targets:
                readers.setdefault(root, []).append(node)
        if is_random(node):
            after(node, last_random, "draws random numbers before")
            last_random = node
        elif _has_hidden_effect(node):
            after(node, last_effect, "has a side effect before")
            last_effect = node
        if (started := collectives.view(node)) is not None:
            after(node, last_started.get(started.group), "starts a collective of the same group before")
            last_started[started.group] = node
    return edges


def _has_hidden_effect(node: fx.Node) -> bool:
    """Effects that no schema describes (asserts, profiler marks): kept in order among themselves."""
    known = collectives.is_wait(node) or collectives.is_collective(node) or written_inputs(node)
    return not known and node.is_impure()


def _read_until(node: fx.Node) -> list[fx.Node]:
    """What a node reads; a wait also ends the reading of its collective's inputs, which goes on until then."""
    start = collectives.started_by(node) if collectives.is_wait(node) else None
    return [*node.all_input_nodes, *(start.all_input_nodes if start is not None else ())]


def _positional(node: fx.Node, index: int) -> Any:
    return node.args[index] if index < len(node.args) else None
