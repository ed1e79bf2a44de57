"""Collective matmuls in sampled programs change no bit, stride or sharing of memory.

Each program is run as it was and after all passes or one alone: with all ranks in this process, where matmuls that
travel are done by their definition, and on real ranks, where they travel in pieces.

300 programs in this process and 40 on two ranks by default; ten times as many, and four ranks, by `make fuzz`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

import crossfade.collective_matmul  # noqa: F401 (the operators' implementations)
from crossfade.communicate import collective_matmul, fuse_gathers_into_matmuls, fuse_scatters_into_matmuls
from crossfade.communicate.fuse_gathers_into_matmuls import FuseGathersIntoMatmuls
from crossfade.communicate.fuse_scatters_into_matmuls import FuseScattersIntoMatmuls
from crossfade.execute.executable import Executable
from crossfade.graph import collectives
from crossfade.graph.collectives import Kind
from crossfade.graph.passes import Outcome, Pass, run_passes
from crossfade.graph.program import Program, described
from crossfade.graph.verify import verify
from tests.communicate.all_collective_matmul_ranks import run_ranks
from tests.properties.collective_matmul_programs import GROUP, Sampler, inputs_for, sampled_passes
from tests.properties.exchange_programs import Choices

TIMES = 10 if settings.default.max_examples > 1000 else 1
"""The profile `fuzz` has ten times as many."""
NUMBERS = st.lists(st.integers(0, 999), min_size=24, max_size=80)
SHARED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
"""Rank processes serve all programs of a test."""
ANSWERED = {FuseGathersIntoMatmuls.name: Kind.ALL_GATHER, FuseScattersIntoMatmuls.name: Kind.REDUCE_SCATTER}
"""What each pass owes a verdict on."""


def sampled(numbers: Sequence[int], ranks: int) -> tuple[Program, list[Pass]]:
    """A program, and the passes in the pipeline's order."""
    choices = Choices(numbers)
    passes = sampled_passes(choices)
    return Sampler(choices, ranks).program(), passes


def changed(program: Program, passes: Sequence[Pass]) -> Program | None:
    """What passes make of a program, once each has said what becomes of every collective; None if that is nothing."""
    done, any_change = program, False
    for one in passes:
        before, done = done, run_passes(done, [one], keep_text=False)
        record = done.history[-1]
        any_change |= record.changed
        owed = [c.node.name for c in collectives.find(before.graph) if c.kind is ANSWERED.get(one.name)]
        silent = set(owed) - {verdict.subject for verdict in record.verdicts}
        assert not silent, f"{one.spelling} says nothing of {silent} in\n{before}"
    if not any_change:
        return None
    verify(done)
    check_metadata(done)
    return done


def check_metadata(program: Program) -> None:
    """As `verify` with `recompute` has it, but for strides of dims of size 1, which torch's own kernels disagree on."""
    with program.fake_mode:
        for node in program.graph.nodes:
            if node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: described(n, program.constants))
                fresh, recorded = (layouts(one) for one in (node.target(*args, **kwargs), node.meta["val"]))
                assert fresh == recorded, f"{node.name} is recorded as {recorded} instead of {fresh} in\n{program}"


def layouts(value: Any) -> list[tuple[Any, ...]]:
    return [(one.shape, one.dtype, strides(one)) for one in (value if isinstance(value, list | tuple) else [value])]


def difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> str:
    """How results and inputs after one run differ from those after another; empty if they do not."""
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        if (one.shape, one.dtype, strides(one)) != (other.shape, other.dtype, strides(other)):
            layouts = [f"{tuple(each.shape)} {each.dtype} {each.stride()}" for each in (one, other)]
            return f"value {index} is {layouts[1]} instead of {layouts[0]}"
        if not torch.equal(one, other):
            return f"value {index} differs by {float((one.double() - other.double()).abs().max())}"
    if sharing(expected) != sharing(found):
        return f"these share memory: {sharing(found)} instead of {sharing(expected)}"
    return ""


def strides(value: Tensor) -> list[int]:
    """Those that are ever stepped by."""
    return [stride for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1]


def sharing(values: Sequence[Tensor]) -> list[tuple[int, int]]:
    homes = [value.untyped_storage().data_ptr() for value in values]
    return [(i, j) for i in range(len(homes)) for j in range(i) if homes[i] == homes[j]]


def explained(what: str, passes: Sequence[Pass], program: Program, done: Program) -> str:
    return "\n".join([what, *(one.spelling for one in passes), str(program), "", "became", "", str(done)])


