"""The runner: honest passes are recorded, all others are blamed by name."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from crossfade.errors import PassError
from crossfade.graph import passes
from crossfade.graph.order import Order, reorder
from crossfade.graph.passes import (
    Numerics,
    Outcome,
    Pass,
    PassResult,
    Verdict,
    check_requirements,
    fingerprint,
    run_passes,
)
from crossfade.graph.program import Output, OutputKind, Program
from crossfade.graph.text import parse

TEXT = """x: f32[4] = input("x")
a: f32[4] = aten.relu(x)
b: f32[4] = aten.neg(x)
start: f32[4] = c10d.all_reduce(a, "sum", "dp")
wait: f32[4] = c10d.wait_tensor(start)
c: f32[4] = aten.add.Tensor(wait, b)
return output("c", c)"""


def program() -> Program:
    return parse(TEXT, groups={"dp": 2})


def node_of(program: Program, name: str):
    return next(node for node in program.graph.nodes if node.name == name)


@dataclass(frozen=True)
class Swap(Pass):
    """Replaces one op by another; `lie` reports the opposite of what it did."""

    name = "swap"
    numerics = Numerics.BITWISE
    provides = frozenset({"swapped"})
    source: str = "b"
    lie: bool = False

    def run(self, program: Program) -> PassResult:
        found = [node for node in program.graph.nodes if node.name == self.source]
        for node in found:
            node.target = torch.ops.aten.exp.default
        verdicts = tuple(Verdict.of(node, Outcome.REPLACED, "asked to") for node in found)
        return PassResult(bool(found) != self.lie, {"swapped": len(found)}, verdicts)


@dataclass(frozen=True)
class NeedsSwap(Pass):
    """Requires what Swap provides."""

    name = "needs-swap"
    numerics = Numerics.BITWISE
    requires = frozenset({"swapped"})

    def run(self, program: Program) -> PassResult:
        return PassResult(False)


@dataclass(frozen=True)
class Crash(Pass):
    """Fails halfway."""

    name = "crash"
    numerics = Numerics.BITWISE

    def run(self, program: Program) -> PassResult:
        node_of(program, "b").target = torch.ops.aten.exp.default
        raise ValueError("two\n  lines")


@dataclass(frozen=True)
class LoseWait(Pass):
    """Reads a collective's result without its wait."""

    name = "lose-wait"
    numerics = Numerics.BITWISE

    def run(self, program: Program) -> PassResult:
        node = node_of(program, "c")
        node.replace_input_with(node_of(program, "wait"), node_of(program, "start"))
        node_of(program, "wait").prepend(node)
        node.meta["stack_trace"] = 'File "model.py", line 12, in forward'
        return PassResult(True)


def test_history_says_what_each_pass_did():
    done = run_passes(program(), [Swap(), Swap("nothing"), NeedsSwap()])
    first, second, third = done.history
    assert (first.name, first.spelling, first.numerics, first.changed) == ("swap", "swap", "bitwise", True)
    assert (first.counts, first.nodes_before, first.nodes_after) == ({"swapped": 1}, 7, 7)
    assert first.verdicts == (Verdict("b", Outcome.REPLACED, "asked to"),)
    assert first.before == TEXT
    assert first.after == TEXT.replace("aten.neg", "aten.exp")
    assert first.seconds >= 0
    assert first.looking > 0
    assert (second.spelling, second.changed, second.before, second.after) == ("swap(source='nothing')", False, "", "")
    assert third.name == "needs-swap"
    assert done.facts == {"swapped"}


def test_the_original_is_untouched():
    original = program()
    done = run_passes(original, [Swap()])
    assert str(original) == TEXT
    assert (original.history, original.facts) == ((), frozenset())
    assert str(done) != TEXT


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (
            Swap(lie=True),
            "pass swap reporting changed=False on a graph that did change. Remedy: return the truth from Swap.run.",
        ),
        (
            Swap("nothing", lie=True),
            "pass swap reporting changed=True on a graph that did not change. Remedy: return the truth from Swap.run.",
        ),
        (
            Crash(),
            "pass crash which failed: ValueError: two lines. "
            "Remedy: leave crash out of the pipeline, and report the program it failed on.",
        ),
        (
            LoseWait(),
            "pass lose-wait which left a broken program at node c [model.py:12]: VerifyError: "
            "c = aten.add.Tensor(start, b) [model.py:12] reads start before its wait: expected only waits "
            "to read what start is still writing. Remedy: read the wait's result instead.. "
            "Remedy: leave lose-wait out of the pipeline, and report the program it failed on.",
        ),
    ],
    ids=["hides-a-change", "claims-a-change", "crashes", "breaks-the-program"],
)
def test_blame(one, message):
    original = program()
    with pytest.raises(PassError) as caught:
        run_passes(original, [one])
    assert str(caught.value).replace("..", ".") == message.replace("..", ".")
    assert str(original) == TEXT


