"""Updates stay behind what reads the old value: only there can they be carried out in its memory.

A parameter's decay depends on nothing that the step computes. Scheduled early, it would need memory of its own, which
on a CPU takes as long to find as to fill, and which the costs of a plan do not know of.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from crossfade.graph import collectives
from crossfade.graph.effects import alias_roots
from crossfade.graph.in_place import update_chain
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
    steps = dict(_update_steps(program))
    if not steps:
        return {}
    position, roots = {node: index for index, node in enumerate(nodes)}, alias_roots(nodes)
    last_waits = {
        collective.node: max(collective.waits, key=position.__getitem__)
        for collective in collectives.find(program.graph)
        if collective.waits
    }
    found = {}
    for new, old in sorted(steps.items(), key=lambda step: position[step[0]]):
        readers = {reader for reader in _readers(old, roots, last_waits) if position[reader] < position[new]}
        found[new] = sorted(readers, key=position.__getitem__)
    return found


def _update_steps(program: Program) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each operator on the way from an input to its new value, with what it replaces."""
    placeholders = program.input_nodes()
    for out, value in program.named_results():
        if out.kind is OutputKind.UPDATE:
            chain = update_chain(value, placeholders[out.name])
            yield from zip(chain, [placeholders[out.name], *chain], strict=False)


def _readers(old: fx.Node, roots: dict[fx.Node, fx.Node], last_waits: dict[fx.Node, fx.Node]) -> Iterator[fx.Node]:
    """Whatever uses a value's memory, and the last wait of a collective that does: of many, one stands for all."""
    names = [old]
    while names:
        for user in names.pop().users:
            yield user
            if roots[user] is old:
                names.append(user)
            if user in last_waits:
                yield last_waits[user]
