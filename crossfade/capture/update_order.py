"""Updates in the order in which gradients become ready, whatever the order in which an optimizer comes to them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from crossfade.graph.effects import is_random


def order_by_readiness(graph: fx.Graph, gradients: Sequence[fx.Node]) -> None:
    """Move each node to where the last of the gradients that it needs is used first; `gradients` are in the order in
    which they become ready. What needs none comes just before its first use.

    A graph that draws random numbers is left as it is: each draw is to get the numbers that it was written to get.

    >>> graph = fx.Graph()
    >>> late, early = graph.placeholder("late"), graph.placeholder("early")
    >>> first, second = graph.call_function(abs, (late,)), graph.call_function(abs, (early,))
    >>> _ = graph.output((first, second))
    >>> order_by_readiness(graph, [early, late])
    >>> [node.name for node in graph.nodes]
    ['late', 'early', 'abs_2', 'abs_1', 'output']
    """
    calls = [node for node in graph.nodes if node.op in ("call_function", "get_attr")]
    if any(is_random(node) or node.is_impure() for node in calls):
        return
    rank = {node: index for index, node in enumerate(gradients)}
    for node in calls:
        rank[node] = max((rank.get(source, -1) for source in node.all_input_nodes), default=-1)
    for node in reversed(calls):
        if rank[node] < 0:
            rank[node] = min((rank[user] for user in node.users if user in rank), default=len(gradients))
    last = graph.find_nodes(op="placeholder")[-1] if gradients else None
    for node in sorted(calls, key=rank.__getitem__):
        if last is not None:
            last.append(node)
        last = node
