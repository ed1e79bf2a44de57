"""Programs in which no two collectives may share a bucket, told by one light walk.

Where each collective depends on the one before it, as those of tensor parallelism do, there is nothing to plan: neither
an order with everything that writes memory, nor what hides what, is needed to say so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from crossfade.graph import collectives
from crossfade.graph.collectives import Collective, Kind


def is_chain(graph: fx.Graph, members: Sequence[Collective]) -> bool:
    """Whether each of some collectives, in order, is computed from the result of the one before it.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4] = input("x")
    ... a: f32[4] = c10d.all_reduce(x, "sum", "dp")
    ... wait_a: f32[4] = c10d.wait_tensor(a)
    ... y: f32[4] = aten.neg(wait_a)
    ... b: f32[4] = c10d.all_reduce(y, "sum", "dp")
    ... wait_b: f32[4] = c10d.wait_tensor(b)
    ... c: f32[4] = c10d.all_reduce(x, "sum", "dp")
    ... wait_c: f32[4] = c10d.wait_tensor(c)
    ... return output("b", wait_b), output("c", wait_c)
    ... ''', groups={"dp": 2})
    >>> a, b, c = collectives.find(program.graph)
    >>> is_chain(program.graph, [a, b]), is_chain(program.graph, [a, b, c])
    (True, False)
    """
    number = {member.node: index for index, member in enumerate(members, 1)}
    latest: dict[fx.Node, int] = {}
    """The last of the collectives that a node is computed from; for one of them, itself."""
    known, place = latest.get, number.get
    wanted = len(members)
    for node in graph.nodes:
        found = 0
        for source in node.all_input_nodes:
            reached = known(source, 0)
            if reached > found:
                found = reached
        own = place(node)
        if own is not None:
            if found != own - 1:
                return False
            if own == wanted:
                return True
            found = own
        if found:
            latest[node] = found
    return not members


def leads_on(member: Collective) -> bool:
    """Whether something that communicates is computed from a collective's result."""
    waiting, seen = [member.node], {member.node}
    while waiting:
        for user in waiting.pop().users:
            if user not in seen:
                if collectives.group_of(user) is not None:
                    return True
                seen.add(user)
                waiting.append(user)
    return False


def eligible_chain(graph: fx.Graph, kind: Kind) -> list[Collective] | None:
    """The collectives of a kind if each depends on the one before it and no view counts in strides; else None."""
    if graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default, sort=False):
        return None
    members = [found for found in collectives.find(graph) if found.kind is kind]
    return members if is_chain(graph, members) else None
