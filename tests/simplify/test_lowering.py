"""What every lowering pass counts and says of the calls it meets."""

from __future__ import annotations

from torch import fx

from crossfade.graph.passes import Outcome
from crossfade.simplify.lowering import lower_calls, lower_wrappers
from tests.simplify.holds import program_of

TEXT = """
    x: f32[4] = input("x")
    a: f32[4] = aten.neg(x)
    b: f32[4] = aten.exp(a)
    c: f32[4] = aten.neg(b)
    return output("c", c)
"""


def test_each_call_is_lowered_or_left_with_the_reason():
    program, seen = program_of(TEXT), []

    def lower(node: fx.Node) -> str | None:
        seen.append(node.name)
        return "it comes first" if node.name == "a" else None

    result = lower_calls(program, ("aten.neg.default",), "why", lower)
    assert seen == ["a", "c"]
    assert result.changed and result.counts == {"lowered": 1, "left": 1}
    found = [(verdict.subject, verdict.outcome, verdict.reason) for verdict in result.verdicts]
    assert found == [("a", Outcome.LEFT, "it comes first"), ("c", Outcome.REPLACED, "why")]


def test_nothing_lowered_is_nothing_changed():
    result = lower_calls(program_of(TEXT), ("aten.neg.default",), "why", lambda node: "never")
    assert not result.changed and result.counts == {"lowered": 0, "left": 2}


def test_clones_are_counted_and_needless_ones_dropped():
    text = """
        x: f32[4] = input("x")
        n: f32[4] = aten.neg(x)
        c: f32[4] = aten.clone(x)
        d: f32[4] = aten.clone(n)
        y: f32[4] = aten.mul_.Tensor(c, d)
        z: f32[4] = aten.mul_.Tensor(d, 2)
        return output("y", y), output("z", z)
        """
    program = program_of(text)

    def clones(program: object, node: fx.Node) -> list[fx.Node]:
        return [node]

    result = lower_wrappers(program, ("aten.clone.default",), "why", lambda program, node: None, clones)
    assert result.counts == {"lowered": 2, "left": 0, "clones": 1, "dropped": 1}
    assert "d" not in {node.name for node in program.graph.nodes}