# all ranks in this process


def by_hand(program: Program, ranks: int) -> list[list[Tensor]]:
    """Results and inputs of every rank, after it has run."""
    given = [inputs_for(program, rank) for rank in range(ranks)]
    return [[*results, *inputs] for results, inputs in zip(run_ranks(program, given), given, strict=True)]


@settings(max_examples=300 * TIMES)
@given(numbers=NUMBERS, ranks=st.sampled_from([2, 3, 4]), alone=st.sampled_from([None, None, 0, 1, 2, 3]))
def test_by_definition(numbers: list[int], ranks: int, alone: int | None) -> None:
    program, passes = sampled(numbers, ranks)
    passes = passes if alone is None else [passes[alone]]
    if (done := changed(program, passes)) is not None:
        for one, other in zip(by_hand(program, ranks), by_hand(done, ranks), strict=True):
            found = difference(one, other)
            assert not found, explained(found, passes, program, done)


# real ranks


def run_alone_and_together(numbers: list[int], ranks: int) -> list[str]:
    """On each rank: how the results of a program differ after each pass alone, and after all."""
    program, passes = sampled(numbers, ranks)
    names = {GROUP: dist.group.WORLD.group_name}  # type: ignore[union-attr]

    def run(one: Program) -> list[Tensor]:
        inputs = inputs_for(one, dist.get_rank())
        return [*Executable(one, names)([*inputs]), *inputs]

    expected = run(program)
    differences = []
    for variant in (*([one] for one in passes), passes):
        if (done := changed(program, variant)) is not None and (found := difference(expected, run(done))):
            differences.append(explained(found, variant, program, done))
    return differences


def check(pool: Any, numbers: list[int], ranks: int) -> None:
    for rank, differences in enumerate(pool.run(run_alone_and_together, numbers, ranks)):
        assert not differences, f"rank {rank}: {differences[0]}"


@pytest.mark.ranks
@settings(max_examples=40 * TIMES, suppress_health_check=SHARED)
@given(numbers=NUMBERS)
def test_on_two_ranks(ranks: Any, numbers: list[int]) -> None:
    check(ranks(2), numbers, 2)


@pytest.mark.models
@pytest.mark.ranks
@settings(max_examples=40 * TIMES, suppress_health_check=SHARED)
@given(numbers=NUMBERS)
def test_on_four_ranks(ranks: Any, numbers: list[int]) -> None:
    check(ranks(4), numbers, 4)


# what is sampled


def test_samples_reach_collective_matmuls_and_the_reasons_against_them() -> None:
    found: Counter[tuple[str, str]] = Counter()
    kept = shared = meanwhile = 0
    for seed in range(200):
        random = Random(seed)
        program, _ = sampled([random.randrange(1000) for _ in range(random.randrange(24, 80))], 2)
        gathers, left_gathers = FuseGathersIntoMatmuls(form="chunked", chunks=2).plan(program)
        scatters, left_scatters = FuseScattersIntoMatmuls(form="chunked", chunks=2).plan(program)
        kept += sum(one.keep for one in gathers)
        shared += sum(len(one.products) > 1 for one in gathers)
        meanwhile += sum(bool(one.meanwhile) for one in scatters)
        found.update({("gather", "pipeline"): len(gathers), ("scatter", "pipeline"): len(scatters)})
        starts = {one.node.name: str(one.kind) for one in collectives.find(program.graph)}
        for verdict in (*left_gathers, *left_scatters):
            assert verdict.outcome is Outcome.LEFT
            kind = "gather" if "gather" in starts.get(verdict.subject, "") else "scatter"
            found[kind if verdict.subject in starts else "matmul", verdict.reason] += 1
    for kind in ("gather", "scatter"):
        considered = sum(number for (one, _), number in found.items() if one == kind)
        assert found[kind, "pipeline"] > 0.5 * considered > 50, found
    assert kept > 30 and shared > 20 and meanwhile > 20
    expected = {
        collective_matmul.CYCLE,
        collective_matmul.LATER,
        collective_matmul.WRITTEN,
        fuse_gathers_into_matmuls.NO_MATMUL,
    }
    expected |= {fuse_gathers_into_matmuls.TRIMMED, fuse_gathers_into_matmuls.CUT, fuse_gathers_into_matmuls.ANOTHER}
    expected |= {fuse_scatters_into_matmuls.NO_MATMUL, fuse_scatters_into_matmuls.USED}
    assert expected <= {reason for _, reason in found}, found
