"""Write a pass, and run it over a program written as text. Needs no ranks."""

from dataclasses import dataclass

from crossfade import Pass, PassResult, Program, run_passes
from crossfade.graph.passes import Numerics
from crossfade.graph.rewrite import Rule, apply_rules
from crossfade.graph.text import parse


@dataclass(frozen=True)
class RemoveDoubleNegation(Pass):
    """Drop pairs of negations."""

    name = "remove-double-negation"
    numerics = Numerics.BITWISE

    def run(self, program: Program) -> PassResult:
        """Apply one rule to a fixed point."""
        rule = Rule("double-negation", "aten.neg(aten.neg(x))", lambda match: match["x"])
        done = apply_rules(program, [rule])
        return PassResult(done.changed, dict(done.counts))


program = parse("""
x: f32[4] = input("x")
a: f32[4] = aten.neg(x)
b: f32[4] = aten.neg(a)
c: f32[4] = aten.exp(b)
return output("y", c)
""")
improved = run_passes(program, [RemoveDoubleNegation()])
print(improved)
print(improved.history[0])
