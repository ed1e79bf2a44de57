"""Every simplification on sampled programs: alone and all together, held against the program as it was.

Results are the same (bit by bit, or as the passes declare), inputs and results lie on the same memory as before, and
metadata is what a fresh run on fake tensors says. A failure prints the smallest program that still shows it.
"""

from __future__ import annotations

import importlib
import operator
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from crossfade.compile import pipeline
from crossfade.compile.catalogue import known_passes
from crossfade.graph.passes import Numerics, Pass, PassResult
from crossfade.graph.program import Program
from crossfade.graph.rewrite import Match, Rule
from crossfade.graph.rule_pass import run_rules
from tests.properties.simplify_checks import Failure, failure_of, smallest
from tests.properties.simplify_programs import sample

PARTS, PROGRAMS = 4, 25
"""How many times seeds are drawn, so that processes can share the work, and how many programs one seed holds."""
ALL = 100_000 if settings.default.max_examples > 1000 else 1_000
"""How many programs there are by the profile `fuzz`, and by default."""
ALONE, TOGETHER = 3, 6
"""How many passes each program meets alone, and how many in any order, where it does not meet the pipeline."""

MANY = settings(
    phases=[Phase.explicit, Phase.reuse, Phase.generate], max_examples=ALL // PARTS // PROGRAMS, database=None
)
"""A smaller seed is no smaller program: nothing for hypothesis to shrink."""

seeds = st.integers(0, 2**48)


def simplifications() -> list[Pass]:
    """Every pass of the stage that needs no option, and again with each switch of it turned."""
    for module in pkgutil.iter_modules(importlib.import_module("crossfade.simplify").__path__):
        if not module.name.endswith("_triton"):
            importlib.import_module(f"crossfade.simplify.{module.name}")
    found: list[Pass] = []
    for one in known_passes().values():
        has_defaults = all(option.default is not MISSING for option in fields(one))
        if one.__module__.startswith("crossfade.simplify.") and has_defaults:
            found += [one(), *(one(**{option.name: not option.default}) for option in _switches(one))]
            found += [one(devices=("cpu",)) for option in fields(one) if option.name == "devices"]
    return found


def _switches(one: type[Pass]) -> list:
    return [option for option in fields(one) if isinstance(option.default, bool)]


PASSES = simplifications()


def failure_on_any_data(program: Program, passes: Sequence[Pass], seed: int) -> Failure | None:
    """How passes break a program on some of a few inputs: a smaller program may need other numbers to show it."""
    return next(filter(None, (failure_of(program, passes, seed + more) for more in range(4))), None)


def report(program: Program, passes: Sequence[Pass], seed: int) -> str:
    """The smallest program that fails like this one, the pass to blame, and what it makes of it."""
    blamed = next(([one] for one in passes if failure_of(program, [one], seed) is not None), list(passes))
    small = smallest(program, lambda candidate: failure_on_any_data(candidate, blamed, seed))
    failure = failure_on_any_data(small, blamed, seed)
    done = small.copy()
    try:
        for one in blamed:
            one.run(done)
        text = str(done)
    except Exception as error:
        text = repr(error)
    names = ", ".join(one.spelling for one in blamed)
    return f"{failure}\npasses: {names}\nseed: {seed}\nbefore:\n{small}\nafter:\n{text}"


def check(program: Program, passes: Sequence[Pass], seed: int) -> None:
    if failure_of(program, passes, seed) is not None:
        pytest.fail(report(program, passes, seed))


@pytest.mark.parametrize("part", range(PARTS))
@MANY
@given(seed=seeds)
def test_simplifications(part: int, seed: int):
    for number in range(PROGRAMS):
        random = Random(f"{part} {seed} {number}")
        chosen = random.getrandbits(48)
        program = sample(chosen)
        for one in random.sample(PASSES, min(ALONE, len(PASSES))):
            check(program, [one], chosen)
        together = random.sample(PASSES, min(TOGETHER, len(PASSES)))
        check(program, pipeline.simplification() if random.random() < 0.5 else together, chosen)


# ------------------------------------------------------------------------------------- would a broken rule be seen


