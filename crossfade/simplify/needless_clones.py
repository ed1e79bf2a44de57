"""Clones of values that nothing reads any more."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from crossfade.graph import collectives
from crossfade.graph.effects import alias_roots
from crossfade.graph.program import Program


def drop_needless_clones(program: Program, clones: Sequence[fx.Node]) -> int:
    """Let what a clone is made for have the value itself, where nothing reads its memory afterwards.

    The memory must be the program's own: not an input's, a constant's or a result's. Clones come in the order of the
    graph, and are contiguous or dense copies that lie as the value does. Returns how many went.
    """
    nodes = list(program.graph.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    homes = _Homes(program, nodes, position)
    dropped = 0
    for clone in clones:
        base = clone.all_input_nodes[0]
        if homes.is_needed(base, position[clone]):
            continue
        homes.join(clone, base)
        clone.replace_all_uses_with(base)
        program.graph.erase_node(clone)
        dropped += 1
    return dropped


class _Homes:
    """Who owns which memory, and when it is read for the last time: results are, at the end."""

    def __init__(self, program: Program, nodes: list[fx.Node], position: dict[fx.Node, int]) -> None:
        self.roots = alias_roots(nodes)
        self.moved: dict[fx.Node, fx.Node] = {}
        self.last_use = {self.roots[source]: position[node] for node in nodes for source in node.all_input_nodes}
        # what a collective sends is read, and a list written, until the last wait
        for collective in collectives.find(program.graph):
            end = max((position[wait] for wait in collective.waits), default=len(nodes))
            for held in (*collective.inputs, *(collective.results if collective.coalesced else ())):
                root = self.roots[held]
                self.last_use[root] = max(self.last_use.get(root, 0), end)

    def of(self, node: fx.Node) -> fx.Node:
        """The owner of a node's memory, clones that went taken into account."""
        root = self.roots[node]
        while root in self.moved:
            root = self.moved[root]
        return root

    def is_needed(self, node: fx.Node, after: int) -> bool:
        """Whether something sees what becomes of a node's memory after a position."""
        root = self.of(node)
        return root.op != "call_function" or self.last_use.get(root, 0) > after

    def join(self, clone: fx.Node, base: fx.Node) -> None:
        """Let what was a clone's memory be its base's."""
        root = self.of(base)
        self.moved[clone] = root
        self.last_use[root] = max(self.last_use.get(root, 0), self.last_use.get(clone, 0))
