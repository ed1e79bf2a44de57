"""Parameters that every rank holds whole, updated in parts: the parts are gathered after the update."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, fx

from crossfade.graph import collectives
from crossfade.graph.passes import Numerics, Pass, PassResult, Verdict
from crossfade.graph.program import InputKind, Output, OutputKind, Program, rows_per_rank, tensor_bytes
from crossfade.graph.splice import after, splice
from crossfade.shard.gather_parameters import gathered


@dataclass(frozen=True)
class GatherUpdates(Pass):
    """Gather each parameter's new value from the ranks that updated a part of it; with `only`, of those named there.

    Also known as: the parameter all-gather of ZeRO-1, torch's `ZeroRedundancyOptimizer` and Megatron's distributed
    optimizer; weight-update sharding in XLA.

    Before:
        w: f32[3] = parameter("w")
        g: f32[2] = input("g")
        slice_1: f32[2] = aten.slice.Tensor(w, 0, 0, 2)
        sub: f32[2] = aten.sub.Tensor(slice_1, g)
        return update("w", sub)

    After:
        w: f32[3] = parameter("w")
        g: f32[2] = input("g")
        slice_1: f32[2] = aten.slice.Tensor(w, 0, 0, 2)
        sub: f32[2] = aten.sub.Tensor(slice_1, g)
        all_gather_into_tensor: f32[4] = c10d.all_gather_into_tensor(sub, 2, "dp")
        wait_tensor: f32[4] = c10d.wait_tensor(all_gather_into_tensor)
        slice_2: f32[3] = aten.slice.Tensor(wait_tensor, 0, 0, 3)
        return update("w", slice_2)
    """

    name = "gather-updates"
    numerics = Numerics.BITWISE

    group: str = "dp"
    ranks: int = 2
    only: tuple[str, ...] | None = None

    def run(self, program: Program) -> PassResult:
        """Replace each updated part of a parameter by the whole."""
        asked = frozenset(self.only) if self.only is not None else None
        parameters = {
            item.name: node
            for item, node in program.named_inputs()
            if item.kind is InputKind.PARAMETER and (asked is None or item.name in asked)
        }
        verdicts: list[Verdict] = []
        results = []
        for out, value in program.named_results():
            if self._is_part(out, value, parameters):
                value = self._gathered(program, value, parameters[out.name])
                start = next(node for node in _upwards(value) if collectives.is_collective(node))
                reason, size = "gathers what each rank has updated", tensor_bytes(value.meta["val"])
                verdicts.append(Verdict.inserted(start, reason, made_for=out.name, bytes=size))
            results.append(value)
        program.set_results(results)
        return PassResult(bool(verdicts), {"gathered": len(verdicts)}, tuple(verdicts))

    def _is_part(self, out: Output, value: fx.Node, parameters: dict[str, fx.Node]) -> bool:
        if out.kind is not OutputKind.UPDATE or out.name not in parameters:
            return False
        whole = parameters[out.name].meta["val"]
        return bool(whole.dim()) and value.meta["val"].shape[0] == rows_per_rank(whole.shape[0], self.ranks)

    def _gathered(self, program: Program, part: fx.Node, parameter: fx.Node) -> fx.Node:
        rows = parameter.meta["val"].shape[0]

        def gather(value: Tensor) -> Tensor:
            return gathered(value, rows, self.ranks, self.group)

        return splice(program, gather, part, before=after(program, part), like=part)


def _upwards(node: fx.Node) -> list[fx.Node]:
    """A node and the first inputs above it, up to and with a collective."""
    found = [node]
    while not collectives.is_collective(found[-1]):
        found.append(found[-1].all_input_nodes[0])
    return found
