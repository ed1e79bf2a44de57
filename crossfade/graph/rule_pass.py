"""Passes that are nothing but rules."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from crossfade.graph.passes import Outcome, Pass, PassResult, Verdict
from crossfade.graph.program import Program
from crossfade.graph.rewrite import Rule, apply_rules


@dataclass(frozen=True)
class RulePass(Pass):
    """A pass that applies its `rules` to a fixed point; several of them can share one worklist.

    A rule's check states the conditions under which old and new compute the same; that nobody sees the difference in
    memory (a new alias, a lost one, other strides, a write in between) is seen to by `apply_rules`.
    """

    nested = True

    def rules(self) -> Sequence[Rule]:
        """The rules, in the order in which they are tried on a node."""
        raise NotImplementedError

    def run(self, program: Program) -> PassResult:
        """Apply the rules to a fixed point; whatever was declined becomes a verdict."""
        return run_rules(program, self.rules())


def run_rules(program: Program, rules: Sequence[Rule], unspoken: Collection[str] = ()) -> PassResult:
    """Apply rules in one worklist and account for them; declines for `unspoken` reasons become no verdicts."""
    done = apply_rules(program, rules)
    verdicts = [
        Verdict.of(node, Outcome.LEFT, reason, detail=rule.name)
        for rule, node, reason in done.declined
        if reason not in unspoken
    ]
    return PassResult(done.changed, dict(done.counts), tuple(verdicts))
