"""Rules: what patterns match, what is declined, when it is done."""

from __future__ import annotations

import pytest
import torch

from crossfade.errors import RewriteError
from crossfade.graph.passes import fingerprint
from crossfade.graph.rewrite import WRITTEN, Match, Rule, apply_rules
from crossfade.graph.verify import verify
from tests.graph.small_programs import TWO, body, program_of

aten = torch.ops.aten


class TestRules:
    def test_declines_are_recorded_once_with_the_last_reason(self):
        program = program_of("""
            x: f32[4] = input("x")
            a: f32[4] = aten.neg(x)
            b: f32[4] = aten.neg(a)
            c: f32[4] = aten.exp(b)
            d: f32[4] = aten.exp(x)
            return output("c", c), output("d", d)
        """)

        def check(match: Match) -> str | None:
            return f"reads {match['x'].name}" if match.root.name in ("c", "d") else None

        rules = [
            Rule("exp", "aten.exp(x)", lambda m: m["x"], check),
            Rule("double", "aten.neg(aten.neg(x))", lambda m: m["x"]),
        ]
        done = apply_rules(program, rules)
        assert dict(done.counts) == {"double": 1} and done.changed
        assert sorted((rule.name, node.name, why) for rule, node, why in done.declined) == [
            ("exp", "c", "reads x"),
            ("exp", "d", "reads x"),
        ]
        assert body(program) == ["c: f32[4] = aten.exp(x)", "d: f32[4] = aten.exp(x)"]

    def test_first_rule_that_agrees_wins(self):
        program = program_of('x: f32[4] = input("x")\na: f32[4] = aten.neg(x)\nreturn output("a", a)')
        rules = [
            Rule("no", "aten.neg(x)", lambda m: m["x"], lambda m: "not this one"),
            Rule("yes", "aten.neg(x)", lambda m: m.splice(torch.relu, m["x"])),
            Rule("late", "aten.neg(x)", lambda m: m["x"]),
        ]
        assert dict(apply_rules(program, rules).counts) == {"yes": 1}
        assert body(program) == ["relu: f32[4] = aten.relu(x)"]

    def test_every_new_node_is_examined(self):
        """A replacement of three nodes, whose middle one is itself a candidate."""
        program = program_of('x: f32[4] = input("x")\na: f32[4] = aten.tan(x)\nreturn output("a", a)')
        rules = [
            Rule("tan", "aten.tan(x)", lambda m: m.splice(lambda x: x.abs().exp().neg(), m["x"])),
            Rule("exp", "aten.exp(x)", lambda m: m.splice(torch.sin, m["x"])),
        ]
        assert dict(apply_rules(program, rules).counts) == {"tan": 1, "exp": 1}
        assert [line.split(" = ")[1] for line in body(program)] == ["aten.abs(x)", "aten.sin(abs_1)", "aten.neg(sin)"]
        verify(program, recompute=True)

    def test_users_of_users_are_examined_again(self):
        """The root of a deep pattern stands two calls above what another rule changes later."""
        program = program_of("""
            x: f32[4] = input("x")
            a: f32[4] = aten.tan(x)
            b: f32[4] = aten.relu(a)
            c: f32[4] = aten.neg(b)
            return output("c", c)
        """)
        rules = [
            Rule("deep", "aten.neg(aten.relu(aten.exp(x)))", lambda m: m.splice(torch.abs, m["x"])),
            Rule("tan", "aten.tan(x)", lambda m: m.splice(torch.sin, m["x"])),
            Rule("relu", "aten.relu(y)", lambda m: m["y"], lambda m: "kept"),
            Rule("sin", "aten.sin(x)", lambda m: m.splice(torch.exp, m["x"])),
        ]
        assert dict(apply_rules(program, rules).counts) == {"tan": 1, "sin": 1, "deep": 1}
        assert [line.split(" = ")[1] for line in body(program)] == ["aten.abs(x)"]

    def test_a_constant_replaces_everywhere(self):
        program = program_of("""
            x: f32[4] = input("x")
            k: int = scalar("k")
            n: int = operator.add(k, 0)
            y: f32[4] = aten.mul.Tensor(x, n)
            return output("y", y)
        """)
        apply_rules(program, [Rule("five", "operator.add(k, 0)", lambda m: 5)])
        assert body(program) == ["y: f32[4] = aten.mul.Tensor(x, 5)"]

    def test_to_a_fixed_point(self):
        lines = ['x: f32[4] = input("x")', "a0: f32[4] = aten.neg(x)"]
        lines += [f"a{i}: f32[4] = aten.neg(a{i - 1})" for i in range(1, 41)]
        program = program_of("\n".join([*lines, 'return output("y", a40)']))
        done = apply_rules(program, [Rule("double", "aten.neg(aten.neg(x))", lambda m: m["x"])])
        assert done.counts["double"] == 20 and len(body(program)) == 1

    @pytest.mark.parametrize("spelled", ["aten.view(x, [2, -1])", "aten.view(self=x, size=[2, -1])"])
    def test_arguments_match_by_place_and_by_name(self, spelled: str):
        program = program_of(f"""
            y: f32[4] = input("y")
            x: f32[4] = aten.neg(y)
            v: f32[2, 2] = {spelled}
            return output("v", v)
        """)
        rules = [
            Rule("another operator inside", "aten.view(aten.exp(y), _)", lambda m: m["y"]),
            Rule("more sizes", "aten.view(x, [_, _, -1])", lambda m: m["x"]),
            Rule("another size", "aten.view(x, [-1, _])", lambda m: m["x"]),
            Rule("a node", "aten.view(x, aten.neg(_))", lambda m: m["x"]),
            Rule("right", "aten.view(aten.neg(y), [_, -1])", lambda m: m["y"], lambda m: "seen"),
        ]
        assert [(rule.name, reason) for rule, _, reason in apply_rules(program, rules).declined] == [("right", "seen")]

    def test_a_pattern_with_an_argument_that_the_operator_lacks_matches_nothing(self):
        program = program_of(TWO)
        done = apply_rules(program, [Rule("neg", "aten.neg(x, memory_format=_)", lambda m: m["x"])])
        assert not done.changed and not done.declined

    def test_what_is_written_is_known_to_checks(self):
        program = program_of("""
            x: f32[4] = input("x")
            a: f32[4] = aten.exp(x)
            v: f32[2, 2] = aten.view(a, [2, 2])
            n: f32[4] = aten.neg(a)
            w: f32[4] = aten.add_.Tensor(a, 1)
            m: f32[4] = aten.neg(x)
            return output("n", n), output("w", w), output("m", m), output("v", v)
        """)
        seen: dict[str, bool] = {}

        def check(match: Match) -> str | None:
            seen[match.root.name] = match.is_written(match["x"])
            return WRITTEN

        apply_rules(program, [Rule("neg", "aten.neg(x)", lambda m: m["x"], check)])
        assert seen == {"n": True, "m": False}

    @pytest.mark.parametrize(("write", "changes"), [("add_.Tensor(a, 1)", False), ("add.Tensor(a, 1)", True)])
    def test_what_is_written_on_the_way_to_the_root_is_another_value_by_then(self, write: str, changes: bool):
        program = program_of(f"""
            x: f32[4] = input("x")
            a: f32[4] = aten.neg(x)
            w: f32[4] = aten.{write}
            b: f32[4] = aten.neg(a)
            c: f32[4] = aten.exp(b)
            return output("c", c), output("w", w)
        """)
        rule = Rule("neg-neg", "aten.neg(aten.neg(x))", lambda m: m["x"])
        done = apply_rules(program, [rule])
        assert done.changed is changes
        assert [reason for _, _, reason in done.declined] == ([] if changes else [WRITTEN])

    def test_a_view_follows_what_is_written_behind_it(self):
        program = program_of("""
            x: f32[4] = input("x")
            a: f32[4] = aten.clone(x)
            v: f32[2, 2] = aten.view(a, [2, 2])
            w: f32[4] = aten.add_.Tensor(a, 1)
            u: f32[4] = aten.view(v, [4])
            c: f32[4] = aten.exp(u)
            return output("c", c)
        """)
        assert apply_rules(program, [Rule("views", "aten.view(aten.view(x, _), [4])", lambda m: m["x"])]).changed

    def test_nothing_to_do(self):
        program = program_of(TWO)
        done = apply_rules(program, [Rule("exp", "aten.exp(x)", lambda m: m["x"])])
        assert not done.changed and not done.declined


