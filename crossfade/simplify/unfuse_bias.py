"""Biases left to the pointwise ops that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from crossfade.graph.effects import aliased_by, may_write
from crossfade.graph.passes import Numerics
from crossfade.graph.rewrite import Match, Rule
from crossfade.graph.rule_pass import RulePass
from crossfade.simplify.products import are_pointwise


@dataclass(frozen=True)
class UnfuseBias(RulePass):
    """Take the bias out of an `addmm` whose users are all pointwise, behind views or not: a compiler adds it in their
    loop for free, and scales it and the product there.

    For programs that a compiler fuses, on the `devices` where it does; run op by op, the sum is one more pass over the
    result. It undoes what `form-addmm` does unless that has `compiled` set. In half precision the product is rounded
    before the sum.

    Not in a default pipeline: it pays only where Inductor compiles the result, not where operators run one by one. Add
    it with `simplification().after("simplify-nodes", UnfuseBias())`.

    Also known as: Inductor's `unfuse_bias_add_to_pointwise`.

    Before:
        x: f32[4, 2] = input("x")
        w: f32[2, 3] = input("w")
        bias: f32[3] = input("bias")
        addmm: f32[4, 3] = aten.addmm(bias, x, w)
        relu: f32[4, 3] = aten.relu(addmm)
        return output("y", relu)

    After:
        x: f32[4, 2] = input("x")
        w: f32[2, 3] = input("w")
        bias: f32[3] = input("bias")
        mm: f32[4, 3] = aten.mm(x, w)
        add: f32[4, 3] = aten.add.Tensor(mm, bias)
        relu: f32[4, 3] = aten.relu(add)
        return output("y", relu)
    """

    name = "unfuse-bias"
    numerics = Numerics.REASSOCIATES

    devices: tuple[str, ...] = ("cpu", "cuda")

    def rules(self) -> Sequence[Rule]:
        """One rule, whatever the scales."""
        return (Rule("bias", "aten.addmm(bias, x, w, beta=beta, alpha=alpha)", _apart, self._against),)

    def _against(self, match: Match) -> str | None:
        if match.root.meta["val"].device.type not in self.devices:
            return "its device is not one on which a compiler fuses"
        if not _read_by_pointwise_ops(match.root):
            return "not all its users are pointwise"
        if not all(isinstance(match[scale], (int, float)) for scale in ("alpha", "beta")):
            return "its scales are known only when it runs"
        return None


def _read_by_pointwise_ops(value: fx.Node) -> bool:
    """Whether all that reads a value, or views of it, works element by element, and something does."""
    views = [user for user in value.users if user.op == "call_function" and aliased_by(user) is value]
    views = [view for view in views if not may_write(view.target) and isinstance(view.meta["val"], Tensor)]
    others = [user for user in value.users if user not in views]
    return (are_pointwise(others) or not others) and bool(value.users) and all(map(_read_by_pointwise_ops, views))


def _apart(match: Match) -> object:
    alpha, beta = match["alpha"], match["beta"]

    def apart(bias: Tensor, x: Tensor, w: Tensor) -> Tensor:
        product = torch.mm(x, w) if alpha == 1 else torch.mm(x, w) * alpha
        if beta == 0:  # not even a NaN in the bias counts then
            return product
        return product + (bias if beta == 1 else bias * beta)

    return match.splice(apart, match["bias"], match["x"], match["w"])
