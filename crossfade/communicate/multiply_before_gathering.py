"""Products of a gathered value with itself: each rank multiplies its own part, and the products are added up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.cost.machine import Machine, bytes_sent
from crossfade.graph import collectives
from crossfade.graph.collectives import Kind
from crossfade.graph.gathers import Gather, find_gathers
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict, from_context
from crossfade.graph.program import Program, tensor_bytes
from crossfade.graph.splice import Replacements, splice

_aten = torch.ops.aten
_TRANSPOSES = (_aten.t.default, _aten.permute.default, _aten.transpose.int)


@dataclass(frozen=True)
class MultiplyBeforeGathering(Pass):
    """Where rows are gathered only to form X'X, form each rank's own x'x and all-reduce these; XX' of columns likewise.

    A rank does its share of the arithmetic, and where X is longer than wide by half, less travels. The `machine` says
    how long things travel; without one, their bytes count. Muon and Shampoo do such products of gradients and momenta.

    Before:
        x: f32[64, 8] = input("x")
        g: f32[128, 8] = c10d.all_gather_into_tensor(x, 2, "dp")
        w: f32[128, 8] = c10d.wait_tensor(g)
        t: f32[8, 128] = aten.t(w)
        mm: f32[8, 8] = aten.mm(t, w)
        return output("y", mm)

    After:
        x: f32[64, 8] = input("x")
        t_1: f32[8, 64] = aten.t(x)
        mm_1: f32[8, 8] = aten.mm(t_1, x)
        all_reduce: f32[8, 8] = c10d.all_reduce(mm_1, "sum", "dp")
        wait_tensor: f32[8, 8] = c10d.wait_tensor(all_reduce)
        return output("y", wait_tensor)
    """

    name = "multiply-before-gathering"
    numerics = Numerics.REASSOCIATES

    machine: Machine | None = from_context()

    def run(self, program: Program) -> PassResult:
        """Replace each gather that only serves products with itself."""
        verdicts: list[Verdict] = []
        replaced = Replacements(program)
        for gather in find_gathers(program.graph)[0]:
            products = _self_products(gather)
            if not products:
                continue
            start, size = gather.collective.node, gather.collective.bytes
            reason = self._reason_against(gather, products)
            if reason is None:
                for product in products:
                    replaced.replace(product, _multiplied(program, gather, product))
            outcome = Outcome.LEFT if reason else Outcome.REPLACED
            why = reason or "parts are multiplied where they are, and their products added up"
            verdicts.append(Verdict.of(start, outcome, why, bytes=size))
            if reason is None:
                _drop(gather, replaced)
        replaced.finish()
        return PassResult.of(verdicts, Outcome.REPLACED, done="replaced", left="left")

    def _reason_against(self, gather: Gather, products: list[fx.Node]) -> str | None:
        value: Tensor = gather.part.meta["val"]
        if gather.trim is not None or gather.also:
            return "it is cut after it is gathered"
        if not value.is_floating_point():
            return "it is no float"
        users = {user for end in _both_ways(gather) for user in end.users if user.target not in _TRANSPOSES}
        if users - set(products):
            return "something else needs it whole"
        if not all(isinstance(size, int) for size in value.shape):
            return "its sizes are not known before it runs"
        summed = sum(self._travel(gather, Kind.ALL_REDUCE, tensor_bytes(each.meta["val"])) for each in products)
        whole = self._travel(gather, Kind.ALL_GATHER, tensor_bytes(gather.result.meta["val"]))
        return "its products would travel longer" if summed > whole else None

    def _travel(self, gather: Gather, kind: Kind, size: int) -> float:
        group, ranks = gather.collective.group, gather.ranks
        return (
            bytes_sent(kind, size, ranks)
            if self.machine is None
            else self.machine.collective_seconds(kind, size, ranks, group)
        )


def _both_ways(gather: Gather) -> list[fx.Node]:
    """The gathered matrix, and its transposes."""
    return [gather.result, *(user for user in gather.result.users if user.target in _TRANSPOSES)]


def _self_products(gather: Gather) -> list[fx.Node]:
    """The products of the gathered matrix with itself along the dim that is gathered."""
    result = gather.result
    if result.meta["val"].dim() != 2 or gather.dim not in (0, 1):
        return []
    found: list[fx.Node] = []
    for turned in (user for user in result.users if user.target in _TRANSPOSES and _turns(user)):
        pair = (turned, result) if gather.dim == 0 else (result, turned)
        found += [user for user in turned.users if user.target is _aten.mm.default and tuple(user.args) == pair]
    return found


def _turns(node: fx.Node) -> bool:
    """Whether a node really exchanges the two dims."""
    if node.target is _aten.t.default:
        return True
    if node.target is _aten.permute.default:
        order: Any = node.args[1]
        return [dim % 2 for dim in order] == [1, 0]
    dims: Any = node.args[1:3]
    return bool(dims[0] % 2 != dims[1] % 2)


def _multiplied(program: Program, gather: Gather, product: fx.Node) -> fx.Node:
    group = gather.collective.group

    def multiply(part: Tensor) -> Tensor:
        own = part.t() @ part if gather.dim == 0 else part @ part.t()
        return collectives.wait(collectives.all_reduce(own, "sum", group))

    return splice(program, multiply, gather.part, before=product, like=product)


def _drop(gather: Gather, replaced: Replacements) -> None:
    """Let the gather go, with what only it served."""
    going = {*_both_ways(gather), *gather.nodes, *gather.collective.waits, gather.collective.node}
    for node in sorted(going, reverse=True):
        replaced.drop(node)
