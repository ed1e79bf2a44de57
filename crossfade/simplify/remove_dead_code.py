"""Nodes that nothing uses."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from crossfade.graph.effects import is_random, written_inputs
from crossfade.graph.nested import has_effect_inside
from crossfade.graph.operators import arguments
from crossfade.graph.passes import Numerics, Pass, PassResult
from crossfade.graph.program import Program


@dataclass(frozen=True)
class RemoveDeadCode(Pass):
    """Remove nodes without users or effects. Random draws stay: removing one would shift all later ones.

    Also known as: dead code elimination: `fx.Graph.eliminate_dead_code`, XLA's `dce`.

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
    nested = True

    def run(self, program: Program) -> PassResult:
        """One walk from the end: a node is dead when all its users were."""
        removed = 0
        for node in reversed(list(program.graph.nodes)):
            if node.op in ("call_function", "get_attr") and not (node.users or _has_effect(program, node)):
                program.graph.erase_node(node)
                removed += 1
        return PassResult(bool(removed), {"removed": removed})


def _has_effect(program: Program, node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    draws = is_random(node) and arguments(node).get("train") is not False  # dropout draws only while training
    effect = draws or node.is_impure(impure_random=False) or bool(written_inputs(node))
    return effect or has_effect_inside(program, node)
