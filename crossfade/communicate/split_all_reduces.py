"""All-reduces as reduce-scatters and all-gathers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from crossfade.graph import collectives
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.order import Order
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.program import Program
from crossfade.graph.splice import Replacements, splice

_NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class SplitAllReduces(Pass):
    """Reduce-scatter what is all-reduced along the `groups` named, and gather the sums: the same bytes on a link.

    By default only what is `narrow`, of 16 bits: a rank that adds up whole parts (`lower-reduce-scatters`) adds them in
    float32 and rounds once, where an all-reduce rounds at every rank. Sizes that do not divide by the ranks are padded.
    The parts are gathered after the next collective of the group has started, so that the link has something to do
    meanwhile; `overlap-communication` finds better places.

    Also known as: XLA's all-reduce-decomposer.

    Before:
        x: bf16[4] = input("x")
        s: bf16[4] = c10d.all_reduce(x, "avg", "dp")
        e: bf16[4] = aten.exp(x)
        w: bf16[4] = c10d.wait_tensor(s)
        return output("y", w), output("e", e)

    After:
        x: bf16[4] = input("x")
        reduce_scatter_tensor: bf16[2] = c10d.reduce_scatter_tensor(x, "avg", 2, "dp")
        e: bf16[4] = aten.exp(x)
        wait_tensor: bf16[2] = c10d.wait_tensor(reduce_scatter_tensor)
        all_gather_into_tensor: bf16[4] = c10d.all_gather_into_tensor(wait_tensor, 2, "dp")
        wait_tensor_1: bf16[4] = c10d.wait_tensor(all_gather_into_tensor)
        return output("y", wait_tensor_1), output("e", e)
    """

    name = "split-all-reduces"
    numerics = Numerics.REASSOCIATES

    groups: tuple[str, ...] = ("dp",)
    narrow: bool = True

    def run(self, program: Program) -> PassResult:
        """Split each all-reduce that nothing speaks against."""
        order = Order(program.graph)
        found = [each for each in collectives.find(program.graph) if each.kind is Kind.ALL_REDUCE]
        against = {each.node: self._reason_against(program, each) for each in found}
        places = places_to_gather(order, [each for each in found if against[each.node] is None])
        replaced, verdicts = Replacements(program), []
        for each in found:
            outcome, reason = Outcome.LEFT, against[each.node]
            if reason is None:
                outcome, reason = Outcome.REPLACED, "reduce-scattered, and gathered again"
                _split(program, each, places[each.node], replaced)
            verdicts.append(Verdict.of(each.node, outcome, reason, bytes=each.bytes))
        replaced.finish()
        return PassResult.of(verdicts, Outcome.REPLACED, done="split", left="left")

    def _reason_against(self, program: Program, reduction: Collective) -> str | None:
        value: Tensor = reduction.node.meta["val"]
        if reduction.group not in self.groups:
            return "its group is not among those to split"
        if not reduction.plain:
            return "only the plain all-reduce is split"
        if self.narrow and value.dtype not in _NARROW:
            return "it is not of 16 bits"
        if not program.groups.get(reduction.group):
            return "the size of its group is not known"
        return "its size is not known before it runs" if isinstance(value.numel(), torch.SymInt) else None


def places_to_gather(order: Order, split: list[Collective]) -> dict[fx.Node, fx.Node]:
    """Before which node each one's parts are gathered: after the next start of its group, if that comes before its
    first wait, else there."""
    going = {node for each in split for node in (each.node, *each.waits)}
    started: dict[str, fx.Node] = {}
    places: dict[fx.Node, fx.Node] = {}
    below: fx.Node | None = None
    for node in reversed(order.nodes):
        group = collectives.group_of(node)
        if node in going and group is not None:
            wait = min(collectives.view(node).waits)  # type: ignore[union-attr]
            at = started.get(group, wait)
            places[node] = at if order.position[at] < order.position[wait] else wait
        if group is not None:
            started[group] = below if below is not None else node
        if node not in going:
            below = node
    return places


def _split(program: Program, whole: Collective, middle: fx.Node, replaced: Replacements) -> None:
    ranks, group, value = program.groups[whole.group], whole.group, whole.node.meta["val"]
    shape, numel = value.shape, value.numel()
    padding = -numel % ranks

    def scatter(given: Tensor) -> Tensor:
        flat = given if given.dim() == 1 else given.reshape(numel)
        padded = torch.nn.functional.pad(flat, [0, padding]) if padding else flat
        return collectives.reduce_scatter(padded, str(whole.reduce_op), ranks, group)

    def gather(started: Tensor) -> Tensor:
        return collectives.all_gather(collectives.wait(started), ranks, group)

    def finish(started: Tensor) -> Tensor:
        gathered = collectives.wait(started)
        flat = gathered[:numel] if padding else gathered
        return flat if len(shape) == 1 else flat.view(shape)

    scattered = splice(program, scatter, whole.inputs[0], before=whole.node, like=whole.node)
    started = splice(program, gather, scattered, before=middle, like=whole.node)
    result = splice(program, finish, started, before=min(whole.waits), like=whole.node)
    for wait in whole.waits:
        replaced.replace(wait, result)
    replaced.drop(whole.node)
