"""Order: what must come before what, how far a node may move, and who reaches whom.

Beyond data, three things order nodes: writes to memory that others read, draws from the random generator, and the
collectives of one process group, which every rank must start in the same order. All of it is found in one walk.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from crossfade.errors import RewriteError
from crossfade.graph import collectives
from crossfade.graph.effects import (
    alias_roots,
    has_hidden_effect,
    is_pure,
    is_random,
    memory_behind,
    rewritten,
    rewritten_at_waits,
    strided_owners,
    written_inputs,
)

_Edge = tuple[fx.Node, fx.Node, str]
_Memory = dict[fx.Node, None]
_Lists = Mapping[fx.Node, Sequence[fx.Node]]

_SAME_GROUP = "starts a collective of the same group before"

_SEEN_FROM_BELOW = {
    "writes memory read by": "reads memory written by",
    "reads memory written by": "writes memory read by",
    "draws random numbers before": "draws random numbers after",
    "has a side effect before": "has a side effect after",
    _SAME_GROUP: "starts a collective of the same group after",
}
"""Each reason for an order, said of the later node."""


class Order:
    """A snapshot of a graph's order: positions and dependencies. Build a new one after changing the graph.

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
        self._last_placeholder = next((node for node in reversed(self.nodes) if node.op == "placeholder"), None)
        self.roots = alias_roots(self.nodes)
        self._ordered_after = _ordering_edges(self.nodes, self.roots)
        self._ordered_before: dict[fx.Node, list[tuple[fx.Node, str]]] = {}
        for node, edges in self._ordered_after.items():
            for before, why in edges:
                self._ordered_before.setdefault(before, []).append((node, why))

    def predecessors(self, node: fx.Node, *, within_group: bool = True) -> list[fx.Node]:
        """The nodes that must stay above `node`.

        Without `within_group`, here and below, the order of the collectives of one group does not count: for passes
        that change it, alike on all ranks.
        """
        edges = self._ordered_after.get(node)
        return node.all_input_nodes if edges is None else [*node.all_input_nodes, *_ends(edges, within_group)]

    def successors(self, node: fx.Node, *, within_group: bool = True) -> list[fx.Node]:
        """The nodes that must stay below `node`."""
        edges = self._ordered_before.get(node)
        return list(node.users) if edges is None else [*node.users, *_ends(edges, within_group)]

    def owner(self, node: fx.Node) -> fx.Node:
        """The node whose memory a value lies in; see `alias_roots`."""
        return self.roots[node]

    def rewritten(self) -> set[fx.Node]:
        """See `rewritten`."""
        return rewritten(self.nodes, self.roots)

    def strided_owners(self) -> set[fx.Node]:
        """See `strided_owners`."""
        return strided_owners(self.nodes, self.roots)

    def may_rise_above(self, node: fx.Node, other: fx.Node, moving: Container[fx.Node] = ()) -> Blocker | None:
        """None if `node` may move up to just before `other`; else the lowest node in its way, and why.

        It moves alone, or with the nodes `moving`, which are not in its way.
        """
        if node.op in ("placeholder", "output"):
            return Blocker(node, node, "is fixed at the border of the graph with")
        low = self.position[other]
        blockers = [Blocker(before, node, "is an input of") for before in node.all_input_nodes]
        blockers += [Blocker(before, node, why) for before, why in self._ordered_after.get(node, ())]
        if self._last_placeholder is not None:
            blockers.append(Blocker(self._last_placeholder, node, "is an input of the graph, which stays above"))
        in_the_way = [
            b for b in blockers if low <= self.position[b.node] < self.position[node] and b.node not in moving
        ]
        return max(in_the_way, key=lambda b: self.position[b.node], default=None)

    def may_sink_below(self, node: fx.Node, other: fx.Node) -> Blocker | None:
        """None if `node` alone may move down to just after `other`; else the highest node in its way, and why."""
        return self._sinking(node, self.position[other] + 1, ())

    def may_sink_above(self, node: fx.Node, other: fx.Node, moving: Container[fx.Node] = ()) -> Blocker | None:
        """None if `node` may move down to just before `other`, alone or with the nodes `moving`; else the blocker."""
        return self._sinking(node, self.position[other], moving)

    def _sinking(self, node: fx.Node, end: int, moving: Container[fx.Node]) -> Blocker | None:
        if node.op in ("placeholder", "output"):
            return Blocker(node, node, "is fixed at the border of the graph with")
        blockers = [Blocker(after, node, "uses") for after in node.users]
        blockers += [Blocker(after, node, _SEEN_FROM_BELOW[why]) for after, why in self._ordered_before.get(node, ())]
        if self.nodes[-1].op == "output":
            blockers.append(Blocker(self.nodes[-1], node, "ends the graph, after"))
        in_the_way = [b for b in blockers if self.position[b.node] < end and b.node not in moving]
        return min(in_the_way, key=lambda b: self.position[b.node], default=None)

    def sorted(self, key: Callable[[fx.Node], Any] | None = None) -> list[fx.Node]:
        """A topological order of all nodes; among the ready ones the smallest `key` first (default: as they stood).

        Whatever the key, the placeholders stay first and in their order, which is the program's signature.
        """
        rank = key or self.position.__getitem__
        waiting = {node: len(set(self.predecessors(node))) for node in self.nodes}
        free = [n for n in self.nodes if not waiting[n] and n.op not in ("placeholder", "output")]
        ready = [(rank(n), self.position[n], n) for n in free]
        heapq.heapify(ready)
        result: list[fx.Node] = []

        def place(node: fx.Node) -> None:
            result.append(node)
            for after in set(self.successors(node)):
                waiting[after] -= 1
                if not waiting[after] and after.op != "output":
                    heapq.heappush(ready, (rank(after), self.position[after], after))

        for node in self.nodes:
            if node.op == "placeholder":
                place(node)
        while ready:
            place(heapq.heappop(ready)[2])
        return [*result, *(n for n in self.nodes if n.op == "output")]


