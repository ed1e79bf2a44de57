"""Views of memory that is the same at every run: parameters, buffers, the optimizer's state, workspaces.

A step looks at its parameters through the same transposes, and at its buckets through the same slices, each time. Such
a view costs microseconds to make, and is the same tensor as long as the memory stays where it is.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from crossfade.graph.effects import is_pure
from crossfade.graph.memory import may_copy
from crossfade.graph.operators import remembered
from crossfade.graph.private import schema_of
from crossfade.graph.program import InputKind, Program

LASTING = frozenset(
    {
        InputKind.PARAMETER,
        InputKind.BUFFER,
        InputKind.OPTIMIZER_STATE,
        InputKind.WORKSPACE,
        InputKind.RESIDUAL,
    }
)
"""The kinds of inputs whose memory a program finds again at its next run."""


def lasting_views(program: Program) -> dict[fx.Node, None]:
    """The nodes that only look at lasting memory, by sizes known beforehand, in order; not those that are returned.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4, 2] = input("x")
    ... w: f32[3, 2] = parameter("w")
    ... t: f32[2, 3] = aten.permute(w, [1, 0])
    ... u: f32[2, 4] = aten.permute(x, [1, 0])
    ... mm: f32[4, 3] = aten.mm(x, t)
    ... return output("y", mm), output("u", u)
    ... ''')
    >>> list(lasting_views(program))
    [t]
    """
    lasting = {node for item, node in program.named_inputs() if item.kind in LASTING}
    returned = {result for result in program.results if isinstance(result, fx.Node)}
    views: dict[fx.Node, None] = {}
    for node in program.graph.nodes:
        sources = node.all_input_nodes
        if sources and only_looks(node.target) and lasting.issuperset(sources) and node not in returned:
            lasting.add(node)
            views[node] = None
    return views


@remembered
def only_looks(target: Any) -> bool:
    """Whether all that an operator ever does is to look at an argument's memory differently.

    >>> import torch
    >>> [only_looks(each.default) for each in (torch.ops.aten.permute, torch.ops.aten.reshape, torch.ops.aten.relu_)]
    [True, False, False]
    """
    if target is operator.getitem:
        return True
    schema = schema_of(target)
    if schema is None or not schema.returns or not is_pure(target) or may_copy(target):
        return False
    return all(result.alias_info is not None for result in schema.returns)