@pytest.mark.parametrize("given", [torch.neg, lambda x: x, torch.ones(2)], ids=["operator", "function", "tensor"])
def test_a_rule_that_returns_no_node_is_told_what_to_return(given: object):
    program = program_of("""
    x: f32[2] = input("x")
    y: f32[2] = aten.neg(x)
    return output("y", y)
    """)
    with pytest.raises(RewriteError, match=r"the rule mine replacing y by .*Remedy: return match\.splice"):
        apply_rules(program, [Rule("mine", "aten.neg(x)", lambda match: given)])


@pytest.mark.parametrize(
    ("pattern", "replace"),
    [
        ("aten.neg(x)", lambda match: match.splice(lambda x: torch.neg(x), match["x"])),
        ("aten.neg(x)", lambda match: match.root),
    ],
    ids=["makes what it matches", "returns what it matched"],
)
def test_a_rule_without_end_is_named(pattern: str, replace):
    program = program_of("""
        x: f32[4] = input("x")
        n: f32[4] = aten.neg(x)
        y: f32[4] = aten.exp(n)
        return output("y", y)
    """)
    message = "the rule again applying to .* without end. Remedy: let its check decline what its replacement makes"
    with pytest.raises(RewriteError, match=message):
        apply_rules(program, [Rule("again", pattern, replace)])


