"""Every pass on sampled programs, held against the functional program by running both for two steps, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from functional_programs import Machine, first_inputs, sample
from hypothesis import given
from hypothesis import strategies as st

from crossfade.communicate.bucket_all_reduces import BucketAllReduces
from crossfade.communicate.raise_launches import RaiseLaunches
from crossfade.communicate.sink_waits import SinkWaits
from crossfade.graph.passes import Pass, fingerprint, run_passes
from crossfade.graph.program import OutputKind, Program
from crossfade.graph.verify import verify
from crossfade.run.pack_in_place import PackInPlace
from crossfade.run.update_in_place import UpdateInPlace
from crossfade.simplify.remove_aliases import RemoveAliases
from crossfade.simplify.remove_dead_code import RemoveDeadCode

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
randoms = st.randoms(use_true_random=False)


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
@given(randoms)
def test_pass_alone(name: str, random: Random):
    check_same(sample(random), PIPELINES[name])


@given(randoms, st.lists(st.sampled_from(PASSES), min_size=2, max_size=6))
def test_passes_in_any_order(random: Random, passes: list[Pass]):
    check_same(sample(random), passes)


@given(randoms)
def test_update_in_place_returns_no_updates_and_adds_no_memory(random: Random):
    program = sample(random)
    done = run_passes(program, [UpdateInPlace()])
    assert not any(out.kind is OutputKind.UPDATE for out in done.outputs)
    assert done.inputs == program.inputs
    counts = done.history[0].counts
    updates = sum(out.kind is OutputKind.UPDATE for out in program.outputs)
    assert counts["updates"] == updates
    assert len(done.graph.nodes) - len(program.graph.nodes) >= 0


@given(randoms)
def test_every_collective_has_one_verdict(random: Random):
    program = sample(random)
    for one in (BucketAllReduces(), RaiseLaunches()):
        wanted = [node.name for node in program.graph.nodes if node.name.startswith(one_kind(one))]
        verdicts = run_passes(program, [one]).history[0].verdicts
        assert sorted(v.subject for v in verdicts if v.subject in wanted) == sorted(wanted)


def one_kind(one: Pass) -> tuple[str, ...]:
    if isinstance(one, BucketAllReduces):
        return ("all_reduce",)
    return ("all_reduce", "all_gather", "broadcast")