@dataclass(frozen=True)
class Broken(Pass):
    """Replaces what a pattern matches by `wrong` of it, where `check` has nothing against it."""

    pattern: str
    wrong: Callable[[Match], Any]
    check: Callable[[Match], str | None] = lambda match: None
    name = "broken"
    numerics = Numerics.BITWISE

    def run(self, program: Program) -> PassResult:
        return run_rules(program, [Rule("broken", self.pattern, self.wrong, self.check)])


@dataclass(frozen=True)
class DropWrites(Pass):
    """Takes a write whose result nobody reads for dead."""

    name = "drop-writes"
    numerics = Numerics.BITWISE

    def run(self, program: Program) -> PassResult:
        writes = program.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        dead = [node for node in writes if not node.users]
        for node in dead:
            program.graph.erase_node(node)
        return PassResult(bool(dead))


@dataclass(frozen=True)
class DropCopies(Pass):
    """Lets users of a copy read what was copied, whoever else holds or writes that."""

    name = "drop-copies"
    numerics = Numerics.BITWISE

    def run(self, program: Program) -> PassResult:
        copies = program.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
        for node in copies:
            node.replace_all_uses_with(node.args[0])
            program.graph.erase_node(node)
        return PassResult(bool(copies))


@dataclass(frozen=True)
class AskSizes(Pass):
    """Compares sizes in a way that makes the program hold for these sizes only."""

    name = "ask-sizes"
    numerics = Numerics.BITWISE

    def run(self, program: Program) -> PassResult:
        return PassResult(any(size == 3 for node in program.placeholders for size in node.meta["val"].shape))


def _other_dtype(match: Match) -> str | None:
    same = match["x"].meta["val"].dtype == match.root.meta["val"].dtype
    return None if same else "another dtype"


def _not_a_whole_split(match: Match) -> str | None:
    """Counts the pieces of a split, and forgets their order."""
    if not all(piece.target is operator.getitem and "split" in piece.args[0].name for piece in match["pieces"]):
        return "not only pieces"
    sources = {piece.args[0] for piece in match["pieces"]}
    whole = len(sources) == 1 and len(match["pieces"]) == len(sources.pop().meta["val"])
    return None if whole else "not the pieces of one split"


def _not_from_one(match: Match) -> str | None:
    return None if match["start"] == 1 and isinstance(match["x"].meta["val"].shape[0], int) else "not from one"


def _from_zero(match: Match) -> Any:
    dim, size = match["dim"], match.root.meta["val"].shape[match["dim"]]
    return match.splice(lambda x: torch.ops.aten.slice.Tensor(x, dim, 0, size), match["x"])


_CONVERTED_TWICE = "aten._to_copy(aten._to_copy(x, dtype=_), dtype=_)"
UNSOUND: dict[str, Pass] = {
    "plus zero, whatever its sign": Broken("aten.add.Tensor(x, 0)", lambda match: match["x"]),
    "converted and back, whatever was lost": Broken(_CONVERTED_TWICE, lambda match: match["x"], _other_dtype),
    "pieces in any order": Broken("aten.cat(pieces, _)", lambda m: m["pieces"][0].args[0].args[0], _not_a_whole_split),
    "a part for the whole": Broken("aten.slice_scatter(x, _, _, _, _)", lambda match: match["x"]),
    "one side of a choice": Broken("aten.where.self(_, x, _)", lambda match: match["x"]),
    "a slice that is one early": Broken("aten.slice.Tensor(x, dim, start, _)", _from_zero, _not_from_one),
    "random numbers drawn once": Broken(
        "aten.rand_like(x)", lambda match: match.splice(torch.ops.aten.zeros_like.default, match["x"])
    ),
    "a write that somebody sees": DropWrites(),
    "a copy that somebody writes": DropCopies(),
    "a guard on a size": AskSizes(),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_an_unsound_rule_is_found(name: str):
    """Within the programs of the default profile, and shown by a program of a few lines."""
    unsound = UNSOUND[name]
    for seed in range(250 * PROGRAMS):
        program = sample(seed)
        if failure_of(program, [unsound], seed) is not None:
            break
    else:
        pytest.fail("not found")
    small = smallest(program, lambda candidate: failure_on_any_data(candidate, [unsound], seed))
    calls = [node for node in small.graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    assert len(calls) <= 6 or small.fake_mode.shape_env is not None, str(small)
