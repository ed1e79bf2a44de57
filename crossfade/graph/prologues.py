"""What only prepares a collective's input: views, conversions, sums of two, packing."""

from __future__ import annotations

import heapq
import operator
from typing import Any

import torch
from torch import fx

from crossfade.graph import collectives, packing
from crossfade.graph.effects import is_pure
from crossfade.graph.operators import remembered
from crossfade.graph.order import Later
from crossfade.graph.private import schema_of

_aten = torch.ops.aten
_LIGHT = frozenset({_aten.cat.default, _aten.clone.default, _aten._to_copy.default, packing.OPERATOR})


def prologue_of(start: fx.Node) -> list[fx.Node]:
    """The light operators that feed nothing but a collective's start, in the graph's order: they move with it.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4, 4] = input("x")
    ... mm: f32[4, 4] = aten.mm(x, x)
    ... flat: f32[16] = aten.view(mm, [16])
    ... half: f32[16] = aten.div.Tensor(flat, 2)
    ... s: f32[16] = c10d.all_reduce(half, "sum", "dp")
    ... w: f32[16] = c10d.wait_tensor(s)
    ... return output("w", w)
    ... ''', groups={"dp": 2})
    >>> prologue_of(collectives.find(program.graph)[0].node)
    [flat, half]
    """
    taken = {start}
    waiting = [Later(node) for node in start.all_input_nodes]
    heapq.heapify(waiting)
    seen = {entry.node for entry in waiting}
    while waiting:  # the lowest first: all users of a node come before it
        node = heapq.heappop(waiting).node
        if is_light(node) and all(user in taken for user in node.users):
            taken.add(node)
            for source in node.all_input_nodes:
                if source not in seen:
                    seen.add(source)
                    heapq.heappush(waiting, Later(source))
    return sorted(taken - {start})


def is_light(node: fx.Node) -> bool:
    """Whether a node computes element by element, copies or only looks at memory, without any effect."""
    return node.op == "call_function" and not collectives.is_wait(node) and _is_light(node.target)


@remembered
def _is_light(target: Any) -> bool:
    if target is operator.getitem:
        return True
    if not is_pure(target):
        return False
    if target in _LIGHT or torch.Tag.pointwise in getattr(target, "tags", ()):
        return True
    schema = schema_of(target)
    shares = [info for item in schema.returns if (info := item.alias_info) is not None]
    return bool(shares) and not any(info.is_write for info in shares)
