"""Values computed again for the backward instead of being kept from the forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from crossfade.cost.estimate import estimate
from crossfade.cost.machine import Machine
from crossfade.cost.presets import preset
from crossfade.errors import RewriteError
from crossfade.graph.metadata import COMPUTED_AGAIN
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict, from_context
from crossfade.graph.program import Program
from crossfade.schedule.kept_values import Choice, KeptValues

_AGAIN = "computed again for its late uses, not kept"


@dataclass(frozen=True)
class RecomputeValues(Pass):
    """Compute the values that `again` names again for their late uses, right before the first of these.

    Each is named with its first late use, as `value@use`, or without, if only others need it that are computed again.
    What they are computed from is kept, or computed again as well if it is named too. Numbers that were drawn stay as
    they are, and so does what is written or reduced; a gather may run again. Here `again` is `("exp@mul",)`.

    Not run by default: a step with a budget (`compile_step(memory=...)`) runs it with what is chosen for that.

    Also known as: activation checkpointing, rematerialization (`torch.utils.checkpoint`, XLA's `HloRematerialization`).

    Before:
        x: f32[4] = input("x")
        exp: f32[4] = aten.exp(x)
        neg: f32[4] = aten.neg(exp)
        sum_1: f32[] = aten.sum(neg)
        expand: f32[4] = aten.expand(sum_1, [4])
        mul: f32[4] = aten.mul.Tensor(expand, exp)
        return loss("loss", sum_1), gradient("x", mul)

    After:
        x: f32[4] = input("x")
        exp: f32[4] = aten.exp(x)
        neg: f32[4] = aten.neg(exp)
        sum_1: f32[] = aten.sum(neg)
        expand: f32[4] = aten.expand(sum_1, [4])
        exp_1: f32[4] = aten.exp(x)
        mul: f32[4] = aten.mul.Tensor(expand, exp_1)
        return loss("loss", sum_1), gradient("x", mul)
    """

    name = "recompute-values"
    numerics = Numerics.BITWISE

    again: tuple[str, ...] = ()
    machine: Machine | None = from_context()
    measured: Mapping[str, float] | None = from_context()

    def run(self, program: Program) -> PassResult:
        """Copy what is to run again, and give the late uses the copies."""
        machine = self.machine if self.machine is not None else preset("loopback-gloo")
        divided = {value: use for value, _, use in (entry.partition("@") for entry in self.again)}
        known = {node.name for node in program.graph.nodes}
        if unknown := [name for name in (*divided, *filter(None, divided.values())) if name not in known]:
            raise RewriteError(
                f"no node {unknown[0]!r} to compute again, or to compute a value again for",
                expected="names of this program",
                remedy="choose again: compile with memory=",
            )
        values = KeptValues(program, estimate(program, machine, dict(self.measured or {})), divided=divided)
        choice = values.choose(values.cells_named(divided))
        copies = run_again(values, choice)
        verdicts = []
        for cell in sorted(choice.cells):
            made = [index for index in values.makers(cell) if values.nodes[index] in copies]
            milliseconds = 1e3 * sum(values.seconds[index] for index in made)
            node = values.nodes[values.in_cell[cell][0]]
            detail = f"{milliseconds:.3f} ms"
            verdicts.append(Verdict.of(node, Outcome.INSERTED, _AGAIN, detail=detail, bytes=values.size[cell]))
        counts = {"values": len(choice.cells), "operators": len(copies)}
        return PassResult(bool(copies), counts, tuple(verdicts), RecomputeValues(self.again))


def run_again(values: KeptValues, choice: Choice) -> dict[fx.Node, fx.Node]:
    """Write a choice into the program that the values are of; the copy of each node that runs again."""
    nodes, graph = values.nodes, values.program.graph
    copies: dict[fx.Node, fx.Node] = {}
    at = {index: place for place, index in choice.copies}

    def source_for(reader: int, place: int, source: fx.Node) -> fx.Node:
        if source not in copies:
            return source
        position = values.position[source]
        late = values.is_read_late(place, position, choice) or values.is_element(reader, position)
        return copies[source] if late else source

    for place, index in choice.copies:
        node = nodes[index]
        with graph.inserting_before(nodes[place]):
            copy = graph.node_copy(node, lambda source, i=index, p=place: source_for(i, p, source))  # type: ignore[misc]
        copy.meta = {**node.meta, COMPUTED_AGAIN: node.name}
        copies[node] = copy
    for index in sorted(at):
        node = nodes[index]
        for user in list(node.users):
            reader = values.position.get(user)
            if reader is not None and values.is_read_late(reader, index, choice):
                user.replace_input_with(node, copies[node])
    return copies
