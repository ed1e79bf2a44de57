"""Single nodes and small patterns, all in one worklist."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from crossfade.errors import PassError
from crossfade.graph.passes import Numerics, PassResult
from crossfade.graph.program import Program
from crossfade.graph.rewrite import Rule
from crossfade.graph.rule_pass import RulePass, run_rules
from crossfade.simplify.canonicalize_views import CanonicalizeViews
from crossfade.simplify.collapse_conversions import CollapseConversions
from crossfade.simplify.collapse_views import CollapseViews
from crossfade.simplify.fold_cumsums import FoldCumsums
from crossfade.simplify.remove_aliases import RemoveAliases
from crossfade.simplify.remove_noops import RemoveNoops
from crossfade.simplify.replace_scatters import ReplaceScatters
from crossfade.simplify.simplify_cats import SimplifyCats

MEMBERS: tuple[RulePass, ...] = (
    RemoveAliases(),
    RemoveNoops(),
    CanonicalizeViews(),
    CollapseViews(),
    CollapseConversions(),
    SimplifyCats(),
    FoldCumsums(),
    ReplaceScatters(),
)
"""Every pass of bitwise rules about a few nodes, in the order in which their rules are tried on a node."""

_NO_CANDIDATES = frozenset(
    {
        "it changes the shape",
        "it moves dims of several elements",
        "it joins several inputs",
        "its inputs are not neighbouring elements of one value",
        "it ends in another dtype",
        "it rounds fractions",
        "it changes dtype, device or layout",
        "its other operand is not filled with the number that changes nothing",
    }
)
"""Reasons that only say what a node is for. A member pass by itself gives them too."""


@dataclass(frozen=True)
class SimplifyNodes(RulePass):
    """Apply the rules of several passes together, to a common fixed point: each finds what the others make possible.

    The rules of each pass in `passes` count under its name: `remove-aliases/detach`. Each of them keeps every bit.

    Also known as: XLA's algebraic simplifier; the pattern matcher passes of Inductor's `joint_graph` and `post_grad`.

    Before:
        x: f32[4, 2] = input("x")
        t: f32[2, 4] = aten.t(x)
        detach: f32[2, 4] = aten.detach(t)
        t_1: f32[4, 2] = aten.t(detach)
        neg: f32[4, 2] = aten.neg(t_1)
        return output("y", neg)

    After:
        x: f32[4, 2] = input("x")
        neg: f32[4, 2] = aten.neg(x)
        return output("y", neg)
    """

    name = "simplify-nodes"
    numerics = Numerics.BITWISE

    passes: tuple[RulePass, ...] = MEMBERS

    def __post_init__(self) -> None:
        for member in self.passes:
            if not isinstance(member, RulePass) or member.numerics is not Numerics.BITWISE:
                rules = isinstance(member, RulePass)
                what = f"whose numerics are {member.numerics}" if rules else "not made of rules"
                raise PassError(
                    f"{self.name} cannot hold {member.name}, {what}",
                    expected="passes of rules that keep every bit",
                    remedy=f"run it before or after {self.name}",
                )

    def run(self, program: Program) -> PassResult:
        """Apply the rules of all members to a common fixed point; nodes that do what they are for need no verdict."""
        return run_rules(program, self.rules(), unspoken=_NO_CANDIDATES)

    def rules(self) -> Sequence[Rule]:
        """The rules of all members, named after the pass they are from."""
        return [replace(rule, name=f"{member.name}/{rule.name}") for member in self.passes for rule in member.rules()]
