"""Buffers that each rank updates from its own samples, made equal again."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, fx

from crossfade.graph import collectives
from crossfade.graph.passes import Numerics, Pass, PassResult
from crossfade.graph.program import InputKind, Output, OutputKind, Program
from crossfade.shard.exchange_results import exchange_results


@dataclass(frozen=True)
class BroadcastBuffers(Pass):
    """Give every rank the first rank's buffer updates, as torch's DDP does; for per-rank semantics.

    Also known as: `broadcast_buffers=True` of torch's DDP.

    Before:
        b: f32[4] = buffer("b")
        add: f32[4] = aten.add.Tensor(b, 1)
        return update("b", add)

    After:
        b: f32[4] = buffer("b")
        add: f32[4] = aten.add.Tensor(b, 1)
        broadcast: f32[4] = c10d.broadcast(add, 0, "dp")
        wait_tensor: f32[4] = c10d.wait_tensor(broadcast)
        return update("b", wait_tensor)
    """

    name = "broadcast-buffers"
    numerics = Numerics.BITWISE

    group: str = "dp"

    def run(self, program: Program) -> PassResult:
        """Broadcast each buffer's new value among the program's results."""
        buffers = {item.name for item in program.inputs if item.kind is InputKind.BUFFER}

        def reason(out: Output, value: fx.Node) -> str | None:
            why = "each rank updates this buffer from its own samples; the first rank's value is kept"
            return why if out.kind is OutputKind.UPDATE and out.name in buffers else None

        verdicts = exchange_results(program, self._from_first, reason)
        return PassResult(bool(verdicts), {"inserted": len(verdicts)}, verdicts)

    def _from_first(self, value: Tensor) -> Tensor:
        return collectives.wait(collectives.broadcast(value, 0, self.group))
