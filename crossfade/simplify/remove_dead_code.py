"""Nodes that nothing uses."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from crossfade.graph.effects import is_random, written_inputs
from crossfade.graph.passes import Numerics, Pass, PassResult
from crossfade.graph.program import Program


@dataclass(frozen=True)
class RemoveDeadCode(Pass):
    """Remove nodes without users or effects. Random draws stay: removing one would shift all later ones.

    Before:
        x: f32[4] = input("x")
        relu: f32[4] = aten.relu(x)
        neg: f32[4] = aten.neg(x)
        return output("y", neg)

    After:
        x: f32[4] = input("x")
        neg: f32[4] = aten.neg(x)
        return output("y", neg)
    """

    name = "remove-dead-code"
    numerics = Numerics.BITWISE

    def run(self, program: Program) -> PassResult:
        """One walk from the end: a node is dead when all its users were."""
        removed = 0
        for node in reversed(list(program.graph.nodes)):
            if node.op in ("call_function", "get_attr") and not (node.users or _has_effect(node)):
                program.graph.erase_node(node)
                removed += 1
        return PassResult(bool(removed), {"removed": removed})


def _has_effect(node: fx.Node) -> bool:
    return is_random(node) or node.is_impure() or bool(written_inputs(node))
