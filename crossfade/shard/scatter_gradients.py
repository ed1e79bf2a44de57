"""Gradients reduced to the rank that needs them: each rank gets the averaged rows that it updates."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, fx

from crossfade.graph import collectives
from crossfade.graph.passes import Numerics, Pass, PassResult, Verdict
from crossfade.graph.program import Output, OutputKind, Program, rows_per_rank, tensor_bytes
from crossfade.graph.splice import after, splice
from crossfade.shard.own_rows import own_rows, padded


@dataclass(frozen=True)
class ScatterGradients(Pass):
    """Reduce-scatter each gradient by rows, where it is ready; average the loss, and gradients of single numbers.

    Rows that do not divide are padded with zeros. `whole` names the parameters of which every rank holds the whole, or
    is True if that is all of them: of these the program also returns the rows that this rank updates, for the optimizer
    to work on. `copies` is the group of the ranks that hold the same rows, over which these are averaged next, if there
    are such; `everyone` is the group over which single numbers are averaged.

    Also known as: the gradient reduce-scatter of ZeRO-2 and FSDP; with `copies`, of HSDP; Megatron's distributed
    optimizer.

    Before:
        x: f32[3] = input("x")
        neg: f32[3] = aten.neg(x)
        return gradient("x", neg)

    After:
        x: f32[3] = input("x")
        neg: f32[3] = aten.neg(x)
        constant_pad_nd: f32[4] = aten.constant_pad_nd(neg, [0, 1])
        reduce_scatter_tensor: f32[2] = c10d.reduce_scatter_tensor(constant_pad_nd, "avg", 2, "dp")
        wait_tensor: f32[2] = c10d.wait_tensor(reduce_scatter_tensor)
        return gradient("x", wait_tensor)
    """

    name = "scatter-gradients"
    numerics = Numerics.REASSOCIATES
    provides = frozenset({"data-parallel"})

    group: str = "dp"
    ranks: int = 2
    reduce_op: str = "avg"
    whole: bool | tuple[str, ...] = False
    copies: str = ""
    everyone: str = "dp"

    def run(self, program: Program) -> PassResult:
        """Replace each gradient and loss among the program's results."""
        named = frozenset(() if isinstance(self.whole, bool) else self.whole)
        verdicts: list[Verdict] = []
        results: list[tuple[Output, fx.Node]] = []
        for out, value in program.named_results():
            if out.kind is OutputKind.GRADIENT and value.meta["val"].dim():
                results.append((out, self._scattered(program, out.name, value, verdicts)))
                if self.whole is True or out.name in named:
                    results.append((Output(OutputKind.SHARD, out.name), self._own_rows(program, out.name)))
            elif out.kind in (OutputKind.GRADIENT, OutputKind.LOSS):
                reason = "averages a single number, where it is ready"
                results.append((out, self._averaged(program, out.name, value, self.everyone, reason, verdicts)))
            else:
                results.append((out, value))
        program.set_results([value for _, value in results], tuple(out for out, _ in results))
        return PassResult(bool(verdicts), {"inserted": len(verdicts)}, tuple(verdicts))

    def _scattered(self, program: Program, name: str, value: fx.Node, verdicts: list[Verdict]) -> fx.Node:
        def scatter(gradient: Tensor) -> Tensor:
            whole = padded(gradient, self.ranks)
            return collectives.wait(collectives.reduce_scatter(whole, self.reduce_op, self.ranks, self.group))

        done = splice(program, scatter, value, before=after(program, value), like=value)
        self._account(name, done, value, "reduces a gradient to the rows that each rank updates", verdicts)
        if not self.copies:
            return done
        reason = "averages rows over the ranks that hold the same"
        return self._averaged(program, name, done, self.copies, reason, verdicts)

    def _averaged(
        self, program: Program, name: str, value: fx.Node, group: str, reason: str, verdicts: list[Verdict]
    ) -> fx.Node:
        def average(tensor: Tensor) -> Tensor:
            return collectives.wait(collectives.all_reduce(tensor, self.reduce_op, group))

        done = splice(program, average, value, before=after(program, value), like=value)
        return self._account(name, done, value, reason, verdicts)

    def _account(self, name: str, done: fx.Node, value: fx.Node, reason: str, verdicts: list[Verdict]) -> fx.Node:
        start = collectives.started_by(done)
        assert start is not None
        verdicts.append(Verdict.inserted(start, reason, made_for=name, bytes=tensor_bytes(value.meta["val"])))
        return done

    def _own_rows(self, program: Program, name: str) -> fx.Node:
        """This rank's rows of a parameter that it holds whole; taken at the end, where the optimizer needs them."""
        parameter, end = program.input_nodes()[name], program.output_node
        rows = parameter.meta["val"].shape[0]
        whole = splice(program, lambda value: padded(value, self.ranks), parameter, before=end, like=parameter)
        return own_rows(program, whole, rows_per_rank(rows, self.ranks), 0, before=end, axis=self.group)