def _ends(edges: Iterable[tuple[fx.Node, str]], within_group: bool) -> list[fx.Node]:
    return [node for node, why in edges if within_group or why != _SAME_GROUP]


@dataclass(frozen=True, slots=True)
class Blocker:
    """A node that stands in the way of a move, and why."""

    node: fx.Node
    mover: fx.Node
    why: str

    def __str__(self) -> str:
        return f"{self.node.name} {self.why} {self.mover.name}"


def move_together(order: Order, nodes: Sequence[fx.Node], *, before: fx.Node) -> Blocker | None:
    """Move some nodes, as one thing, to just before another node; or say what stands in the way, and move nothing.

    A collective's nodes are `Collective.nodes`; `order` is out of date after a move.

        >>> from crossfade.graph.text import parse
        >>> program = parse('''
        ... x: f32[4] = input("x")
        ... a: f32[4] = aten.relu(x)
        ... b: f32[4] = aten.neg(a)
        ... c: f32[4] = aten.exp(x)
        ... return output("b", b), output("c", c)
        ... ''')
        >>> x, a, b, c, out = program.graph.nodes
        >>> print(move_together(Order(program.graph), [a, b], before=out))
        None
        >>> [node.name for node in program.graph.nodes]
        ['x', 'c', 'a', 'b', 'output']
    """
    together = sorted(nodes, key=order.position.__getitem__)
    inside, place = set(nodes), order.position[before]
    for node in together:
        rises = order.position[node] > place
        blocker = order.may_rise_above(node, before, inside) if rises else order.may_sink_above(node, before, inside)
        if blocker is not None:
            return blocker
    for node in together:
        before.prepend(node)
    return None


def reorder(graph: fx.Graph, nodes: Sequence[fx.Node]) -> bool:
    """Put the graph's nodes in the given order (all of them, output last); True if that changed anything."""
    if list(graph.nodes) == list(nodes):
        return False
    if len(nodes) != len(graph.nodes) or set(nodes) != set(graph.nodes) or nodes[-1].op != "output":
        raise RewriteError(
            f"an order of {len(nodes)} nodes, {len(set(nodes) & set(graph.nodes))} of them the graph's",
            expected=f"all {len(graph.nodes)} nodes of the graph once, the output last",
            remedy="start from list(graph.nodes) and move nodes in it",
        )
    if [node for node in nodes if node.op == "placeholder"] != list(graph.find_nodes(op="placeholder")):
        raise RewriteError(
            "placeholders in another order",
            expected="the order of the program's inputs",
            remedy="leave the placeholders where they are",
        )
    end = nodes[-1]
    for node in nodes[:-1]:
        end.prepend(node)
    return True


class Later:
    """A node in a heap from which the last of the graph comes first."""

    __slots__ = ("node",)

    def __init__(self, node: fx.Node) -> None:
        self.node = node

    def __lt__(self, other: Later) -> bool:
        return other.node < self.node


