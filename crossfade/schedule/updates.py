"""Updates stay behind what reads the old value: only there can they be carried out in its memory.

A parameter's decay depends on nothing that the step computes. Scheduled early, it would need memory of its own, which
on a CPU takes as long to find as to fill, and which the costs of a plan do not know of.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from crossfade.graph import collectives
from crossfade.graph.effects import alias_roots
from crossfade.graph.in_place import in_place_form
from crossfade.graph.program import OutputKind, Program


def reads_before_updates(program: Program) -> dict[fx.Node, list[fx.Node]]:
    """For each node that begins an input's new value and can be written over the old one: the nodes before it that
    read that, or wait for what does.

        >>> from crossfade.graph.text import parse
        >>> program = parse('''
        ... p: f32[4] = parameter("p")
        ... exp: f32[4] = aten.exp(p)
        ... view: f32[2, 2] = aten.view(p, [2, 2])
        ... neg: f32[2, 2] = aten.neg(view)
        ... mul: f32[4] = aten.mul.Tensor(p, 0.5)
        ... add: f32[4] = aten.add.Tensor(mul, exp)
        ... return output("neg", neg), update("p", add)
        ... ''')
        >>> reads_before_updates(program)
        {mul: [exp, view, neg]}
    """
    nodes = list(program.graph.nodes)
    firsts = {first: old for old, first in _begun_updates(program)}
    if not firsts:
        return {}
    position, roots = {node: index for index, node in enumerate(nodes)}, alias_roots(nodes)
    found = {}
    for first, old in firsts.items():
        readers = {reader for reader in _readers(old, roots) if position[reader] < position[first]}
        found[first] = sorted(readers, key=position.__getitem__)
    return found


def _begun_updates(program: Program) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each input that is updated by a chain of operators that work in place, with the first of them."""
    placeholders = program.input_nodes()
    for out, value in program.named_results():
        if out.kind is not OutputKind.UPDATE:
            continue
        old, node = placeholders[out.name], value
        first: Any = None
        while node is not old and isinstance(node, fx.Node) and in_place_form(node) is not None:
            first, node = node, node.args[0]
        if node is old and first is not None:
            yield old, first


def _readers(old: fx.Node, roots: dict[fx.Node, fx.Node]) -> Iterator[fx.Node]:
    """Whatever uses an input's memory, and the waits of collectives that do."""
    names = [old]
    while names:
        for user in names.pop().users:
            yield user
            if roots[user] is old:
                names.append(user)
            started = collectives.view(user)
            yield from started.waits if started is not None else ()
