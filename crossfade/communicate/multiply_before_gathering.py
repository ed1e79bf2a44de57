"""Products of a gathered value with itself: each rank multiplies its own part, and the products are added up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.cost.machine import Machine
from crossfade.cost.machine_parts import bytes_sent
from crossfade.graph import collectives
from crossfade.graph.collectives import Kind
from crossfade.graph.gathers import Gather, find_gathers
from crossfade.graph.layouts import Unreadable
from crossfade.graph.matmul_forms import form_of
from crossfade.graph.operators import REORDERING, permutation_of
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict, from_context
from crossfade.graph.program import Program, tensor_bytes
from crossfade.graph.splice import Replacements, splice

_aten = torch.ops.aten


@dataclass(frozen=True)
class MultiplyBeforeGathering(Pass):
    """Where rows are gathered only to form X'X, form each rank's own x'x and all-reduce these; XX' of columns likewise.

    A rank does its share of the arithmetic, and where X is longer than wide by half, less travels. The `machine` says
    how long things travel; without one, their bytes count. Muon and Shampoo do such products of gradients and momenta.
    Batches of matrices, any spelling of the product, and what is added to it are understood; a product over a dim that
    is not gathered needs X whole.

    Before:
        x: f32[64, 8] = input("x")
        g: f32[128, 8] = c10d.all_gather_into_tensor(x, 2, "dp")
        w: f32[128, 8] = c10d.wait_tensor(g)
        t: f32[8, 128] = aten.t(w)
        mm: f32[8, 8] = aten.mm(t, w)
        return output("y", mm)

    After:
        x: f32[64, 8] = input("x")
        permute: f32[8, 64] = aten.permute(x, [1, 0])
        mm_1: f32[8, 8] = aten.mm(permute, x)
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
                    replaced.replace(product.node, _multiplied(program, gather, product))
            outcome = Outcome.LEFT if reason else Outcome.REPLACED
            why = reason or "parts are multiplied where they are, and their products added up"
            verdicts.append(Verdict.of(start, outcome, why, bytes=size))
            if reason is None:
                _drop(gather, replaced)
        replaced.finish()
        return PassResult.of(verdicts, Outcome.REPLACED, done="replaced", left="left")

    def _reason_against(self, gather: Gather, products: list[SelfProduct]) -> str | None:
        value: Tensor = gather.part.meta["val"]
        if gather.trim is not None or gather.also:
            return "it is cut after it is gathered"
        if not value.is_floating_point():
            return "it is no float"
        turned = _turned(gather)
        users = {user for value in turned for user in value.users if user not in turned}
        if users - {product.node for product in products}:
            return "something else needs it whole"
        if not all(isinstance(size, int) for size in value.shape):
            return "its sizes are not known before it runs"
        summed = sum(self._travel(gather, Kind.ALL_REDUCE, tensor_bytes(each.node.meta["val"])) for each in products)
        whole = self._travel(gather, Kind.ALL_GATHER, tensor_bytes(gather.result.meta["val"]))
        return "its products would travel longer" if summed > whole else None

    def _travel(self, gather: Gather, kind: Kind, size: int) -> float:
        group, ranks = gather.collective.group, gather.ranks
        return (
            bytes_sent(kind, size, ranks)
            if self.machine is None
            else self.machine.collective_seconds(kind, size, ranks, group)
        )


@dataclass(frozen=True)
class SelfProduct:
    """A product of a gathered value with itself over the dim that is gathered: the orders of dims of its operands."""

    node: fx.Node
    left: tuple[int, ...]
    right: tuple[int, ...]
    bias: fx.Node | None


def _turned(gather: Gather) -> dict[fx.Node, tuple[int, ...]]:
    """The gathered value and what only reorders its dims, with the order of dims of each."""
    found = {gather.result: tuple(range(gather.result.meta["val"].dim()))}
    waiting = [gather.result]
    while waiting:
        value = waiting.pop()
        for user in value.users:
            if user.target in REORDERING:
                found[user] = tuple(found[value][dim] for dim in permutation_of(user))
                waiting.append(user)
    return found


def _self_products(gather: Gather) -> list[SelfProduct]:
    """The products of the gathered value with itself that add up along the dim that is gathered, in order."""
    turned = _turned(gather)
    products = [
        _self_product(gather, turned, user) for user in sorted({user for value in turned for user in value.users})
    ]
    return [product for product in products if product is not None]


def _self_product(gather: Gather, turned: Mapping[fx.Node, tuple[int, ...]], user: fx.Node) -> SelfProduct | None:
    try:
        form = form_of(user)
    except Unreadable:
        return None
    if form is None or form.scales is not None or not {form.left, form.right} <= turned.keys():
        return None
    left, right = turned[form.left], turned[form.right]
    summed = left[form.left_dims.index("k")], right[form.right_dims.index("k")]
    return SelfProduct(user, left, right, form.bias) if summed == (gather.dim, gather.dim) else None


_WITHOUT_BIAS: dict[Any, Any] = {
    _aten.addmm.default: _aten.mm.default,
    _aten.baddbmm.default: _aten.bmm.default,
}


def _multiplied(program: Program, gather: Gather, product: SelfProduct) -> fx.Node:
    group, target = gather.collective.group, product.node.target
    multiply = _WITHOUT_BIAS.get(target, target)

    def multiplied(part: Tensor, bias: Tensor | None) -> Tensor:
        own = multiply(_ordered(part, product.left), _ordered(part, product.right))
        done = collectives.wait(collectives.all_reduce(own, "sum", group))
        return done if bias is None else done + bias

    return splice(program, multiplied, gather.part, product.bias, before=product.node, like=product.node)


def _ordered(part: Tensor, order: tuple[int, ...]) -> Tensor:
    return part if order == tuple(range(part.dim())) else part.permute(order)


def _drop(gather: Gather, replaced: Replacements) -> None:
    """Let the gather go, with what only it served."""
    going = {*_turned(gather), *gather.nodes, *gather.collective.waits, gather.collective.node}
    for node in sorted(going, reverse=True):
        replaced.drop(node)
