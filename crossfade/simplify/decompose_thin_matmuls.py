"""Matrix products that only move memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.cost.machine import Machine
from crossfade.graph.passes import Numerics, Pass, PassResult, from_context
from crossfade.graph.private import statically_equal
from crossfade.graph.program import Program
from crossfade.graph.rewrite import Match, Rule
from crossfade.simplify.products import (
    CallCost,
    CostComparison,
    are_pointwise,
    bytes_of,
    product_of,
    run_priced_rules,
)

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class DecomposeThinMatmuls(Pass):
    """Write a product as multiplications and a sum where a compiler then makes it one loop with what follows it.

    Only where all its users are pointwise, so that the result is neither written nor read: that pays if the product is
    bound by memory, and plain arithmetic (at the machine's float32 rate) still keeps up with it. Without a `machine`
    that is known of outer products alone, which sum nothing. Run op by op, the pieces are passes of their own over more
    memory than the product takes: without `compiled` nothing is done. Half precision is multiplied and summed in
    float32, as the product does.

    Also known as: Inductor's `decompose_mem_bound_mm`; dot strength reduction in XLA's algebraic simplifier.

    Before:
        a: f32[64, 1] = input("a")
        b: f32[1, 32] = input("b")
        mm: f32[64, 32] = aten.mm(a, b)
        relu: f32[64, 32] = aten.relu(mm)
        return output("y", relu)

    After:
        a: f32[64, 1] = input("a")
        b: f32[1, 32] = input("b")
        mul: f32[64, 32] = aten.mul.Tensor(a, b)
        relu: f32[64, 32] = aten.relu(mul)
        return output("y", relu)
    """

    name = "decompose-thin-matmuls"
    numerics = Numerics.REASSOCIATES

    machine: Machine | None = from_context()
    compiled: bool = True

    def run(self, program: Program) -> PassResult:
        """Try every product once."""
        prices: dict[fx.Node, tuple[str, str]] = {}
        rule = Rule("product", "aten.mm(a, b)", _multiplied, lambda match: self._against(match, prices))
        return run_priced_rules(program, [rule], prices)

    def _against(self, match: Match, prices: dict[fx.Node, tuple[str, str]]) -> str | None:
        if not self.compiled:
            return "run op by op, its pieces would move more memory"
        if not match.root.meta["val"].dtype.is_floating_point:
            return "its dtype is not a floating-point one"
        if not are_pointwise(match.root.users):
            return "not all its users are pointwise"
        compared = _compared(match)
        prices[match.root] = ("one loop with its users moves less memory", compared.on(self.machine))
        if self.machine is None and not _is_outer(match):
            return "it is no outer product, and no machine says what else pays"
        (loop,) = compared.after
        if self.machine is not None and not loop.is_bound_by_memory(self.machine):
            return "plain arithmetic would take longer than its memory on this machine"
        return compared.reason_against(self.machine)


def _is_outer(match: Match) -> bool:
    return statically_equal(match["a"].meta["val"].shape[1], 1)


def _compared(match: Match) -> CostComparison:
    """The product and one pointwise pass over its result, against one loop that keeps the result in registers."""
    product, result = product_of(match["a"], match["b"]), bytes_of(match.root)
    loop = CallCost(product.flops, product.bytes, torch.float32)
    return CostComparison((product, CallCost(0, 2 * result)), (loop,))


def _multiplied(match: Match) -> Any:
    return match.splice(_outer if _is_outer(match) else _summed, match["a"], match["b"])


def _outer(a: Tensor, b: Tensor) -> Tensor:
    return a * b


def _summed(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype not in _HALF:
        return (a.unsqueeze(2) * b.unsqueeze(0)).sum(1)
    return (a.float().unsqueeze(2) * b.float().unsqueeze(0)).sum(1).to(a.dtype)