def with_ancestors(*nodes: fx.Node) -> list[fx.Node]:
    """Nodes and all that they depend on, in the graph's order.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4] = input("x")
    ... a: f32[4] = aten.relu(x)
    ... b: f32[4] = aten.neg(x)
    ... return output("a", a), output("b", b)
    ... ''')
    >>> with_ancestors(program.results[1])
    [x, b]
    """
    found, waiting = set(nodes), list(nodes)
    while waiting:
        new = [source for source in waiting.pop().all_input_nodes if source not in found]
        found.update(new)
        waiting += new
    return [node for node in nodes[0].graph.nodes if node in found] if nodes else []


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

    def __init__(self, order: Order, marked: Iterable[fx.Node], *, within_group: bool = True) -> None:
        self.bit = {node: 1 << index for index, node in enumerate(marked)}
        self.ancestors: dict[fx.Node, int] = {}
        """For each node, the marked nodes strictly above it in the dependency order, as a bitset."""
        ancestors, bit = self.ancestors, self.bit
        for node in order.nodes:
            found = 0
            for before in order.predecessors(node, within_group=within_group):
                found |= ancestors[before] | bit.get(before, 0)
            ancestors[node] = found

    def reaches(self, source: fx.Node, target: fx.Node) -> bool:
        """Whether `target` depends, directly or not, on the marked node `source`."""
        return bool(self.ancestors[target] & self.bit[source])


def _ordering_edges(
    nodes: Sequence[fx.Node], roots: dict[fx.Node, fx.Node]
) -> dict[fx.Node, list[tuple[fx.Node, str]]]:
    """For each node, the earlier nodes it must stay below for a reason other than data, without what follows from
    other edges: few enough that 100,000 nodes are walked in one go, and each with the reason that users are shown."""
    special = [node for node in nodes if node.op == "call_function" and not is_pure(node.target)]
    lists = rewritten_at_waits(special, roots)
    writes = {node: targets for node in special if (targets := _written_memory(node, roots, lists))}
    edges: dict[fx.Node, list[tuple[fx.Node, str]]] = {}
    for node, before, why in (*_memory_edges(nodes, writes, roots, lists), *_turns(special, writes)):
        if before is not node:
            edges.setdefault(node, []).append((before, why))
    return edges


def _memory_edges(
    nodes: Sequence[fx.Node], writes: Mapping[fx.Node, _Memory], roots: dict[fx.Node, fx.Node], lists: _Lists
) -> Iterator[_Edge]:
    """A reader stays below the last writer of its memory, a writer below the last one and all readers since.

    What was read before the last writer is above that one, so it needs no edge; what nothing writes orders nothing.
    """
    written = {root for targets in writes.values() for root in targets}
    readers: dict[fx.Node, list[fx.Node]] = {}
    writer: dict[fx.Node, fx.Node] = {}
    for node in nodes if written else ():
        if node.op != "call_function":
            continue
        targets = writes.get(node, {})
        for root in (root for root in _read_memory(node, roots, lists) if root in written):
            if root in writer:
                yield node, writer[root], "writes memory read by"
            if root not in targets:
                readers.setdefault(root, []).append(node)
        for root in targets:
            yield from ((node, reader, "reads memory written by") for reader in readers.pop(root, []))
            writer[root] = node


def _turns(special: Sequence[fx.Node], writes: Container[fx.Node]) -> Iterator[_Edge]:
    """Draws of random numbers, hidden effects, and the collectives of each group: each below the one before it."""
    last: dict[str, fx.Node] = {}
    for node in special:
        turns = []
        if is_random(node):
            turns.append(("random numbers", "draws random numbers before"))
        elif node not in writes and has_hidden_effect(node):
            turns.append(("side effects", "has a side effect before"))
        if (group := collectives.group_of(node)) is not None:
            turns.append((f"group {group}", _SAME_GROUP))
        for sequence, why in turns:
            if sequence in last:
                yield node, last[sequence], why
            last[sequence] = node


def _written_memory(node: fx.Node, roots: dict[fx.Node, fx.Node], lists: _Lists) -> _Memory:
    """What a node writes. A wait ends the writing of its collective's results, which others may name without it; of a
    list whose elements are written in place it is the list that it writes."""
    if not collectives.is_wait(node):
        return dict.fromkeys(roots[target] for target in written_inputs(node))
    start = collectives.started_by(node)
    if start is None:
        return {}
    own = [roots[node]] if _is_named_without_wait(start) else []
    return dict.fromkeys([*own, *(listed for listed in lists.get(roots[node], ()) if listed is start)])


def _is_named_without_wait(start: fx.Node) -> bool:
    if written_inputs(start):
        return True
    users = [user for user in start.users if user.target is not operator.getitem]
    users += [after for user in start.users if user.target is operator.getitem for after in user.users]
    return not all(collectives.is_wait(user) for user in users)


def _read_memory(node: fx.Node, roots: dict[fx.Node, fx.Node], lists: _Lists) -> _Memory:
    """What a node reads; a wait also ends the reading of its collective's inputs, which goes on until then."""
    if node.target is operator.getitem:
        return {}
    start = collectives.started_by(node) if collectives.is_wait(node) else None
    sources = [*node.all_input_nodes, *(start.all_input_nodes if start is not None else ())]
    found = dict.fromkeys(root for source in sources for root in memory_behind(source, roots))
    return found | dict.fromkeys(listed for root in found for listed in lists.get(root, ())) if lists else found
