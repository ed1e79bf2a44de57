"""Nodes that only give another name to a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from crossfade.graph.passes import Numerics
from crossfade.graph.rewrite import Rule
from crossfade.graph.rule_pass import RulePass

_RULES = (
    Rule("detach", "aten.detach(x)", lambda match: match["x"]),
    Rule("alias", "aten.alias(x)", lambda match: match["x"]),
    Rule("double-transpose", "aten.t(aten.t(x))", lambda match: match["x"]),
)


@dataclass(frozen=True)
class RemoveAliases(RulePass):
    """Let users of `detach`, `alias` and double transposes read the value itself: autograd leaves hundreds of them.

    Also known as: part of Inductor's `remove_noop_ops`.

    Before:
        x: f32[4, 2] = input("x")
        t: f32[2, 4] = aten.t(x)
        t_1: f32[4, 2] = aten.t(t)
        detach: f32[4, 2] = aten.detach(t_1)
        neg: f32[4, 2] = aten.neg(detach)
        return output("y", neg)

    After:
        x: f32[4, 2] = input("x")
        neg: f32[4, 2] = aten.neg(x)
        return output("y", neg)
    """

    name = "remove-aliases"
    numerics = Numerics.BITWISE

    def rules(self) -> Sequence[Rule]:
        """What gives another name to a value."""
        return _RULES
