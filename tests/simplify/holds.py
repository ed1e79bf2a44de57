"""What every simplification is held to: the text it makes, the values it keeps, the memory that must not change."""

from __future__ import annotations

import textwrap
from typing import Any

import torch
from torch import Tensor

from crossfade.graph.passes import Numerics, Outcome, Pass, run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify


def program_of(text: str, **groups: int) -> Program:
    """A program from an indented text."""
    return parse(textwrap.dedent(text), groups=groups)


def rewrites(tested: Pass, before: str, after: str, counts: dict[str, int] | None = None, **groups: int) -> Program:
    """Assert that a pass makes exactly `after` of `before`, with the same results; counts too, if given."""
    program = program_of(before, **groups)
    done = run_passes(program, [tested])
    assert render(done) == textwrap.dedent(after).strip()
    if counts is not None:
        assert {name: count for name, count in done.history[0].counts.items() if count} == counts
    if not groups:
        same_results(program, done, tested.numerics)
    verify(done, recompute=not groups)
    return done


def declines(tested: Pass, text: str, reason: str, **groups: int) -> None:
    """Assert that a pass leaves a program as it is and says why in one verdict at least."""
    program = program_of(text, **groups)
    done = run_passes(program, [tested])
    assert render(done) == render(program)
    reasons = [verdict.reason for verdict in done.history[0].verdicts if verdict.outcome == Outcome.LEFT]
    assert any(reason in given for given in reasons), f"{reason!r} is not among {reasons}"


def same_results(before: Program, other: Program, numerics: Numerics, seed: int = 0) -> None:
    """Run both on the same inputs: equal results, and the same inputs and results on the same memory."""
    first, first_inputs = run(before, seed)
    second, second_inputs = run(other, seed)
    for expected, actual in zip(first + first_inputs, second + second_inputs, strict=True):
        if not isinstance(expected, Tensor):
            assert expected == actual
        elif numerics is Numerics.BITWISE:
            torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
        else:
            torch.testing.assert_close(actual, expected, equal_nan=True)
        assert not isinstance(expected, Tensor) or actual.stride() == expected.stride()
    assert sharing(first + first_inputs) == sharing(second + second_inputs)


def run(program: Program, seed: int) -> tuple[list[Any], list[Any]]:
    """A program's results, and its inputs as it left them."""
    torch.manual_seed(seed)
    inputs = [sample(node.meta["val"]) for node in program.placeholders]
    torch.manual_seed(seed + 1)
    return list(program.module()(*inputs)), inputs


def sample(value: Any) -> Any:
    """A random value like a fake one, strides included."""
    if not isinstance(value, Tensor):
        return 3
    whole = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    if value.dtype == torch.bool:
        return whole.copy_(torch.rand(value.shape) < 0.5)
    if value.dtype.is_floating_point or value.dtype.is_complex:
        return whole.copy_(torch.randn(value.shape))
    return whole.copy_(torch.randint(0, 4, value.shape))


def sharing(values: list[Any]) -> set[tuple[int, int]]:
    """Which of the values lie on the same memory, by position."""
    homes = [value.untyped_storage().data_ptr() if isinstance(value, Tensor) else None for value in values]
    pairs = ((i, j) for i in range(len(homes)) for j in range(i))
    return {(i, j) for i, j in pairs if homes[i] and homes[i] == homes[j]}