@pytest.mark.parametrize(
    ("order", "position", "remedy"),
    [
        ([NeedsSwap(), Swap()], 0, "move swap before it"),
        ([NeedsSwap()], 0, "add a pass that provides it, or remove it"),
        ([Crash(), NeedsSwap(), Crash(), Swap()], 1, "move swap before it"),
    ],
    ids=["too-late", "missing", "before-anything-runs"],
)
def test_missing_requirement(order, position, remedy):
    with pytest.raises(PassError) as caught:
        run_passes(program(), order)
    assert str(caught.value) == (
        f"pass needs-swap at position {position}, where swapped does not hold yet: expected each pass after "
        f"those that provide what it requires. Remedy: {remedy}."
    )


def test_facts_of_the_program_satisfy_requirements():
    check_requirements({"swapped"}, [NeedsSwap()])
    done = run_passes(run_passes(program(), [Swap()]), [NeedsSwap()])
    assert [record.name for record in done.history] == ["swap", "needs-swap"]


@pytest.mark.parametrize(
    ("keep_text", "limit", "kept"), [(None, 10, True), (None, 5, False), (True, 5, True), (False, 10, False)]
)
def test_large_programs_keep_no_text_unless_asked(monkeypatch, keep_text, limit, kept):
    monkeypatch.setattr(passes, "TEXT_LIMIT", limit)
    (record,) = run_passes(program(), [Swap()], keep_text=keep_text).history
    assert (bool(record.before), bool(record.after)) == (kept, kept)


def test_fingerprint_ignores_names():
    other = program()
    for index, node in enumerate(other.graph.nodes):
        if node.op != "placeholder":
            node.name = f"n{index}"
    assert str(other) != TEXT
    assert fingerprint(other) == fingerprint(program())


def changed_order(one: Program) -> None:
    order = Order(one.graph)
    assert reorder(one.graph, order.sorted(key=lambda node: -order.position[node]))


def insert_dead(one: Program) -> None:
    with one.graph.inserting_before(node_of(one, "c")):
        one.graph.call_function(torch.ops.aten.relu.default, (node_of(one, "b"),))


CHANGES = {
    "order": changed_order,
    "operator": lambda one: setattr(node_of(one, "b"), "target", torch.ops.aten.exp.default),
    "argument": lambda one: node_of(one, "b").update_arg(0, node_of(one, "a")),
    "keyword": lambda one: node_of(one, "c").update_kwarg("alpha", 2),
    "group": lambda one: node_of(one, "start").update_arg(2, "tp"),
    "result": lambda one: one.set_results([node_of(one, "b")]),
    "output-kind": lambda one: setattr(one, "outputs", (Output(OutputKind.LOSS, "c"),)),
    "dead-node": insert_dead,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_fingerprint_sees_a_change_of(change):
    one = program()
    change(one)
    assert fingerprint(one) != fingerprint(program())


def test_fingerprint_is_stable_over_copies():
    one = program()
    assert fingerprint(one.copy()) == fingerprint(one)


def test_spelling_has_only_options_that_differ():
    assert Swap().spelling == "swap"
    assert Swap("a", lie=True).spelling == "swap(source='a',lie=True)"


def test_a_verdict_carries_the_source_line():
    node = node_of(program(), "start")
    node.meta["stack_trace"] = 'File "model.py", line 12, in forward'
    verdict = Verdict.of(node, Outcome.LEFT, "too small", remedy="raise the limit", bytes=16)
    assert str(verdict) == "start [model.py:12]: left alone: too small (remedy: raise the limit)"
    assert verdict.bytes == 16


class Unprintable:
    """An argument that no program can hold: it cannot be printed, so it has no hash either."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


@dataclass(frozen=True)
class GiveUnprintable(Pass):
    name = "give-unprintable"
    numerics = Numerics.BITWISE

    def run(self, program: Program) -> PassResult:
        node_of(program, "a").args = (*node_of(program, "a").args, Unprintable())
        return PassResult(True)


@dataclass(frozen=True)
class LeaveAlone(Pass):
    name = "leave-alone"
    numerics = Numerics.BITWISE

    def run(self, program: Program) -> PassResult:
        return PassResult(False)


def test_what_has_no_hash_is_blamed_on_the_pass_that_left_it() -> None:
    with pytest.raises(PassError, match="give-unprintable which left a broken program: RuntimeError: no text"):
        run_passes(program(), [GiveUnprintable(), LeaveAlone()], keep_text=False)
