"""A compilation is a list of phases: what they take and give is checked, and any of them is changed by its name."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from crossfade.compile.phases import Compilation, Phase, Phases
from crossfade.errors import PassError
from crossfade.graph.passes import Numerics, Pass, PassResult
from crossfade.graph.program import Program
from crossfade.graph.text import parse
from crossfade.simplify.remove_dead_code import RemoveDeadCode
from crossfade.simplify.remove_noops import RemoveNoops

TEXT = """
x: f32[4] = input("x")
unused: f32[4] = aten.relu(x)
return output("x", x)
"""


@dataclass(frozen=True)
class Ask(Pass):
    """Remember what the context knew."""

    name = "ask"
    numerics = Numerics.BITWISE

    def run(self, program: Program) -> PassResult:
        return PassResult(False)


def capture(compilation: Compilation) -> None:
    compilation.program = parse(TEXT)


def simplify(compilation: Compilation) -> None:
    compilation.run([RemoveNoops(), RemoveDeadCode()])


TWO = Phases([Phase("capture", capture, ()), Phase("simplify", simplify)])


def test_the_record_prints_phases_and_passes_as_they_ran():
    left = Phase("measure", simplify, why_not=lambda compilation: "no machine is planned for")
    ran = Phases([*TWO, left]).run(Compilation())
    lines = [line.split("  ")[0].rstrip() for line in repr(ran).splitlines() if not line.startswith("    ")]
    assert lines == ["capture", "simplify", "measure"]
    assert "    remove-noops (no change)\n    remove-dead-code\n" in repr(ran)
    assert repr(ran).endswith("left out: no machine is planned for")
    assert ran.names() == ["capture", "simplify"]
    assert ran.seconds("capture", "measure") == ran[0].seconds


def test_phases_are_changed_by_name():
    more = Phase("again", simplify)
    assert TWO.without("simplify").names() == ["capture"]
    assert TWO.before("simplify", more).names() == ["capture", "again", "simplify"]
    assert TWO.after("simplify", more).names() == ["capture", "simplify", "again"]
    replaced = TWO.replace("simplify", lambda compilation: compilation.run([RemoveNoops()])).run(Compilation())
    assert [record.name for record in replaced[1].passes] == ["remove-noops"]


def test_passes_are_changed_by_name_in_whichever_phase_they_run():
    def passes(phases: Phases) -> list[str]:
        return [record.name for phase in phases.run(Compilation()) for record in phase.passes]

    assert passes(TWO.without_pass("remove-noops")) == ["remove-dead-code"]
    assert passes(TWO.replace_pass("remove-noops", Ask())) == ["ask", "remove-dead-code"]
    assert passes(TWO.before_pass("remove-noops", Ask())) == ["ask", "remove-noops", "remove-dead-code"]
    assert passes(TWO.after_pass("remove-noops", Ask())) == ["remove-noops", "ask", "remove-dead-code"]


def test_a_change_of_a_pass_that_does_not_exist_is_an_error_at_once():
    with pytest.raises(PassError, match=r"no pass 'remove-noop': .*did you mean remove-noops"):
        TWO.without_pass("remove-noop")


def test_a_pass_that_a_change_brings_in_can_be_changed_too():
    changed = TWO.before_pass("remove-noops", Ask()).without_pass("ask")
    assert changed.changes() == ["ask before remove-noops", "without ask"]
    assert [record.name for record in changed.run(Compilation())[1].passes] == ["remove-noops", "remove-dead-code"]


def test_a_change_of_a_pass_that_does_not_run_here_is_said():
    ran = TWO.without_pass("sink-waits").run(Compilation())
    assert repr(ran).splitlines()[-1] == "without sink-waits   left out: no phase ran the pass"


def test_a_phase_without_what_it_takes_is_an_error():
    with pytest.raises(PassError, match="the phase simplify needs program, which no phase before it has made"):
        TWO.without("capture").run(Compilation())


def test_a_phase_that_does_not_give_what_it_says_is_an_error():
    with pytest.raises(PassError, match="what comes after the phase capture needs program"):
        TWO.replace("capture", lambda compilation: None).run(Compilation())


def test_a_phase_that_takes_what_nobody_has_heard_of_is_an_error():
    with pytest.raises(PassError, match="the phase more needs programme"):
        TWO.after("simplify", Phase("more", simplify, ("programme",))).run(Compilation())


def test_ranks_compare_functions_and_changes_not_only_names():
    mine = TWO.replace("simplify", capture).replace_pass("remove-noops", Ask())
    assert TWO.settings() != TWO.replace("simplify", capture).settings() != mine.settings()
    assert mine.settings()[-1] == "ask instead of remove-noops"