class TestManyResults:
    """To replace one argument of a call copies all of them: many results are held by several nodes meanwhile."""

    NUMBER = 200

    def program(self):
        calls = [f"a{i}: f32[4] = aten.neg(x)\nview_{i}: f32[4] = aten.detach(a{i})" for i in range(self.NUMBER)]
        results = ", ".join(f'output("{i}", view_{i})' for i in range(self.NUMBER))
        return program_of("\n".join(['x: f32[4] = input("x")', *calls, f"return {results}"]))

    def test_none_is_replaced_among_many(self):
        program, together = self.program(), set()

        def check(match: Match) -> str | None:
            together.update(len(user.args[0]) for user in match.root.users if user.op == "output")
            return None

        done = apply_rules(program, [Rule("detach", "aten.detach(x)", lambda m: m["x"], check)])
        assert together == {64, self.NUMBER % 64}
        assert dict(done.counts) == {"detach": self.NUMBER}
        assert [value.name for value in program.results] == [f"a{i}" for i in range(self.NUMBER)]
        verify(program, recompute=True)

    def test_they_are_as_they_were_when_nothing_applies(self):
        program = self.program()
        before = fingerprint(program)
        apply_rules(program, [Rule("detach", "aten.detach(x)", lambda m: m["x"], lambda m: "no")])
        assert fingerprint(program) == before

    def test_they_are_back_when_a_rule_fails(self):
        program = self.program()
        before = fingerprint(program)

        def fail(match: Match):
            raise ValueError("broken")

        with pytest.raises(ValueError, match="broken"):
            apply_rules(program, [Rule("detach", "aten.detach(x)", fail)])
        assert fingerprint(program) == before

    def test_asking_for_them_meanwhile_fails(self):
        program = self.program()
        with pytest.raises(IndexError):
            apply_rules(program, [Rule("detach", "aten.detach(x)", lambda m: m.program.results[0])])
