"""Biases left to the pointwise ops that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from crossfade.graph.passes import Numerics
from crossfade.graph.rewrite import Match, Rule
from crossfade.graph.rule_pass import RulePass
from crossfade.simplify.products import are_pointwise


@dataclass(frozen=True)
class UnfuseBias(RulePass):
    """Take the bias out of an `addmm` whose users are all pointwise: a compiler adds it in their loop for free.

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
        """One rule; the scales of `addmm` are matched to be declined with a reason."""
        pattern = "aten.addmm(bias, x, w, beta=beta, alpha=alpha)"
        return (Rule("bias", pattern, _apart, self._against),)

    def _against(self, match: Match) -> str | None:
        if match.root.meta["val"].device.type not in self.devices:
            return "its device is not one on which a compiler fuses"
        if not are_pointwise(match.root.users):
            return "not all its users are pointwise"
        if not (_is_one(match["beta"]) and _is_one(match["alpha"])):
            return "it scales the bias or the product"
        return None


def _is_one(scale: object) -> bool:
    return isinstance(scale, (int, float)) and scale == 1


def _apart(match: Match) -> object:
    return match.splice(lambda bias, x, w: torch.mm(x, w) + bias, match["bias"], match["x"], match["w"])
