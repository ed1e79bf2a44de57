"""Reduce-scatters of products: the factors travel, and each rank multiplies all ranks' for the rows that it keeps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.communicate.pieces import finish_at_its_wait, ranks_of
from crossfade.cost.machine import Machine
from crossfade.cost.machine_parts import bytes_sent
from crossfade.graph import collectives
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.order import Order
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict, from_context
from crossfade.graph.program import MADE_FOR, Program, tensor_bytes
from crossfade.graph.splice import Replacements, splice

_WORTH = 0.9
"""The factors must travel in this share of the time, or less: they are two, and a reduce-scatter may share a bucket."""
_DONE = "its factors travel instead, and are multiplied where the product is kept"


@dataclass(frozen=True)
class ExchangeFactors(Pass):
    """Where products are reduce-scattered, send their factors, if these arrive sooner.

    A weight's gradient is a product over a rank's tokens; the sum of all ranks' is one over everyone's. So each rank
    gathers the second factor whole, gets from every other the columns of the first that its own rows need, and
    multiplies once: as much arithmetic, and less to send where a rank has fewer tokens than the weight is wide. Nothing
    is added up afterwards, and the product can be left for later, when something else travels.

    The `machine` says how long things travel; without one, their bytes count. Only products of one `group`: where
    layers are split over another, the second factor would be a weight. `chosen` names the reduce-scatters to replace
    instead, each with the number of pieces that its first factor is exchanged in: what a plan file says.

    Also known as: sufficient factor broadcasting (Poseidon).

    Before:
        g: f32[2, 64] = input("g")
        x: f32[2, 32] = input("x")
        t: f32[64, 2] = aten.t(g)
        w: f32[64, 32] = aten.mm(t, x)
        start: f32[32, 32] = c10d.reduce_scatter_tensor(w, "sum", 2, "dp")
        done: f32[32, 32] = c10d.wait_tensor(start)
        return gradient("w", done)

    After:
        g: f32[2, 64] = input("g")
        x: f32[2, 32] = input("x")
        t: f32[64, 2] = aten.t(g)
        all_gather_into_tensor: f32[4, 32] = c10d.all_gather_into_tensor(x, 2, "dp")
        wait_tensor: f32[4, 32] = c10d.wait_tensor(all_gather_into_tensor)
        view: f32[2, 32, 2] = aten.view(t, [2, 32, 2])
        transpose: f32[2, 2, 32] = aten.transpose.int(view, 1, 2)
        clone: f32[2, 2, 32] = aten.clone(transpose, memory_format=contiguous_format)
        _unsafe_view: f32[4, 32] = aten._unsafe_view(clone, [4, 32])
        all_to_all_single: f32[4, 32] = c10d.all_to_all_single(_unsafe_view, [2, 2], [2, 2], "dp")
        wait_tensor_1: f32[4, 32] = c10d.wait_tensor(all_to_all_single)
        t_1: f32[32, 4] = aten.t(wait_tensor_1)
        mm: f32[32, 32] = aten.mm(t_1, wait_tensor)
        return gradient("w", mm)
    """

    name = "exchange-factors"
    numerics = Numerics.REASSOCIATES

    machine: Machine | None = from_context()
    group: str = "dp"
    chosen: tuple[tuple[str, int], ...] | None = None

    def run(self, program: Program) -> PassResult:
        """Replace each reduce-scatter of a product whose factors travel faster."""
        given = None if self.chosen is None else dict(self.chosen)
        work = _Exchange(program, self.machine, Order(program.graph).rewritten(), given)
        for scatter in collectives.find(program.graph):
            scatters = scatter.kind is Kind.REDUCE_SCATTER and scatter.group == self.group
            if scatters and collectives.reduced_value(scatter).target is torch.ops.aten.mm.default:
                work.consider(scatter)
        work.replaced.finish()
        decided = replace(self, chosen=tuple(work.pieces.items()))
        return replace(PassResult.of(work.verdicts, Outcome.REPLACED, done="replaced"), decided=decided)


def factors_pay(
    machine: Machine | None, left: Tensor, right: Tensor, ranks: int, group: str, *, right_is_there: bool = False
) -> bool:
    """Whether the factors of a product arrive sooner than its reduce-scattered rows, by seconds or else by bytes."""
    if ranks < 2:
        return False
    product = left.shape[0] * right.shape[1] * left.element_size()
    whole = _travel(machine, Kind.REDUCE_SCATTER, product, ranks, group)
    return travel_of_factors(machine, left, right, ranks, group, right_is_there=right_is_there) <= _WORTH * whole


def travel_of_factors(
    machine: Machine | None, left: Tensor, right: Tensor, ranks: int, group: str, *, right_is_there: bool = False
) -> float:
    """How long the factors of a product travel; the second one not, if it is there already."""
    exchanged = _travel(machine, Kind.ALL_TO_ALL, tensor_bytes(left), ranks, group)
    gathered = _travel(machine, Kind.ALL_GATHER, ranks * tensor_bytes(right), ranks, group)
    return exchanged + (0.0 if right_is_there else gathered)


def _travel(machine: Machine | None, kind: Kind, size: int, ranks: int, group: str) -> float:
    return bytes_sent(kind, size, ranks) if machine is None else machine.collective_seconds(kind, size, ranks, group)


@dataclass
class _Exchange:
    """One run over a program: what was gathered so far is shared by the products that need it."""

    program: Program
    machine: Machine | None
    written: Collection[fx.Node]
    chosen: Mapping[str, int] | None
    verdicts: list[Verdict] = field(default_factory=list)
    pieces: dict[str, int] = field(default_factory=dict)
    """What was replaced, and in how many pieces its first factor is exchanged."""
    _gathered: dict[tuple[Any, str | None], fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.replaced = Replacements(self.program)

    def consider(self, scatter: Collective) -> None:
        """Replace a reduce-scatter, or say why not."""
        reason = self._reason_against(scatter)
        outcome = Outcome.LEFT if reason else Outcome.REPLACED
        self.verdicts.append(Verdict.of(scatter.node, outcome, reason or _DONE, bytes=scatter.bytes))
        if outcome is Outcome.REPLACED:
            self._replace(scatter)

    def _reason_against(self, scatter: Collective) -> str | None:
        product = scatter.inputs[0]
        value: Tensor = product.meta["val"]
        if not scatter.plain:
            return "only the plain reduce-scatter is replaced"
        if product is not collectives.reduced_value(scatter):
            return "its rows do not divide by the ranks"
        if scatter.exact_op != scatter.reduce_op:
            return "it is sent in 8 bits"
        if scatter.reduce_op not in ("sum", "avg") or not value.is_floating_point():
            return "its reduction is no sum of floats"
        if scatter.reduce_op == "avg" and value.dtype is torch.float16:
            return "a factor divided by the ranks could become too small for half precision"
        if len(product.users) > 1:
            return "something else uses the product"
        if any(factor in self.written for factor in product.args):
            return "one of its factors is written to in place"
        left, right = (_value(factor) for factor in product.args)
        if not all(isinstance(size, int) for size in (*left.shape, *right.shape)):
            return "its sizes are not known before it runs"
        if self.chosen is not None:
            return None if scatter.node.name in self.chosen else "it is not among those chosen"
        shared = self._key(scatter) in self._gathered
        if not factors_pay(self.machine, left, right, ranks_of(scatter), scatter.group, right_is_there=shared):
            return "its factors would not travel in less time"
        return None

    def _key(self, scatter: Collective) -> tuple[Any, str | None]:
        return scatter.inputs[0].args[1], scatter.reduce_op

    def _replace(self, scatter: Collective) -> None:
        product, ranks = scatter.inputs[0], ranks_of(scatter)
        rows, inner = _value(product.args[0]).shape
        count = self.pieces[scatter.node.name] = self._pieces(scatter)

        def exchange(left: Tensor) -> list[Tensor]:
            columns = left.view(ranks, rows // ranks, inner).transpose(1, 2)
            pieces = columns.chunk(count, 1) if count > 1 else [columns]
            return [collectives.all_to_all(piece.reshape(-1, rows // ranks), ranks, scatter.group) for piece in pieces]

        def multiply(right: Tensor, *exchanged: Tensor) -> Tensor:
            pieces = [collectives.wait(piece) for piece in exchanged]
            if len(pieces) > 1:  # each has some tokens of every rank
                pieces = [torch.cat([piece.view(ranks, -1, rows // ranks) for piece in pieces], 1).flatten(0, 1)]
            return pieces[0].t() @ right

        gathered = self._gather(scatter)
        sent = splice(self.program, exchange, product.args[0], before=scatter.node, like=scatter.node)
        for start in sent:
            self._account(scatter, start, "exchanges what each rank needs of a product's first factor")
        finish_at_its_wait(self.program, scatter, [gathered, *sent], multiply, self.replaced)

    def _pieces(self, scatter: Collective) -> int:
        """Into how many pieces to cut an exchange, which backends may do slowly in one."""
        if self.chosen is not None:
            return self.chosen[scatter.node.name]
        piece = self.machine and self.machine.piece(Kind.ALL_TO_ALL, ranks_of(scatter), scatter.group)
        return max(1, round(tensor_bytes(_value(scatter.inputs[0].args[0])) / piece)) if piece else 1

    def _gather(self, scatter: Collective) -> fx.Node:
        """All ranks' second factor; an average is taken of it, the smaller of the two as a rule."""
        ranks = ranks_of(scatter)

        def gather(right: Tensor) -> Tensor:
            share = collectives.divided(right, ranks) if scatter.reduce_op == "avg" else right
            return collectives.wait(collectives.all_gather(share.contiguous(), ranks, scatter.group))

        if (key := self._key(scatter)) not in self._gathered:
            self._gathered[key] = splice(self.program, gather, key[0], before=scatter.node, like=scatter.node)
            start = collectives.started_by(self._gathered[key])
            assert start is not None
            self._account(scatter, start, "gathers a product's second factor")
        return self._gathered[key]

    def _account(self, scatter: Collective, start: fx.Node, reason: str) -> None:
        made_for, size = scatter.node.meta.get(MADE_FOR), tensor_bytes(start.meta["val"])
        self.verdicts.append(Verdict.inserted(start, reason, made_for=made_for, bytes=size))


def _value(node: Any) -> Tensor:
    return node.meta["val"]
