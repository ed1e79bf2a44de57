"""Gradients of embeddings as rows: those of the rows that were looked up travel, instead of the whole table's."""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph import collectives
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.operators import RENAMING, arguments
from crossfade.graph.order import Order
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.program import MADE_FOR, Program, tensor_bytes
from crossfade.graph.splice import Replacements, insert_call, splice
from crossfade.shard.own_rows import rank_input

_aten = torch.ops.aten
_MB = 2**20


@dataclass(frozen=True)
class GatherRowGradients(Pass):
    """Gather the gradients of the rows that each rank looked up, where the gradient of the whole table is reduced.

    Every rank then adds them up itself: into its part of the table (for a reduce-scatter), or the whole (for an
    all-reduce). That is done where a table has `least_mb`, and all ranks together looked up less than half of it.

    Also known as: DeepSpeed's `sparse_gradients`; the all-gather that torch's DDP does for `nn.Embedding(sparse=True)`.

    Before:
        g: f32[8, 264] = input("g")
        i: i64[8] = input("i")
        dense: f32[999, 264] = aten.embedding_dense_backward(g, i, 999, -1, False)
        start: f32[999, 264] = c10d.all_reduce(dense, "avg", "dp")
        done: f32[999, 264] = c10d.wait_tensor(start)
        return gradient("w", done)

    After:
        g: f32[8, 264] = input("g")
        i: i64[8] = input("i")
        view: f32[8, 264] = aten.view(g, [-1, 264])
        mul: f32[8, 264] = aten.mul.Tensor(view, 0.5)
        all_gather_into_tensor: f32[16, 264] = c10d.all_gather_into_tensor(mul, 2, "dp")
        wait_tensor: f32[16, 264] = c10d.wait_tensor(all_gather_into_tensor)
        view_1: i64[8] = aten.view(i, [-1])
        all_gather_into_tensor_1: i64[16] = c10d.all_gather_into_tensor(view_1, 2, "dp")
        wait_tensor_1: i64[16] = c10d.wait_tensor(all_gather_into_tensor_1)
        embedding_dense_backward: f32[999, 264] = aten.embedding_dense_backward(wait_tensor, wait_tensor_1, 999, -1, False)
        return gradient("w", embedding_dense_backward)
    """  # noqa: E501

    name = "gather-row-gradients"
    numerics = Numerics.REASSOCIATES

    group: str = "dp"
    ranks: int = 2
    least_mb: float = 1.0

    def run(self, program: Program) -> PassResult:
        """Replace each reduction of an embedding's gradient."""
        replaced, verdicts, written = Replacements(program), list[Verdict](), Order(program.graph).rewritten()
        for collective in collectives.find(program.graph):
            reduces = collective.kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER) and collective.group == self.group
            dense = _dense_gradient(collective) if reduces else None
            if dense is None:
                continue
            reason, outcome = self._reason_against(collective, dense, written), Outcome.LEFT
            if reason is None:
                reason, outcome = "gradients of the rows looked up are gathered instead", Outcome.REPLACED
            verdicts.append(Verdict.of(collective.node, outcome, reason, bytes=collective.bytes))
            if outcome is Outcome.REPLACED:
                verdicts += self._gather(program, collective, dense, replaced)
        replaced.finish()
        return PassResult.of(verdicts, Outcome.REPLACED, done="replaced")

    def _reason_against(self, collective: Collective, dense: fx.Node, written: Collection[fx.Node]) -> str | None:
        given, table = arguments(dense), dense.meta["val"]
        asked: Tensor = given["indices"].meta["val"]
        if not collective.plain:
            return "only the plain reductions are replaced"
        if len(dense.users) > 1 or len(collective.inputs[0].users) > 1:
            return "something else uses the gradient of the whole table"
        if any(source in written for source in dense.all_input_nodes):
            return "the rows or their gradients are written to in place"
        if collective.reduce_op not in ("sum", "avg"):
            return "its reduction is no sum"
        if given["scale_grad_by_freq"]:
            return "it is scaled by how often a rank looked a row up"
        if not all(isinstance(size, int) for size in (*table.shape, *asked.shape)):
            return "its sizes are not known before it runs"
        if tensor_bytes(table) < self.least_mb * _MB:
            return "the table is small"
        row = tensor_bytes(table) // table.shape[0]
        if 2 * self.ranks * (row * asked.numel() + tensor_bytes(asked)) > tensor_bytes(table):
            return "all ranks together looked up half of the table or more"
        return None

    def _gather(
        self, program: Program, collective: Collective, dense: fx.Node, replaced: Replacements
    ) -> list[Verdict]:
        given: dict[str, Any] = arguments(dense)
        width = dense.meta["val"].shape[-1]

        def of_all_ranks(part: Tensor) -> Tensor:
            return collectives.wait(collectives.all_gather(part.contiguous(), self.ranks, self.group))

        def gradients_of_all(gradient: Tensor) -> Tensor:
            rows = gradient.reshape(-1, width)
            return of_all_ranks(collectives.divided(rows, self.ranks) if collective.reduce_op == "avg" else rows)

        def asked_by_all(rows: Tensor) -> Tensor:
            return of_all_ranks(rows.reshape(-1))

        start = collective.node
        gradients = splice(program, gradients_of_all, given["grad_output"], before=start, like=start)
        asked = splice(program, asked_by_all, given["indices"], before=start, like=start)
        added = self._added_to_table if collective.kind is Kind.ALL_REDUCE else self._added_to_part
        done = added(program, collective, given, gradients, asked)
        for wait in collective.waits:
            replaced.replace(wait, done)
        replaced.drop(start)
        inserted = (gradients, "gathers gradients of rows"), (asked, "says which rows these are of")
        return [_inserted(wait, reason, collective) for wait, reason in inserted]

    def _added_to_table(
        self, program: Program, collective: Collective, given: dict[str, Any], gradients: fx.Node, asked: fx.Node
    ) -> fx.Node:
        def added(gradients: Tensor, asked: Tensor) -> Tensor:
            rows, padding = given["num_weights"], given["padding_idx"]
            return _aten.embedding_dense_backward(gradients, asked, rows, padding, False)

        return splice(program, added, gradients, asked, before=collective.node, like=collective.node)

    def _added_to_part(
        self, program: Program, collective: Collective, given: dict[str, Any], gradients: fx.Node, asked: fx.Node
    ) -> fx.Node:
        rows, padding = collective.node.meta["val"].shape[0], given["padding_idx"]

        def added(gradients: Tensor, asked: Tensor, local: Tensor) -> Tensor:
            counts = (local >= 0) & (local < rows)
            if padding >= 0:
                counts = counts & (asked != padding)
            index = local.masked_fill(~counts, rows)  # what does not count goes to one more row, which is cut off
            return _aten.embedding_dense_backward(gradients, index, rows + 1, -1, False)[:rows]

        def call(target: Any, *inputs: Any) -> fx.Node:
            return insert_call(program, target, *inputs, before=collective.node, like=collective.node)

        local = call(_aten.sub.Tensor, asked, call(operator.mul, rank_input(program, self.group), rows))
        return splice(program, added, gradients, asked, local, before=collective.node, like=collective.node)


def _inserted(wait: fx.Node, reason: str, instead_of: Collective) -> Verdict:
    start = collectives.started_by(wait)
    assert start is not None
    made_for, size = instead_of.node.meta.get(MADE_FOR), tensor_bytes(wait.meta["val"])
    return Verdict.inserted(start, reason, made_for=made_for, bytes=size)


def _dense_gradient(collective: Collective) -> fx.Node | None:
    """The gradient of an embedding that a collective reduces, if it does."""
    found = collectives.reduced_value(collective)
    while found.target in RENAMING and len(found.users) == 1:  # autograd leaves it, where a plan splits parameters
        found = found.all_input_nodes[0]
    return found if found.target is _aten.embedding_dense_backward.default else None
