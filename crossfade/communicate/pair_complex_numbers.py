"""Complex numbers sent as pairs of real ones, for backends that know none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from crossfade.graph import collectives
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.program import Program
from crossfade.graph.splice import Replacements, splice


@dataclass(frozen=True)
class PairComplexNumbers(Pass):
    """Gather and reduce-scatter complex numbers as pairs of real ones: neither gloo nor NCCL does it otherwise.

    All-reduces stay as they are: backends view sums of complex numbers in that way themselves.

    Before:
        x: c64[4] = input("x")
        s: c64[8] = c10d.all_gather_into_tensor(x, 2, "dp")
        w: c64[8] = c10d.wait_tensor(s)
        return output("y", w)

    After:
        x: c64[4] = input("x")
        view_as_real: f32[4, 2] = aten.view_as_real(x)
        all_gather_into_tensor: f32[8, 2] = c10d.all_gather_into_tensor(view_as_real, 2, "dp")
        wait_tensor: f32[8, 2] = c10d.wait_tensor(all_gather_into_tensor)
        view_as_complex: c64[8] = aten.view_as_complex(wait_tensor)
        return output("y", view_as_complex)
    """

    name = "pair-complex-numbers"
    numerics = Numerics.BITWISE

    def run(self, program: Program) -> PassResult:
        """Replace each gather and each reduce-scatter of complex numbers."""
        replaced, verdicts = Replacements(program), list[Verdict]()
        for collective in collectives.find(program.graph):
            if collective.kind not in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER) or not collective.dtype.is_complex:
                continue
            reason, outcome = self._reason_against(collective), Outcome.LEFT
            if reason is None:
                reason, outcome = "sent as pairs of real numbers", Outcome.REPLACED
            verdicts.append(Verdict.of(collective.node, outcome, reason, bytes=collective.bytes))
            if outcome is Outcome.REPLACED:
                self._replace(program, collective, replaced)
        replaced.finish()
        return PassResult.of(verdicts, Outcome.REPLACED, done="paired")

    def _reason_against(self, collective: Collective) -> str | None:
        if not collective.plain:
            return "only the plain spellings are replaced"
        if collective.kind is Kind.REDUCE_SCATTER and collective.reduce_op not in ("sum", "avg"):
            return "its reduction is no sum"
        return None

    def _replace(self, program: Program, collective: Collective, replaced: Replacements) -> None:
        communicate = _communicating(collective)
        source = replaced.new.get(collective.inputs[0], collective.inputs[0])  # another of these may have made it

        def in_pairs(value: Tensor) -> Tensor:
            return torch.view_as_complex(collectives.wait(communicate(torch.view_as_real(value.resolve_conj()))))

        done = splice(program, in_pairs, source, before=collective.node, like=collective.node)
        for wait in collective.waits:
            replaced.replace(wait, done)
        replaced.drop(collective.node)


def _communicating(collective: Collective) -> Callable[[Tensor], Tensor]:
    """What a collective does, as a function of what it is given."""
    ranks, group, reduce_op = collective.group_size or 1, collective.group, collective.reduce_op or ""
    if collective.kind is Kind.ALL_GATHER:
        return lambda value: collectives.all_gather(value, ranks, group)
    return lambda value: collectives.reduce_scatter(value, reduce_op, ranks, group)
