"""The gradients of experts that are spread over ranks: each rank has those of its own, of the rows of all of them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, fx

from crossfade.graph import collectives
from crossfade.graph.passes import Numerics, Pass, PassResult, Verdict
from crossfade.graph.program import OutputKind, Program, tensor_bytes
from crossfade.graph.splice import after, splice


@dataclass(frozen=True)
class AverageExpertGradients(Pass):
    """Make the gradients of experts that of the whole batch: they are sums over the ranks of an axis already.

    Rows of `ranks` ranks have come to an expert, each with a part of the batch: for a loss that is a mean over parts,
    its gradient is divided by their number. Where other ranks have the same experts and other rows, it is then averaged
    over their group, `copies`. For a loss that sums over samples, `reduce_op` is `"sum"` and nothing is divided.

    Also known as: the expert data-parallel group of Megatron and DeepSpeed.

    Before:
        w: f32[2, 4] = parameter("w")
        neg: f32[2, 4] = aten.neg(w)
        return gradient("w", neg)

    After:
        w: f32[2, 4] = parameter("w")
        neg: f32[2, 4] = aten.neg(w)
        mul: f32[2, 4] = aten.mul.Tensor(neg, 0.5)
        all_reduce: f32[2, 4] = c10d.all_reduce(mul, "avg", "dp")
        wait_tensor: f32[2, 4] = c10d.wait_tensor(all_reduce)
        return gradient("w", wait_tensor)
    """

    name = "average-expert-gradients"
    numerics = Numerics.REASSOCIATES

    names: tuple[str, ...] = ("w",)
    ranks: int = 2
    copies: str = "dp"
    reduce_op: str = "avg"

    def run(self, program: Program) -> PassResult:
        """Scale each expert's gradient among the results, and average it where others have the same expert."""
        names, verdicts, results = frozenset(self.names), [], []
        scaled = 0
        for out, value in program.named_results():
            if out.kind is OutputKind.GRADIENT and out.name in names:
                made = splice(program, self._averaged, value, before=after(program, value), like=value)
                scaled += made is not value
                verdicts += self._verdicts(made, out.name)
                value = made
            results.append(value)
        program.set_results(results)
        return PassResult(bool(scaled), {"scaled": scaled, "inserted": len(verdicts)}, tuple(verdicts))

    def _averaged(self, gradient: Tensor) -> Tensor:
        if self.reduce_op == "avg":
            gradient = collectives.divided(gradient, self.ranks)
        return (
            collectives.wait(collectives.all_reduce(gradient, self.reduce_op, self.copies)) if self.copies else gradient
        )

    def _verdicts(self, made: fx.Node, name: str) -> list[Verdict]:
        start = collectives.started_by(made) if collectives.is_wait(made) else None
        if start is None:
            return []
        how = "averages" if self.reduce_op == "avg" else "sums"
        reason = f"{how} an expert's gradient over the ranks that have it too, where it is ready"
        return [Verdict.inserted(start, reason, made_for=name, bytes=tensor_bytes(made.meta["val"]))]
