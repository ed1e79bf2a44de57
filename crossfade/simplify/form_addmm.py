"""Biases added by the matrix product itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph.operators import arguments
from crossfade.graph.passes import Numerics
from crossfade.graph.private import statically_equal
from crossfade.graph.rewrite import Match, Rule
from crossfade.graph.rule_pass import RulePass
from crossfade.simplify.products import are_pointwise, is_only_read_by


@dataclass(frozen=True)
class FormAddmm(RulePass):
    """Make a product and what is added to it one `addmm`: a call and a pass over the result less.

    A compiler fuses a sum with pointwise ops that follow it; with `compiled`, sums that only such ops read are left
    alone. So set, this pass and `unfuse-bias`, which takes apart exactly those, never undo one another; otherwise a
    pipeline has one of the two. In half precision the product is no longer rounded before the sum.

    Not in a default pipeline: it reassociates, and matters only where a bias is added to an `mm` by hand: `nn.Linear`
    is an `addmm` already. Add it with `simplification().after("simplify-nodes", FormAddmm())`.

    Also known as: Inductor's `addmm` pattern; XLA's gemm rewriter (bias epilogue).

    Before:
        x: f32[4, 2] = input("x")
        w: f32[2, 3] = input("w")
        bias: f32[3] = input("bias")
        mm: f32[4, 3] = aten.mm(x, w)
        add: f32[4, 3] = aten.add.Tensor(mm, bias)
        return output("y", add)

    After:
        x: f32[4, 2] = input("x")
        w: f32[2, 3] = input("w")
        bias: f32[3] = input("bias")
        addmm: f32[4, 3] = aten.addmm(bias, x, w)
        return output("y", addmm)
    """

    name = "form-addmm"
    numerics = Numerics.REASSOCIATES

    compiled: bool = False

    def rules(self) -> Sequence[Rule]:
        """The product may stand on either side; `alpha` scales the right one."""
        return (
            Rule(
                "product-plus-bias",
                "aten.add.Tensor(aten.mm(x, w), bias, alpha=alpha)",
                lambda match: _addmm(match, beta=match["alpha"]),
                lambda match: self._against(match, arguments(match.root)["self"]),
            ),
            Rule(
                "bias-plus-product",
                "aten.add.Tensor(bias, aten.mm(x, w), alpha=alpha)",
                lambda match: _addmm(match, alpha=match["alpha"]),
                lambda match: self._against(match, arguments(match.root)["other"]),
            ),
        )

    def _against(self, match: Match, product: fx.Node) -> str | None:
        if not is_only_read_by(product, match.root):
            return "the product has other users"
        if self.compiled and are_pointwise(match.root.users):
            return "its users are pointwise, and the compiler fuses them with the sum"
        if not isinstance(match["bias"], fx.Node) or not isinstance(match["bias"].meta.get("val"), Tensor):
            return "what is added is a number"
        if isinstance(match["alpha"], bool) or not isinstance(match["alpha"], (int, float)) or not match["alpha"]:
            return "its alpha is zero or not known"
        return _against_bias(match["bias"].meta["val"], product.meta["val"])


def _against_bias(bias: Tensor, product: Tensor) -> str | None:
    """Why a product cannot add this: it takes what broadcasts to its own shape."""
    if bias.dtype != product.dtype or bias.device != product.device:
        return "what is added has another dtype or device than the product"
    if bias.dim() > 2:
        return "what is added has more dims than the product"
    pairs = zip(reversed(bias.shape), reversed(product.shape), strict=False)
    if not all(statically_equal(size, whole) or statically_equal(size, 1) for size, whole in pairs):
        return "what is added does not provably broadcast to the product"
    return None


def _addmm(match: Match, **scales: Any) -> Any:
    scales = {name: scale for name, scale in scales.items() if scale != 1}
    return match.splice(lambda bias, x, w: torch.addmm(bias, x, w, **scales), match["bias"], match["x"], match["w"])
