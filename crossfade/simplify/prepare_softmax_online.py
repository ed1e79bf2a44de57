"""Softmax's maximum and its sum of exponentials, found in one reading."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from crossfade.graph.operators import arguments
from crossfade.graph.passes import Numerics
from crossfade.graph.rewrite import WRITTEN, Match, Rule
from crossfade.graph.rule_pass import RulePass
from crossfade.graph.splice import insert_call
from crossfade.simplify.softmax_statistics import softmax_statistics

_aten = torch.ops.aten
_OTHER_DEVICE = "its device has no kernel that finds both in one reading"
_OTHER_DTYPE = "it is not computed in single or double precision"
_NOT_SOFTMAX = "no sum of exponentials below this maximum is taken along the same dim"


@dataclass(frozen=True)
class PrepareSoftmaxOnline(RulePass):
    """Find the maximum and the sum of exponentials of a softmax or log-softmax, written out in parts, in one reading.

    The sum is corrected whenever the maximum rises, so that it needs no finished maximum. That saves reading the
    exponentials again and costs a second exponential for each element: it pays on `devices` whose kernels are bound by
    memory and have one for it, CUDA with Triton. `_softmax` itself, when not in parts, is one kernel already.

    Not in a default pipeline: it needs CUDA with Triton, and softmax written out in parts (not `_softmax`). Add it with
    `simplification().after("simplify-nodes", PrepareSoftmaxOnline())`.

    Also known as: online softmax; Inductor's `prepare_softmax_pattern`.

    Before:
        x: f32[8, 512] = input("x")
        c: f32[8, 512] = aten._to_copy(x, device=device("cuda"))
        amax: f32[8, 1] = aten.amax(c, [1], True)
        sub: f32[8, 512] = aten.sub.Tensor(c, amax)
        exp: f32[8, 512] = aten.exp(sub)
        sum_1: f32[8, 1] = aten.sum.dim_IntList(exp, [1], True)
        div: f32[8, 512] = aten.div.Tensor(exp, sum_1)
        return output("y", div)

    After:
        x: f32[8, 512] = input("x")
        c: f32[8, 512] = aten._to_copy(x, device=device("cuda"))
        softmax_statistics: (f32[8, 1], f32[8, 1]) = crossfade.softmax_statistics(c, 1)
        getitem: f32[8, 1] = softmax_statistics[0]
        getitem_1: f32[8, 1] = softmax_statistics[1]
        sub: f32[8, 512] = aten.sub.Tensor(c, getitem)
        exp: f32[8, 512] = aten.exp(sub)
        div: f32[8, 512] = aten.div.Tensor(exp, getitem_1)
        return output("y", div)
    """

    name = "prepare-softmax-online"
    numerics = Numerics.REASSOCIATES

    devices: tuple[str, ...] = ("cuda",)

    def rules(self) -> Sequence[Rule]:
        """First the maximum, where both are found; then the sum of exponentials below it, which is there already."""

        def against_maximum(match: Match) -> str | None:
            if (reason := self._reason_against(match["x"])) is not None:
                return reason
            below = _below(match.root)
            if below is None:
                return _NOT_SOFTMAX
            return WRITTEN if match.is_written(match["x"], match.root, *below) else None

        def against_sum(match: Match) -> str | None:
            if _one_dim(match.root) != match["dim"]:
                return _NOT_SOFTMAX
            maximum, sub, exp = _above(match.root)
            return WRITTEN if match.is_written(match["x"], maximum, sub, exp) else None

        found = "crossfade.softmax_statistics(x, dim)[0]"
        exponentials_below = f"aten.sum.dim_IntList(aten.exp(aten.sub.Tensor(x, {found})), _, True)"
        return (
            Rule("maximum", "aten.amax(x, _, True)", _find_both, against_maximum),
            Rule("sum", exponentials_below, _take_sum, against_sum),
        )

    def _reason_against(self, x: fx.Node) -> str | None:
        if x.meta["val"].device.type not in self.devices:
            return _OTHER_DEVICE
        return None if x.meta["val"].dtype in (torch.float32, torch.float64) else _OTHER_DTYPE


def _one_dim(reduction: fx.Node) -> int | None:
    """The one dim that a reduction takes; None if it takes several or all."""
    given, rank = arguments(reduction), arguments(reduction)["self"].meta["val"].dim()
    dims = given["dim"]
    return dims[0] % rank if dims is not None and len(dims) == 1 and rank else None


def _below(maximum: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """The difference from a maximum, its exponential, and the sum of that along the same dim; None if not all are."""
    x, dim = arguments(maximum)["self"], _one_dim(maximum)
    if dim is None:
        return None
    for sub in _users(maximum, _aten.sub.Tensor):
        given = arguments(sub)
        if given["self"] is not x or given["other"] is not maximum or given["alpha"] != 1:
            continue
        for exp in _users(sub, _aten.exp.default):
            for total in _users(exp, _aten.sum.dim_IntList):
                kept = arguments(total)["keepdim"] and arguments(total)["dtype"] is None
                if kept and _one_dim(total) == dim:
                    return sub, exp, total
    return None


def _users(node: fx.Node, target: Any) -> list[fx.Node]:
    return [user for user in node.users if user.target is target]


def _above(total: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    """The maximum found with the sum, the difference from it, and its exponential, up from the sum that is to go."""
    exp = arguments(total)["self"]
    sub = arguments(exp)["self"]
    return arguments(sub)["other"], sub, exp


def _find_both(match: Match) -> fx.Node:
    return match.splice(softmax_statistics, match["x"], _one_dim(match.root))[0]


def _take_sum(match: Match) -> fx.Node:
    """The second result of what found both, which has no node of its own if nothing used it for a while."""
    found: Any = _above(match.root)[0].args[0]
    known = next((user for user in found.users if user.target is operator.getitem and user.args[1] == 1), None)
    return known or insert_call(match.program, operator.getitem, found, 1, before=match.root, like=match.root)
