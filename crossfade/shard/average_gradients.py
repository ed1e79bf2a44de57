"""Data parallelism with replicated parameters: gradients and the loss averaged over the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, fx

from crossfade.graph import collectives
from crossfade.graph.passes import Numerics, Pass, PassResult
from crossfade.graph.program import Output, OutputKind, Program
from crossfade.shard.exchange_results import exchange_results


@dataclass(frozen=True)
class AverageGradients(Pass):
    """Insert one averaged all-reduce per gradient, where the gradient is ready, and one for the loss.

    Each rank computes the mean loss of its own samples; the average over the ranks is that of the whole batch. For a
    loss that sums over samples, `reduce_op` is `"sum"`. With `gradients=False` only the loss is averaged: gradients
    stay those of each rank, to be exchanged with later ones. The gradients of parameters in `apart` are left alone.

    Also known as: the gradient all-reduce of torch's DDP; `jax.lax.pmean` of gradients; Megatron's
    `finalize_model_grads`.

    Before:
        x: f32[4] = input("x")
        neg: f32[4] = aten.neg(x)
        return gradient("x", neg)

    After:
        x: f32[4] = input("x")
        neg: f32[4] = aten.neg(x)
        all_reduce: f32[4] = c10d.all_reduce(neg, "avg", "dp")
        wait_tensor: f32[4] = c10d.wait_tensor(all_reduce)
        return gradient("x", wait_tensor)
    """

    name = "average-gradients"
    numerics = Numerics.REASSOCIATES
    provides = frozenset({"data-parallel"})

    group: str = "dp"
    reduce_op: str = "avg"
    gradients: bool = True
    apart: tuple[str, ...] = ()

    def run(self, program: Program) -> PassResult:
        """Replace each gradient and loss among the program's results by its average."""
        verdicts = exchange_results(program, self._average, self._reason)
        return PassResult(bool(verdicts), {"inserted": len(verdicts)}, verdicts)

    def _reason(self, out: Output, value: fx.Node) -> str | None:
        exchanged = {OutputKind.LOSS: "the loss"} | ({OutputKind.GRADIENT: "a gradient"} if self.gradients else {})
        what = exchanged.get(out.kind) if out.name not in self.apart else None
        return f"{'averages' if self.reduce_op == 'avg' else 'sums'} {what}, where it is ready" if what else None

    def _average(self, value: Tensor) -> Tensor:
        return collectives.wait(collectives.all_reduce(value, self.reduce_op, self.group))
