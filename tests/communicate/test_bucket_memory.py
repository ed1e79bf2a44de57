"""What a bucket costs in memory, measured while it runs: one buffer in each direction, freed after its last use."""

from __future__ import annotations

import textwrap
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crossfade.communicate.bucket_all_gathers import BucketAllGathers
from crossfade.communicate.bucket_all_reduces import BucketAllReduces
from crossfade.communicate.bucket_reduce_scatters import BucketReduceScatters
from crossfade.communicate.buckets import BucketPass
from crossfade.execute.executable import Executable
from crossfade.graph.passes import run_passes
from crossfade.graph.text import parse
from tests.live_bytes import LiveBytes

MEMBERS, ELEMENTS = 8, 2**14
MEMBER = 4 * ELEMENTS


class Meter(LiveBytes):
    """Keeps what is alive after each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.after: list[tuple[str, int]] = []

    def seen(self, operator: str) -> None:
        if operator == "wait_tensor":
            time.sleep(0.05)  # the backend's thread lets go of what it sent a moment after it is done
        self.after.append((operator, self.live))


def live_bytes(call: str, pass_: BucketPass, ranks: int) -> tuple[int, int]:
    """Bytes made and alive, in members: the most at any time, and just after the bucket's wait."""
    lines = [f'x{i}: f32[{ELEMENTS}] = input("x{i}")' for i in range(MEMBERS)]
    lines += [f"g{i}: f32[{ELEMENTS}] = aten.neg(x{i})" for i in range(MEMBERS)]
    lines += [f"s{i} = {call.format(x=f'g{i}', n=ranks)}" for i in range(MEMBERS)]
    lines += [f"w{i} = c10d.wait_tensor(s{i})" for i in range(MEMBERS)]
    lines += [f"y{i} = aten.sum(w{i})" for i in range(MEMBERS)]
    lines.append("return " + ", ".join(f'output("{i}", y{i})' for i in range(MEMBERS)))
    program = parse(textwrap.dedent("\n".join(lines)), groups={"dp": ranks})
    done = run_passes(program, [pass_])
    assert done.history[0].counts["buckets"] == 1
    run = Executable(done, {"dp": dist.group.WORLD.group_name})  # type: ignore[union-attr]
    with Meter() as meter:
        run([torch.ones(ELEMENTS) for _ in range(MEMBERS)])
    waited = next(index for index, (name, _) in enumerate(meter.after) if name == "wait_tensor")
    results = 4 * MEMBERS + 4096  # the sums themselves
    return tuple(  # type: ignore[return-value]
        (size + results) // MEMBER for size in (max(live for _, live in meter.after), meter.after[waited][1])
    )


CASES = {
    # members and the buffer to send, then that one and the buffer to receive, then only the latter
    "all-reduce": ('c10d.all_reduce({x}, "sum", "dp")', BucketAllReduces(), (2 * MEMBERS, MEMBERS)),
    "reduce-scatter": (
        'c10d.reduce_scatter_tensor({x}, "sum", {n}, "dp")',
        BucketReduceScatters(),
        (2 * MEMBERS, MEMBERS // 2),
    ),
    # a gathered bucket is copied out, member by member, before it goes
    "all-gather": ('c10d.all_gather_into_tensor({x}, {n}, "dp")', BucketAllGathers(), (4 * MEMBERS, 2 * MEMBERS)),
}


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_one_buffer_in_each_direction_freed_at_its_last_use(ranks: Any, case: str) -> None:
    call, pass_, expected = CASES[case]
    assert ranks(2).run(live_bytes, call, pass_, 2) == [expected] * 2
