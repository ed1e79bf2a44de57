"""Rules of several passes meet in one worklist; members are bitwise and made of rules."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from crossfade.errors import PassError
from crossfade.graph.passes import Numerics
from crossfade.graph.pipelines import Pipeline
from crossfade.graph.rewrite import Rule
from crossfade.graph.rule_pass import RulePass
from crossfade.simplify.remove_aliases import RemoveAliases
from crossfade.simplify.remove_dead_code import RemoveDeadCode
from crossfade.simplify.simplify_nodes import MEMBERS, SimplifyNodes
from tests.simplify.holds import declines, rewrites


@dataclass(frozen=True)
class RemoveDoubleNegation(RulePass):
    """Drop pairs of negations."""

    name = "remove-double-negation"
    numerics = Numerics.BITWISE

    def rules(self) -> list[Rule]:
        return [
            Rule("pair", "aten.neg(aten.neg(x))", lambda match: match["x"]),
            Rule("abs", "aten.abs(aten.neg(x))", lambda match: match["x"], lambda match: "never"),
        ]


@dataclass(frozen=True)
class Reassociating(RemoveDoubleNegation):
    """Not bitwise."""

    name = "re-associating"
    numerics = Numerics.REASSOCIATES


BOTH = SimplifyNodes((RemoveAliases(), RemoveDoubleNegation()))


def test_what_one_member_makes_possible_another_finds():
    rewrites(
        BOTH,
        """
        x: f32[2, 3] = input("x")
        t: f32[3, 2] = aten.t(x)
        a: f32[3, 2] = aten.neg(t)
        d: f32[3, 2] = aten.detach(a)
        b: f32[3, 2] = aten.neg(d)
        u: f32[2, 3] = aten.t(b)
        y: f32[2, 3] = aten.exp(u)
        return output("y", y)
        """,
        """
        x: f32[2, 3] = input("x")
        y: f32[2, 3] = aten.exp(x)
        return output("y", y)
        """,
        {"remove-aliases/detach": 1, "remove-double-negation/pair": 1, "remove-aliases/double-transpose": 1},
    )


def test_a_decline_names_the_member():
    text = """
        x: f32[2] = input("x")
        a: f32[2] = aten.neg(x)
        b: f32[2] = aten.abs(a)
        return output("b", b)
    """
    declines(BOTH, text, "never")


@pytest.mark.parametrize(
    ("member", "found"),
    [
        (RemoveDeadCode(), "simplify-nodes cannot hold remove-dead-code, not made of rules"),
        (Reassociating(), "simplify-nodes cannot hold re-associating, whose numerics are reassociates"),
    ],
)
def test_members_that_do_not_fit_are_refused(member, found: str):
    with pytest.raises(PassError, match=found):
        SimplifyNodes((member,))


def test_pipelines_reach_inside():
    pipeline = Pipeline([SimplifyNodes(), RemoveDeadCode()])
    names = [member.name for member in MEMBERS]
    assert pipeline.names() == ["simplify-nodes", *names, "remove-dead-code"]
    changed = pipeline.without("remove-noops").after("remove-aliases", RemoveDoubleNegation())
    expected = ["remove-aliases", "remove-double-negation", *(name for name in names[1:] if name != "remove-noops")]
    assert changed.names() == ["simplify-nodes", *expected, "remove-dead-code"]
    with pytest.raises(PassError, match="not made of rules"):
        pipeline.before("remove-noops", RemoveDeadCode())
