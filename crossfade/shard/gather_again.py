"""Parameters gathered twice, for the forward and for the backward, so that no rank keeps them in between."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from crossfade.graph import collectives
from crossfade.graph.collectives import Kind
from crossfade.graph.effects import memory_of
from crossfade.graph.order import with_ancestors
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.program import InputKind, OutputKind, Program, tensor_bytes

_CONVERSIONS = (
    torch.ops.aten._to_copy.default,
    torch.ops.aten.clone.default,  # into another layout
    torch.ops.prims.convert_element_type.default,
)


@dataclass(frozen=True)
class GatherAgain(Pass):
    """Gather what the backward uses of a parameter again, instead of keeping it from the forward.

    What belongs to the forward is what the loss depends on. Views and conversions of a parameter that the forward made
    and the backward uses are made again too. Only what nothing uses in between can be freed, so the memory of a step is
    that of the parameters in use, at the price of half as much communication again. Where a forward use and a backward
    use are near, as in the last layers, `merge-duplicate-collectives` merges the two gathers.

    Also known as: FSDP2's `fully_shard(..., reshard_after_forward=True)`; ZeRO-3 in DeepSpeed.

    Before:
        w: f32[2, 2] = parameter("w")
        x: f32[4, 4] = input("x")
        start: f32[4, 2] = c10d.all_gather_into_tensor(w, 2, "dp")
        done: f32[4, 2] = c10d.wait_tensor(start)
        mm: f32[4, 2] = aten.mm(x, done)
        sum_1: f32[] = aten.sum(mm)
        expand: f32[4, 2] = aten.expand(sum_1, [4, 2])
        t: f32[2, 4] = aten.t(done)
        mm_1: f32[4, 4] = aten.mm(expand, t)
        return loss("loss", sum_1), output("dx", mm_1)

    After:
        w: f32[2, 2] = parameter("w")
        x: f32[4, 4] = input("x")
        start: f32[4, 2] = c10d.all_gather_into_tensor(w, 2, "dp")
        done: f32[4, 2] = c10d.wait_tensor(start)
        mm: f32[4, 2] = aten.mm(x, done)
        sum_1: f32[] = aten.sum(mm)
        expand: f32[4, 2] = aten.expand(sum_1, [4, 2])
        start_1: f32[4, 2] = c10d.all_gather_into_tensor(w, 2, "dp")
        done_1: f32[4, 2] = c10d.wait_tensor(start_1)
        t: f32[2, 4] = aten.t(done_1)
        mm_1: f32[4, 4] = aten.mm(expand, t)
        return loss("loss", sum_1), output("dx", mm_1)
    """

    name = "gather-again"
    numerics = Numerics.BITWISE
    requires = frozenset({"sharded-parameters"})

    def run(self, program: Program) -> PassResult:
        """Give each parameter's uses in the backward a gather of their own."""
        losses = [value for out, value in program.named_results() if out.kind is OutputKind.LOSS]
        forward = set(with_ancestors(*losses))
        position = {node: index for index, node in enumerate(program.graph.nodes)}
        verdicts = []
        parameters = {node for item, node in program.named_inputs() if item.kind is InputKind.PARAMETER}
        for collective in collectives.find(program.graph):
            if collective.kind is Kind.ALL_GATHER and collective.inputs[0] in parameters:
                verdicts.append(_split(program, collective.node, forward, position))
        return PassResult.of(verdicts, Outcome.INSERTED, done="again")


def _split(program: Program, start: fx.Node, forward: set[fx.Node], position: dict[fx.Node, int]) -> Verdict:
    copied = _made_from(start, forward)
    late = [(user, node) for node in copied for user in node.users if user not in copied and user not in forward]
    early = any(user in forward for node in copied for user in node.users if user not in copied)
    if not (late and early):
        where = "forward" if early else "backward"
        return Verdict.of(start, Outcome.LEFT, f"only the {where} uses it", bytes=tensor_bytes(start.meta["val"]))
    before = min((user for user, _ in late), key=position.__getitem__)
    new: dict[fx.Node, fx.Node] = {}
    with program.graph.inserting_before(before):
        for node in copied:
            new[node] = program.graph.node_copy(node, lambda n: new.get(n, n))
            new[node].meta = dict(node.meta)
    for user, node in late:
        user.replace_input_with(node, new[node])
    for node in reversed(copied):
        for copy in (node, new[node]):
            if not copy.users:
                program.graph.erase_node(copy)
    reason = "gathered again for the backward, not kept from the forward"
    return Verdict.of(new[start], Outcome.INSERTED, reason, bytes=tensor_bytes(start.meta["val"]))


def _made_from(start: fx.Node, forward: set[fx.Node]) -> list[fx.Node]:
    """A gather, its waits, and all views and conversions of what was gathered that the forward makes, in order."""
    found = [start]
    for node in found:
        for user in node.users:
            alone = user in forward and len(user.all_input_nodes) == 1 and user not in found
            if alone and (user.target in _CONVERSIONS or memory_of(user) is memory_of(node)):
                found.append(user)
    return found
