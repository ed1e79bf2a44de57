"""Buffers that a model updates from its samples, given the whole batch's value."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, fx

from crossfade.graph import collectives
from crossfade.graph.passes import Numerics, Pass, PassResult
from crossfade.graph.program import InputKind, Output, OutputKind, Program
from crossfade.shard.exchange_results import exchange_results


@dataclass(frozen=True)
class AverageBuffers(Pass):
    """Average the buffer updates that depend on a rank's own samples, so that replicas stay equal.

    For means over the batch (moving averages, codebooks) the result is that of the whole batch. Integer buffers take
    the first rank's value. Updates that are already the same on every rank are left alone.

    Also known as: none; torch's DDP broadcasts the first rank's buffers instead, see `broadcast-buffers`.

    Before:
        b: f32[4] = buffer("b")
        n: f32[4] = buffer("n")
        x: f32[4] = input("x")
        add: f32[4] = aten.add.Tensor(b, x)
        add_1: f32[4] = aten.add.Tensor(n, 1)
        return update("b", add), update("n", add_1)

    After:
        b: f32[4] = buffer("b")
        n: f32[4] = buffer("n")
        x: f32[4] = input("x")
        add: f32[4] = aten.add.Tensor(b, x)
        all_reduce: f32[4] = c10d.all_reduce(add, "avg", "dp")
        wait_tensor: f32[4] = c10d.wait_tensor(all_reduce)
        add_1: f32[4] = aten.add.Tensor(n, 1)
        return update("b", wait_tensor), update("n", add_1)
    """

    name = "average-buffers"
    numerics = Numerics.REASSOCIATES

    group: str = "dp"

    def run(self, program: Program) -> PassResult:
        """Find what varies between ranks in one walk, then make it equal where it becomes a buffer."""
        varying = _varying(program)
        buffers = {item.name for item in program.inputs if item.kind is InputKind.BUFFER}

        def reason(out: Output, value: fx.Node) -> str | None:
            varies = out.kind is OutputKind.UPDATE and out.name in buffers and value in varying
            return "each rank updates this buffer from its own samples" if varies else None

        verdicts = exchange_results(program, self._agreed, reason)
        return PassResult(bool(verdicts), {"averaged": len(verdicts)}, verdicts)

    def _agreed(self, value: Tensor) -> Tensor:
        if value.is_floating_point():
            return collectives.wait(collectives.all_reduce(value, "avg", self.group))
        return collectives.wait(collectives.broadcast(value, 0, self.group))


def _varying(program: Program) -> set[fx.Node]:
    """The nodes whose values differ between ranks: all that depends on the batch and did not come from everyone."""
    own = {InputKind.INPUT, InputKind.SCALAR}
    varying = {node for item, node in program.named_inputs() if item.kind in own}
    for node in program.graph.nodes:
        if any(source in varying for source in node.all_input_nodes) and not _is_shared(node):
            varying.add(node)
    return varying


def _is_shared(node: fx.Node) -> bool:
    """Whether every rank of the group gets the same from this collective."""
    started = collectives.view(node)
    everyone = (collectives.Kind.ALL_REDUCE, collectives.Kind.ALL_GATHER, collectives.Kind.BROADCAST)
    return started is not None and started.kind in everyone
