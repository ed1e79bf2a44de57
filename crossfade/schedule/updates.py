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
    """For each node on an input's way to its new value that can be written over the value before: the nodes before it
    that read that, or wait for what does.

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
        {mul: [exp, view, neg], add: []}
    """
    nodes = list(program.graph.nodes)
    steps = {new: old for old, new in _update_steps(program)}
    if not steps:
        return {}
    position, roots = {node: index for index, node in enumerate(nodes)}, alias_roots(nodes)
    found = {}
    for new, old in sorted(steps.items(), key=lambda step: position[step[0]]):
        readers = {reader for reader in _readers(old, roots) if position[reader] < position[new]}
        found[new] = sorted(readers, key=position.__getitem__)
    return found


def _update_steps(program: Program) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each value on the way from an input to its new value, the input first, with the operator that replaces it."""
    placeholders = program.input_nodes()
    for out, value in program.named_results():
        if out.kind is not OutputKind.UPDATE:
            continue
        steps: list[tuple[fx.Node, fx.Node]] = []
        node: Any = value
        while node is not placeholders[out.name] and isinstance(node, fx.Node) and in_place_form(node) is not None:
            steps.append((node.args[0], node))  # type: ignore[arg-type]
            node = node.args[0]
        if node is placeholders[out.name]:
            yield from steps


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
