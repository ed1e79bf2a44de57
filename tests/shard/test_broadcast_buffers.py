"""The first rank's buffers for all; parameters and optimizer state are no buffers."""

from __future__ import annotations

import textwrap

from crossfade.graph.passes import run_passes
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify
from crossfade.shard.broadcast_buffers import BroadcastBuffers


def test_only_updates_of_buffers():
    program = parse(
        textwrap.dedent("""
        p: f32[2] = parameter("p")
        b: i64[] = buffer("b")
        c: f32[2] = buffer("c")
        p1: f32[2] = aten.neg(p)
        b1: i64[] = aten.add.Tensor(b, 1)
        return update("p", p1), update("b", b1), output("c", c), update("c", p)
    """),
        groups={"dp": 2},
    )
    done = run_passes(program, [BroadcastBuffers()])
    verify(done, recompute=True)
    expected = """
        p: f32[2] = parameter("p")
        b: i64[] = buffer("b")
        c: f32[2] = buffer("c")
        broadcast_1: f32[2] = c10d.broadcast(p, 0, "dp")
        wait_tensor_1: f32[2] = c10d.wait_tensor(broadcast_1)
        p1: f32[2] = aten.neg(p)
        b1: i64[] = aten.add.Tensor(b, 1)
        broadcast: i64[] = c10d.broadcast(b1, 0, "dp")
        wait_tensor: i64[] = c10d.wait_tensor(broadcast)
        return update("p", p1), update("b", wait_tensor), output("c", c), update("c", wait_tensor_1)
    """
    assert render(done) == textwrap.dedent(expected).strip()
    reason = "each rank updates this buffer from its own samples; the first rank's value is kept"
    assert [str(v) for v in done.history[0].verdicts] == [
        f"broadcast [b]: inserted: {reason}",
        f"broadcast_1 [c]: inserted: {reason}",
    ]
