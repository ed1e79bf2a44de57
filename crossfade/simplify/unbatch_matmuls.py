"""Batches of one matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph.passes import Numerics
from crossfade.graph.private import statically_equal
from crossfade.graph.rewrite import Match, Rule
from crossfade.graph.rule_pass import RulePass

_aten = torch.ops.aten

_SEVERAL = "it multiplies several matrices"


@dataclass(frozen=True)
class UnbatchMatmuls(RulePass):
    """Make a batched product of one pair of matrices a plain one, which more kernels, fusions and other passes know.

    Also known as: Inductor's `bmm_to_mm`; part of XLA's algebraic simplifier (degenerate dims of dots).

    Before:
        x: f32[1, 4, 2] = input("x")
        w: f32[1, 2, 3] = input("w")
        bmm: f32[1, 4, 3] = aten.bmm(x, w)
        return output("y", bmm)

    After:
        x: f32[1, 4, 2] = input("x")
        w: f32[1, 2, 3] = input("w")
        squeeze: f32[4, 2] = aten.squeeze.dim(x, 0)
        squeeze_1: f32[2, 3] = aten.squeeze.dim(w, 0)
        mm: f32[4, 3] = aten.mm(squeeze, squeeze_1)
        unsqueeze: f32[1, 4, 3] = aten.unsqueeze(mm, 0)
        return output("y", unsqueeze)
    """

    name = "unbatch-matmuls"
    numerics = Numerics.REASSOCIATES

    def rules(self) -> Sequence[Rule]:
        """Products, and products that are added to something."""
        return (
            Rule("bmm", "aten.bmm(x, w)", _mm, _reason_against),
            Rule("baddbmm", "aten.baddbmm(bias, x, w, beta=beta, alpha=alpha)", _addmm, _reason_against_sum),
        )


def _reason_against(match: Match) -> str | None:
    one = any(statically_equal(match[name].meta["val"].shape[0], 1) for name in ("x", "w"))
    return None if one else _SEVERAL


def _reason_against_sum(match: Match) -> str | None:
    bias: fx.Node = match["bias"]
    if bias.meta["val"].dtype != match.root.meta["val"].dtype:
        return "what is added has another dtype than the product"
    return _reason_against(match)


def _matrix(value: Tensor) -> Tensor:
    return _aten.squeeze.dim(value, 0)


def _mm(match: Match) -> Any:
    return match.splice(
        lambda x, w: _aten.unsqueeze.default(_aten.mm.default(_matrix(x), _matrix(w)), 0), match["x"], match["w"]
    )


def _addmm(match: Match) -> Any:
    scales = {name: match[name] for name in ("beta", "alpha") if match[name] != 1}

    def product(bias: Tensor, x: Tensor, w: Tensor) -> Tensor:
        added = _matrix(bias) if bias.dim() == 3 else bias
        return _aten.unsqueeze.default(_aten.addmm.default(added, _matrix(x), _matrix(w), **scales), 0)

    return match.splice(product, match["bias"], match["x"], match["w"])
