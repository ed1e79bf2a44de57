"""Counts that a mean loss divides by, taken over the whole batch: every rank's, and every micro-batch's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph import collectives
from crossfade.graph.effects import is_random
from crossfade.graph.operators import arguments
from crossfade.graph.order import with_ancestors
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict, from_context
from crossfade.graph.program import OutputKind, Program, tensor_bytes
from crossfade.graph.splice import after, splice
from crossfade.shard.loss_parts import COUNT, MULTIPLIES, NLL_BACKWARD, SCALED, UNPROVED, UNPROVED_REMEDY


@dataclass(frozen=True)
class CountGlobally(Pass):
    """Divide losses by counts of the whole batch, so that parts of it with more or fewer tokens weigh as they should.

    `find_loss_parts` has marked what is counted. A count that follows from the batch alone is taken, and sent, before
    the forward begins. `micro_batches` is how often the program runs in a step. `unproved` says why the losses of parts
    are not known to make up that of the whole batch; the report then says so.

    Also known as: Megatron's `--calculate-per-token-loss`; `num_items_in_batch` and `average_tokens_across_devices` of
    the transformers Trainer.

    Before:
        x: f32[4, 3] = input("x")
        y: i64[4] = input("y")
        nll: (f32[], f32[]) = aten.nll_loss_forward(x, y, None, 1, -100)
        loss: f32[] = nll[0]
        weight: f32[] = nll[1]
        one: f32[] = aten.ones_like(loss)
        back: f32[4, 3] = aten.nll_loss_backward(one, x, y, None, 1, -100, weight)
        return loss("loss", loss), gradient("x", back)

    After:
        x: f32[4, 3] = input("x")
        y: i64[4] = input("y")
        ne: b8[4] = aten.ne.Scalar(y, -100)
        sum_1: i64[] = aten.sum(ne)
        all_reduce: i64[] = c10d.all_reduce(sum_1, "sum", "dp")
        wait_tensor: i64[] = c10d.wait_tensor(all_reduce)
        nll: (f32[], f32[]) = aten.nll_loss_forward(x, y, None, 1, -100)
        loss: f32[] = nll[0]
        mul: i64[] = aten.mul.Tensor(sum_1, 2)
        div: f32[] = aten.div.Tensor(mul, wait_tensor)
        eq: b8[] = aten.eq.Scalar(sum_1, 0)
        mul_1: f32[] = aten.mul.Tensor(loss, div)
        where: f32[] = aten.where.self(eq, div, mul_1)
        weight: f32[] = nll[1]
        div_1: f32[] = aten.div.Tensor(wait_tensor, 2)
        one: f32[] = aten.ones_like(where)
        back: f32[4, 3] = aten.nll_loss_backward(one, x, y, None, 1, -100, div_1)
        return loss("loss", where), gradient("x", back)
    """

    name = "count-globally"
    numerics = Numerics.REASSOCIATES

    group: str = "dp"
    ranks: int = 2
    micro_batches: int = 1
    unproved: str = from_context("")

    def run(self, program: Program) -> PassResult:
        """Take each marked count over the whole batch, and let its users have that."""
        marked = _marked(program)
        verdicts = [self._counted(program, nodes) for nodes in marked.values()]
        scaled = [node for node in program.graph.nodes if SCALED in node.meta]
        for node in scaled:
            self._scale(program, node)
        counts = {"counted": len(verdicts), "scaled": len(scaled)}
        if self.unproved:
            loss = next(value for out, value in program.named_results() if out.kind is OutputKind.LOSS)
            verdicts.append(Verdict.of(loss, Outcome.LEFT, UNPROVED, detail=self.unproved, remedy=UNPROVED_REMEDY))
        return PassResult(bool(marked or scaled), counts, tuple(verdicts))

    @property
    def _parts(self) -> int:
        return self.ranks * self.micro_batches

    def _counted(self, program: Program, nodes: list[fx.Node]) -> Verdict:
        """Replace a count, of which every micro-batch has its own."""
        losses = [node for node in nodes if node.target in NLL_BACKWARD]
        counts = [_own_count(program, node) for node in losses] if losses else nodes
        for count in counts:
            _move_to_the_top(program, count)
        users = [(count, list(count.users)) for count in nodes if not losses]
        total = self._total(program, counts, power=0 if losses else nodes[0].meta[COUNT][1])
        for count, users_of_count in users:
            for user in users_of_count:
                user.replace_input_with(count, total)
        for loss, count in zip(losses, counts, strict=False):
            self._weigh(program, loss, count, total)
        start = collectives.started_by(total)
        reason = "counts over the whole batch what divides the loss"
        if start is None:
            return Verdict.of(total, Outcome.REPLACED, reason)
        return Verdict.inserted(start, reason, made_for="loss", bytes=tensor_bytes(total.meta["val"]))

    def _total(self, program: Program, counts: list[fx.Node], *, power: int) -> fx.Node:
        """The sum of all counts of all ranks, or with the power 1 their mean."""

        def total(*values: Tensor) -> Tensor:
            found = values[0]
            for value in values[1:]:
                found = found + value
            found = found / self._parts if power else found
            return collectives.wait(collectives.all_reduce(found, "sum", self.group)) if self.ranks > 1 else found

        position = {node: place for place, node in enumerate(program.graph.nodes)}
        last = max(counts, key=position.__getitem__)
        return splice(program, total, *counts, before=after(program, last), like=counts[0])

    def _weigh(self, program: Program, loss: fx.Node, count: fx.Node, total: fx.Node) -> None:
        """Let a mean over one part weigh as many samples as it has; a part without any counts for nothing."""

        def weighed(mean: Tensor, own: Tensor, whole: Tensor) -> Tensor:
            weight = own * self._parts / whole
            return torch.where(own == 0, weight, mean * weight).to(mean.dtype)

        def divisor(weight: Tensor, whole: Tensor) -> Tensor:
            return (whole / self._parts).to(weight.dtype)

        for part in list(loss.users):
            users = list(part.users)
            operands = (part, count, total) if part.args[1] == 0 else (part, total)
            function = weighed if part.args[1] == 0 else divisor
            new = splice(program, function, *operands, before=part.next, like=part)
            for user in users:
                user.replace_input_with(part, new)

    def _scale(self, program: Program, node: fx.Node) -> None:
        """Make a factor as many times larger, or a divisor as many times smaller, as there are parts."""
        place = node.meta[SCALED]
        operand: Any = node.args[place]

        def scaled(value: Tensor) -> Tensor:
            return value * self._parts if node.target in MULTIPLIES else value / self._parts

        node.update_arg(place, splice(program, scaled, operand, before=node, like=node))


def _marked(program: Program) -> dict[int, list[fx.Node]]:
    """The nodes marked to be counted, by the number of the count."""
    found: dict[int, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if COUNT in node.meta:
            found.setdefault(node.meta[COUNT][0], []).append(node)
    return found


def _own_count(program: Program, loss: fx.Node) -> fx.Node:
    """What a loss divides by, from its targets alone: how many are not ignored, or the sum of their weights."""
    given = arguments(loss)

    def count(target: Tensor, weight: Tensor | None = None) -> Tensor:
        kept = target != given["ignore_index"]
        return kept.sum() if weight is None else torch.where(kept, weight[torch.where(kept, target, 0)], 0).sum()

    operands = [operand for operand in (given["target"], given["weight"]) if operand is not None]
    return splice(program, count, *operands, before=loss, like=loss)


def _move_to_the_top(program: Program, node: fx.Node) -> None:
    """Compute a value as soon as the program's inputs are there, unless it draws random numbers, in their turn."""
    computed = [source for source in with_ancestors(node) if source.op != "placeholder"]
    if any(map(is_random, computed)):
        return
    top = program.placeholders[-1].next
    for source in computed:
        if source is top:
            top = source.next
        else:
            top.prepend(source)
