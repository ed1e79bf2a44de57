"""Nodes that only give another name to a value."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.program import Program
from crossfade.graph.rewrite import Match, Rule, apply_rules


def _is_result(match: Match) -> str | None:
    """Results keep their own tensor object: an input returned as an output would become a new alias of it."""
    if any(user.op == "output" for user in match.root.users):
        return "it is a result of the program"
    return None


def _undoes(match: Match) -> str | None:
    before, after = match["x"].meta["val"], match.root.meta["val"]
    if not isinstance(before, Tensor) or before.stride() != after.stride() or before.shape != after.shape:
        return "it does not return to the layout it began with"
    return _is_result(match)


RULES = (
    Rule("detach", "aten.detach(x)", lambda match: match["x"], _is_result),
    Rule("alias", "aten.alias(x)", lambda match: match["x"], _is_result),
    Rule("double-transpose", "aten.t(aten.t(x))", lambda match: match["x"], _undoes),
)


@dataclass(frozen=True)
class RemoveAliases(Pass):
    """Let users of `detach`, `alias` and double transposes read the value itself: autograd leaves hundreds of them.

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

    def run(self, program: Program) -> PassResult:
        """Apply the rules above to a fixed point."""
        done = apply_rules(program, RULES)
        verdicts = tuple(Verdict.of(node, Outcome.LEFT, reason) for _, node, reason in done.declined)
        return PassResult(done.changed, dict(done.counts), verdicts)
