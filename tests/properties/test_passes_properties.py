"""Every pass on sampled programs, held against the functional program by running both for two steps, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from crossfade.communicate.bucket_all_reduces import BucketAllReduces
from crossfade.communicate.raise_launches import RaiseLaunches
from crossfade.communicate.sink_waits import SinkWaits
from crossfade.execute.executable import Executable
from crossfade.finish.pack_in_place import PackInPlace
from crossfade.finish.update_in_place import UpdateInPlace
from crossfade.graph.passes import Pass, fingerprint, run_passes
from crossfade.graph.program import OutputKind, Program
from crossfade.graph.verify import verify
from crossfade.simplify.remove_aliases import RemoveAliases
from crossfade.simplify.remove_dead_code import RemoveDeadCode
from tests.properties.functional_programs import Machine, first_inputs, sample

MB = 2**20
PASSES: list[Pass] = [
    RemoveAliases(),
    RemoveDeadCode(),
    BucketAllReduces(),
    BucketAllReduces(cap_mb=40 / MB, first_mb=24 / MB),
    RaiseLaunches(),
    SinkWaits(),
    PackInPlace(),
    UpdateInPlace(),
]
PIPELINES: dict[str, list[Pass]] = {
    **{one.spelling: [one] for one in PASSES},
    "pack and update in place": [PackInPlace(), UpdateInPlace()],
    "bucket, pack and update in place": [BucketAllReduces(), PackInPlace(), UpdateInPlace()],
    "all": [RemoveAliases(), RemoveDeadCode(), BucketAllReduces(), RaiseLaunches(), SinkWaits(), PackInPlace(),
            UpdateInPlace()],
}  # fmt: skip
ONLY_SAMPLED = settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])
"""A smaller seed is no smaller program: nothing to shrink."""
FEWER = settings(ONLY_SAMPLED, max_examples=settings().max_examples // 5)
"""For tests that run once for each pipeline."""

seeds = st.integers(0, 2**32 - 1)


def check_same(program: Program, passes: Sequence[Pass]) -> None:
    """Two steps of the program as it was, and as the passes leave it: same results, inputs and sharing of memory."""
    before = fingerprint(program)
    done = run_passes(program, passes)
    assert fingerprint(program) == before
    verify(done)
    message = f"{[one.spelling for one in passes]}\n{program}\n----\n{done}"
    kept, changed = first_inputs(program), first_inputs(done)
    earlier: Any = None
    for step in range(2):
        expected = Machine().step(program, kept, step)
        found = Machine().step(done, changed, step)
        assert found.bytes() == expected.bytes(), f"results of step {step} differ\n{message}"
        for name in kept:
            assert kept[name].numpy().tobytes() == changed[name].numpy().tobytes(), f"{name} differs\n{message}"
        assert found.shared <= expected.shared, f"new aliases {found.shared - expected.shared}\n{message}"
        if earlier is not None:
            assert earlier[0].bytes() == earlier[1], f"results of step 0 changed in step 1\n{message}"
        earlier = found, found.bytes()


@pytest.mark.parametrize("name", PIPELINES)
@FEWER
@given(seeds)
def test_pass_alone(name: str, seed: int):
    check_same(sample(Random(seed)), PIPELINES[name])


@ONLY_SAMPLED
@given(seeds, st.lists(st.sampled_from(PASSES), min_size=2, max_size=6))
def test_passes_in_any_order(seed: int, passes: list[Pass]):
    check_same(sample(Random(seed)), passes)


@ONLY_SAMPLED
@given(seeds)
def test_update_in_place_returns_no_updates_and_adds_no_memory(seed: int):
    program = sample(Random(seed))
    done = run_passes(program, [UpdateInPlace()])
    assert not any(out.kind is OutputKind.UPDATE for out in done.outputs)
    assert done.inputs == program.inputs
    counts = done.history[0].counts
    updates = sum(out.kind is OutputKind.UPDATE for out in program.outputs)
    assert counts["updates"] == updates
    assert len(done.graph.nodes) - len(program.graph.nodes) >= 0


@ONLY_SAMPLED
@given(seeds)
def test_every_collective_has_one_verdict(seed: int):
    program = sample(Random(seed))
    for one in (BucketAllReduces(), RaiseLaunches()):
        wanted = [node.name for node in program.graph.nodes if node.name.startswith(one_kind(one))]
        verdicts = run_passes(program, [one]).history[0].verdicts
        assert sorted(v.subject for v in verdicts if v.subject in wanted) == sorted(wanted)


def bucketed_against_unbucketed(seeds: list[int]) -> list[int]:
    """On every rank: the seeds of the programs whose results depend on bucketing."""
    group = torch.distributed.group.WORLD.group_name
    differing = []
    for seed in seeds:
        program = sample(Random(seed), groups=("dp",), only_all_reduce=True)
        bucketed = run_passes(program, [BucketAllReduces(), RaiseLaunches(), SinkWaits()])
        found = []
        for one in (program, bucketed):
            torch.manual_seed(seed)
            rank = torch.distributed.get_rank()
            inputs = [value * (1 + 0.37 * rank) for value in first_inputs(one).values()]
            results = Executable(one, {"dp": group})(inputs)
            found.append([result.contiguous().numpy().tobytes() for result in results])
        if found[0] != found[1]:
            differing.append(seed)
    return differing


@pytest.mark.ranks
def test_bucketed_is_bitwise_unbucketed_on_two_ranks(ranks: Any):
    """Two addends have one sum: on two ranks not even the rings can differ."""
    seeds = list(range(40))
    programs = [sample(Random(seed), groups=("dp",), only_all_reduce=True) for seed in seeds]
    plans = [BucketAllReduces().plan(program) for program in programs]
    assert sum(len(plan.buckets) for plan in plans) >= 15
    assert ranks(2).run(bucketed_against_unbucketed, seeds) == [[], []]


def one_kind(one: Pass) -> tuple[str, ...]:
    if isinstance(one, BucketAllReduces):
        return ("all_reduce",)
    return ("all_reduce", "all_gather", "broadcast")
