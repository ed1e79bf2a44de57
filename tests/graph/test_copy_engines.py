"""A gather by copy engines is an all-gather to the whole vocabulary, and runs nowhere by accident."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from crossfade.check.compatible import check_schedules
from crossfade.communicate.bucket_all_gathers import BucketAllGathers
from crossfade.communicate.lower_all_gathers import LowerAllGathers
from crossfade.cost.estimate import estimate
from crossfade.cost.presets import preset
from crossfade.cost.timeline import simulate
from crossfade.errors import MeshError, VerifyError
from crossfade.execute.codegen import compile_program
from crossfade.graph import collectives
from crossfade.graph.copy_engines import all_gather_by_copy_engines
from crossfade.graph.events import events_of
from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify

TEXT = """
x: bf16[8, 4] = input("x")
s: bf16[16, 4] = crossfade.all_gather_by_copy_engines(x, 2, "dp")
w: bf16[16, 4] = c10d.wait_tensor(s)
return output("y", w)
""".strip()


def program() -> Program:
    return parse(TEXT, groups={"dp": 2})


def test_it_is_an_all_gather_of_its_group() -> None:
    read = program()
    verify(read, recompute=True)
    (found,) = collectives.find(read.graph)
    assert (found.kind, found.group, found.group_size, found.bytes) == (collectives.Kind.ALL_GATHER, "dp", 2, 128)
    assert found.by_copy_engines and found.plain
    assert collectives.count_by_kind(read.graph) == {"all_gather": (1, 128)}
    assert collectives.is_named("crossfade::all_gather_by_copy_engines")
    assert render(read) == TEXT
    collectives.rename_groups(read.graph.nodes, {"dp": "7"})
    assert collectives.find(read.graph)[0].group == "7"


def test_its_result_is_read_through_its_wait_only() -> None:
    early = TEXT.replace('output("y", w)', 'output("y", n)').replace("w:", "n: bf16[16, 4] = aten.neg(s)\nw:")
    with pytest.raises(VerifyError, match="reads s before its wait"):
        verify(parse(early, groups={"dp": 2}))
    written = TEXT.replace("w:", "n: bf16[8, 4] = aten.neg_(x)\nw:")
    with pytest.raises(VerifyError, match="writes x before the wait of s"):
        verify(parse(written, groups={"dp": 2}))


def test_other_ranks_must_gather_in_the_same_way() -> None:
    plain = parse(TEXT.replace("crossfade.all_gather_by_copy_engines", "c10d.all_gather_into_tensor"), groups={"dp": 2})
    alike = check_schedules([events_of(program()), events_of(program())], [{"dp": (0, 1)}] * 2)
    assert alike.ok
    found = check_schedules([events_of(program()), events_of(plain)], [{"dp": (0, 1)}] * 2)
    assert "different collectives in the 1st collective of dp" in str(found)
    assert "rank 0 starts all_gather_by_copy_engines of bf16[8, 4] on dp" in str(found)


@pytest.mark.parametrize(
    ("changed_by", "reason"),
    [
        (BucketAllGathers(), "copy engines gather it as it is"),
        (LowerAllGathers(("dp",)), "copy engines gather it, not its group's backend"),
    ],
)
def test_no_pass_makes_it_plain_again(changed_by, reason) -> None:
    done = run_passes(program(), [changed_by])
    assert render(done) == TEXT
    assert [verdict.reason for verdict in done.history[0].verdicts] == [reason]


BESIDE = """
x: f32[4096, 4096] = input("x")
s: f32[8192, 4096] = {gather}(x, 2, "dp")
y: f32[4096, 4096] = aten.mm(x, x)
w: f32[8192, 4096] = c10d.wait_tensor(s)
return output("y", y), output("w", w)
"""


def test_it_keeps_its_link_busy_and_computation_as_it_is() -> None:
    machine = preset("h100-nvlink-node")
    assert machine.fabric("dp").slows_compute > 0
    plain, carried = (
        simulate(read, estimate(read, machine))
        for read in (
            parse(BESIDE.format(gather=gather), groups={"dp": 2})
            for gather in ("c10d.all_gather_into_tensor", "crossfade.all_gather_by_copy_engines")
        )
    )
    assert carried.communication[0].finish == plain.communication[0].finish
    slower = machine.fabric("dp").slows_compute * (plain.communication[0].finish - plain.communication[0].start)
    assert plain.busy - carried.busy == pytest.approx(slower / (1 + machine.fabric("dp").slows_compute))


def test_without_a_gpu_it_says_what_to_do() -> None:
    with pytest.raises(MeshError, match=r"along group 'dp' of a tensor on cpu: expected .*leave the group out"):
        all_gather_by_copy_engines(torch.ones(2, 2), 2, "dp")
    with pytest.raises(MeshError, match="leave the group out of the groups of gather-by-copy-engines"):
        compile_program(program()).function([torch.ones(8, 4, dtype=torch.bfloat16)])
    assert not dist.is_initialized()  # it asked no group
