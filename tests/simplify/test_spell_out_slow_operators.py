"""Parts in the place of an operator: only where they were measured to be faster, and with the same numbers."""

from __future__ import annotations

import pytest
import torch

from crossfade.cost.keys import Keys
from crossfade.execute.executable import Executable
from crossfade.graph.passes import Outcome, run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse
from crossfade.simplify.spell_out_slow_operators import SpellOutSlowOperators, slow_operators
from tests.simplify.holds import same_results

TEXT = """
g: f32[6, 8] = input("g")
x: f32[6, 8] = input("x")
y: f32[6, 8] = aten.gelu_backward(g, x)
return output("y", y)
"""


def table(whole: float, part: float) -> dict[str, float]:
    """Seconds of the operator and of each of its parts."""
    keys, spelled = Keys(), run_passes(parse(TEXT), [SpellOutSlowOperators()])
    parts = {keys.of(node): part for node in spelled.graph.nodes if node.op == "call_function"}
    (operator,) = slow_operators(parse(TEXT))
    return {**parts, keys.of(operator): whole}


def spelled_out(measured: dict[str, float]) -> Program:
    return run_passes(parse(TEXT), [SpellOutSlowOperators(measured)])


def test_parts_that_are_faster_take_its_place() -> None:
    done = spelled_out(table(whole=24e-6, part=1e-6))
    assert "gelu_backward" not in str(done) and "erf" in str(done)
    (verdict,) = done.history[-1].verdicts
    assert (verdict.outcome, verdict.reason) == (Outcome.REPLACED, "its parts take half of its time or less")
    assert verdict.detail == "24.0 -> 11.0 us"


NOT_TAKEN = {
    "slower": (table(whole=10e-6, part=1e-6), "its parts would not save half of its time"),
    "hardly faster": (table(whole=20e-6, part=1e-6), "its parts would not save half of its time"),
    "never measured": ({}, "it or its parts were not measured"),
    "measured in part": (dict(list(table(24e-6, 1e-6).items())[1:]), "it or its parts were not measured"),
}


@pytest.mark.parametrize(("measured", "reason"), NOT_TAKEN.values(), ids=NOT_TAKEN)
def test_otherwise_it_stays_and_so_does_the_program(measured: dict[str, float], reason: str) -> None:
    done = spelled_out(measured)
    assert str(done) == TEXT.strip()
    assert [verdict.reason for verdict in done.history[-1].verdicts] == [reason]


@pytest.mark.parametrize(
    "call", ["aten.gelu_backward(g, x, approximate='tanh')", "aten.silu_backward(g, x)", "aten.mul.Tensor(g, x)"]
)
def test_what_is_not_known_is_no_candidate(call: str) -> None:
    assert slow_operators(parse(TEXT.replace("aten.gelu_backward(g, x)", call.replace("'", '"')))) == []


def test_half_precision_is_left_to_the_operator_which_computes_it_in_single() -> None:
    program = parse(TEXT.replace("f32", "bf16"))
    assert slow_operators(program) == []
    done = run_passes(program, [SpellOutSlowOperators()])
    reasons = [verdict.reason for verdict in done.history[-1].verdicts]
    assert reasons == ["it is not computed in single or double precision"] and str(done) == str(program)


def test_inputs_of_two_dtypes_are_left_to_the_operator() -> None:
    assert slow_operators(parse(TEXT.replace("x: f32", "x: bf16"))) == []


def test_a_result_that_would_lie_otherwise_is_left_to_the_operator() -> None:
    text = TEXT.replace("x: f32[6, 8]", "w: f32[8, 6]").replace('"x")', '"w")\nx: f32[6, 8] = aten.permute(w, [1, 0])')
    done = run_passes(parse(text), [SpellOutSlowOperators()])
    assert [verdict.reason for verdict in done.history[-1].verdicts] == [
        "its parts would lay the result out in another way"
    ]
    assert str(done) == text.strip()


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_the_numbers_are_the_same(dtype: str) -> None:
    program = parse(TEXT.replace("f32", dtype))
    done = run_passes(program, [SpellOutSlowOperators()])
    same_results(program, done, SpellOutSlowOperators.numerics)


def test_far_from_zero_the_numbers_are_the_same_too() -> None:
    program = parse(TEXT)
    done = run_passes(program, [SpellOutSlowOperators()])
    x = torch.tensor([-1e30, -100, -13, -5, -1e-30, 0, 5, 1e4]).expand(6, 8).contiguous()
    (expected,), (found,) = (Executable(version, {})([torch.ones(6, 8), x.clone()]) for version in (program, done))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
