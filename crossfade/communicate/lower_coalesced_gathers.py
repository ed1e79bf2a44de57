"""Coalesced all-gathers for backends that cannot be trusted with them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from crossfade.graph import collectives
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.program import Program
from crossfade.graph.splice import splice


@dataclass(frozen=True)
class LowerCoalescedGathers(Pass):
    """Take a coalesced all-gather apart into plain ones, started together, for the groups named (gloo).

    Gloo's coalesced all-gather corrupts memory now and then: its processes abort within some thousand small calls
    (seen on torch 2.13; it has been doubted since pytorch/pytorch#65231).

    Before:
        a: f32[2] = input("a")
        b: f32[3] = input("b")
        both: (f32[4], f32[6]) = c10d.all_gather_into_tensor_coalesced([a, b], 2, "dp")
        first: f32[4] = both[0]
        second: f32[6] = both[1]
        w: f32[4] = c10d.wait_tensor(first)
        v: f32[6] = c10d.wait_tensor(second)
        return output("a", w), output("b", v)

    After:
        a: f32[2] = input("a")
        b: f32[3] = input("b")
        all_gather_into_tensor: f32[4] = c10d.all_gather_into_tensor(a, 2, "dp")
        all_gather_into_tensor_1: f32[6] = c10d.all_gather_into_tensor(b, 2, "dp")
        w: f32[4] = c10d.wait_tensor(all_gather_into_tensor)
        v: f32[6] = c10d.wait_tensor(all_gather_into_tensor_1)
        return output("a", w), output("b", v)
    """

    name = "lower-coalesced-gathers"
    numerics = Numerics.BITWISE

    groups: tuple[str, ...] = ("dp",)

    def run(self, program: Program) -> PassResult:
        """Lower each coalesced all-gather of the groups named."""
        verdicts = []
        for one in collectives.find(program.graph):
            if one.kind is not Kind.ALL_GATHER or not one.coalesced:
                continue
            if one.group not in self.groups:
                reason = "its group's backend takes lists"
                verdicts.append(Verdict.of(one.node, Outcome.LEFT, reason, bytes=one.bytes))
                continue
            reason, detail = "its group's backend is not safe with lists", f"{len(one.inputs)} plain ones"
            verdicts.append(Verdict.of(one.node, Outcome.REPLACED, reason, detail=detail, bytes=one.bytes))
            _take_apart(program, one)
        lowered = sum(verdict.outcome is Outcome.REPLACED for verdict in verdicts)
        return PassResult(bool(lowered), {"lowered": lowered, "left": len(verdicts) - lowered}, tuple(verdicts))


def _take_apart(program: Program, one: Collective) -> None:
    ranks = one.group_size
    assert ranks is not None  # every all-gather says it

    def start(*values: Tensor) -> list[Tensor]:
        return [collectives.all_gather(value, ranks, one.group) for value in values]

    started = splice(program, start, *one.inputs, before=one.node, like=one.node)
    for element in one.results:
        element.replace_all_uses_with(started[element.args[1]])  # type: ignore[index]
        program.graph.erase_node(element)
    program.graph.erase_node(one.node)
