"""Buffers that a model updates from its samples, given the whole batch's value."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import Tensor, fx

from crossfade.graph import collectives
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict, from_context
from crossfade.graph.program import InputKind, Output, OutputKind, Program, tensor_bytes
from crossfade.graph.splice import after, insert_call, splice
from crossfade.shard.buffer_parts import OVER_RANKS, READS_WHOLE, TIMES_RANKS
from crossfade.shard.exchange_results import exchange_results

UNPROVED_BUFFER = "a buffer may not become what it would on the whole batch"
UNPROVED_BUFFER_REMEDY = (
    'update it by sums, means, maxima or minima over samples, or pass semantics="per-rank" for each rank\'s own'
)


@dataclass(frozen=True)
class AverageBuffers(Pass):
    """Average the buffer updates that depend on a rank's own samples, so that replicas stay equal.

    For means over the batch (moving averages) the result is that of the whole batch. Sums, counts, maxima and minima of
    samples that `with_buffer_parts` has marked are taken over all ranks before the buffer is updated. Where it has not
    found out how the update follows from the samples, which `unproved` says, integer buffers take the first rank's
    value. Updates that are already the same on every rank are left alone.

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
    unproved: tuple[str, ...] = from_context(())

    def run(self, program: Program) -> PassResult:
        """Take marked totals over all ranks, and make equal what still varies where it becomes a buffer."""
        numbers = [node for node in program.graph.nodes if TIMES_RANKS in node.meta]
        for node in numbers:
            self._times_ranks(program, node)
        totals = self._over_ranks(program)
        varying = _varying(program)
        buffers = {item.name for item in program.inputs if item.kind is InputKind.BUFFER}

        def reason(out: Output, value: fx.Node) -> str | None:
            varies = out.kind is OutputKind.UPDATE and out.name in buffers and value in varying
            return "each rank updates this buffer from its own samples" if varies else None

        verdicts = exchange_results(program, self._agreed, reason)
        counts = {"averaged": len(verdicts), "totals": len(totals), "numbers": len(numbers)}
        done = {name: count for name, count in counts.items() if count or name == "averaged"}
        return PassResult(any(counts.values()), done, (*totals, *verdicts, *self._not_known(program)))

    def _over_ranks(self, program: Program) -> list[Verdict]:
        """Give updates of buffers the totals of all ranks' samples."""
        results, verdicts = dict(zip(program.outputs, program.results, strict=True)), []
        for node in [node for node in program.graph.nodes if OVER_RANKS in node.meta]:
            users = [user for user in node.users if READS_WHOLE in user.meta]
            becomes = [out for out, value in results.items() if value is node and out.kind is OutputKind.UPDATE]
            if not users and not becomes:
                continue
            how = node.meta[OVER_RANKS]

            def taken(value: Tensor, how: str = how) -> Tensor:
                return collectives.wait(collectives.all_reduce(value, how, self.group))

            whole = splice(program, taken, node, before=after(program, node), like=node)
            for user in users:
                user.replace_input_with(node, whole)
            results.update(dict.fromkeys(becomes, whole))
            reason, size = "a buffer is updated from the samples of all ranks", tensor_bytes(whole.meta["val"])
            verdicts.append(Verdict.inserted(whole.args[0], reason, made_for=None, bytes=size))
        if verdicts:
            program.set_results(list(results.values()))
        return verdicts

    def _times_ranks(self, program: Program, node: fx.Node) -> None:
        """Let a number of samples be that of all ranks."""
        place, ranks = node.meta[TIMES_RANKS], program.groups[self.group]
        number = node.args[place]
        if isinstance(number, fx.Node):
            node.update_arg(place, insert_call(program, operator.mul, number, ranks, before=node, like=node))
        else:
            node.update_arg(place, number * ranks)

    def _not_known(self, program: Program) -> list[Verdict]:
        """What is not known, at the buffer that it is about."""
        values = {out.name: value for out, value in program.named_results() if out.kind is OutputKind.UPDATE}
        return [
            Verdict.of(
                values[why.split(": ")[0]], Outcome.LEFT, UNPROVED_BUFFER, detail=why, remedy=UNPROVED_BUFFER_REMEDY
            )
            for why in self.unproved
        ]

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
