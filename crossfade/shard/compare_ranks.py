"""Numbers that sum up what must be the same on all ranks, reduced with the loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from crossfade.graph import collectives
from crossfade.graph.passes import Numerics, Pass, PassResult, Verdict
from crossfade.graph.program import Input, InputKind, Output, OutputKind, Program, tensor_bytes
from crossfade.graph.splice import after, splice


@dataclass(frozen=True)
class CompareRanks(Pass):
    """Reduce a few numbers of each rank over all of them: from these every rank sees whether all had the same numbers.

    They are reduced like the loss, and so share its bucket: no collective is added.

    Also known as: none; Megatron's `--check-weight-hash-across-dp-replicas-interval` compares parameters alone.

    Before:
        x: f32[4] = input("x")
        sum_1: f32[] = aten.sum(x)
        return loss("loss", sum_1)

    After:
        x: f32[4] = input("x")
        alike_dp: f32[6] = alike("alike.dp")
        all_reduce: f32[6] = c10d.all_reduce(alike_dp, "avg", "dp")
        wait_tensor: f32[6] = c10d.wait_tensor(all_reduce)
        sum_1: f32[] = aten.sum(x)
        return loss("loss", sum_1), alike("alike.dp", wait_tensor)
    """

    name = "compare-ranks"
    numerics = Numerics.BITWISE

    group: str = "dp"
    reduce_op: str = "avg"
    numbers: int = 6

    def run(self, program: Program) -> PassResult:
        """Add an input with this rank's numbers, and its reduction as an output."""
        name, like = f"alike.{self.group}", program.placeholders[0]
        with program.fake_mode:
            value = torch.empty(self.numbers, device=_device(program))
        given = program.add_input(Input(InputKind.ALIKE, name), value)

        def reduce(numbers: Tensor) -> Tensor:
            return collectives.wait(collectives.all_reduce(numbers, self.reduce_op, self.group))

        reduced = splice(program, reduce, given, before=after(program, given), like=like)
        program.set_results([*program.results, reduced], (*program.outputs, Output(OutputKind.ALIKE, name)))
        start = collectives.started_by(reduced)
        assert start is not None
        reason = "compares ranks: batch, rates and samples of parameters"
        verdict = Verdict.inserted(start, reason, made_for="comparison of ranks", bytes=tensor_bytes(value))
        return PassResult(True, {"inserted": 1}, (verdict,))


def _device(program: Program) -> torch.device:
    values = (node.meta["val"] for node in program.placeholders)
    return next((value.device for value in values if isinstance(value, Tensor)), torch.device("cpu"))
