"""Sums of two matrix products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from crossfade.cost.machine import Machine
from crossfade.graph.operators import arguments
from crossfade.graph.passes import Numerics, Pass, PassResult, from_context
from crossfade.graph.private import statically_equal
from crossfade.graph.program import Program
from crossfade.graph.rewrite import Match, Rule
from crossfade.simplify.products import (
    CallCost,
    CostComparison,
    bytes_of,
    copy_of,
    is_only_read_by,
    product_of,
    product_of_sizes,
    run_priced_rules,
    sizes_of,
)

_PATTERN = "aten.add.Tensor(aten.mm(a, b), aten.mm(c, d), alpha=alpha)"


@dataclass(frozen=True)
class AddMatmuls(Pass):
    """Let the second product of a sum accumulate onto the first, or make both one product of concatenated matrices.

    Accumulating is one call less, and once it is done in place (`overwrite-dead-values`), one pass less over the
    result. With a `machine`, products whose inner dim is so small that copying their matrices is cheaper than that pass
    are concatenated instead. Sums are taken in another order, and in half precision the first product is the only one
    rounded before the sum, or neither is.

    Also known as: Inductor's `mm_plus_mm`; XLA's gemm rewriter (an addend becomes the gemm's third operand).

    Before:
        a: f32[4, 2] = input("a")
        b: f32[2, 3] = input("b")
        c: f32[4, 5] = input("c")
        d: f32[5, 3] = input("d")
        mm: f32[4, 3] = aten.mm(a, b)
        mm_1: f32[4, 3] = aten.mm(c, d)
        add: f32[4, 3] = aten.add.Tensor(mm, mm_1)
        return output("y", add)

    After:
        a: f32[4, 2] = input("a")
        b: f32[2, 3] = input("b")
        c: f32[4, 5] = input("c")
        d: f32[5, 3] = input("d")
        mm: f32[4, 3] = aten.mm(a, b)
        addmm: f32[4, 3] = aten.addmm(mm, c, d)
        return output("y", addmm)
    """

    name = "add-matmuls"
    numerics = Numerics.REASSOCIATES

    machine: Machine | None = from_context()

    def run(self, program: Program) -> PassResult:
        """Try every sum once; concatenating is tried first, since it is only done where it is the better one."""
        prices: dict[fx.Node, tuple[str, str]] = {}
        accumulate = Rule("accumulate", _PATTERN, _accumulated, lambda match: _against_accumulating(match, prices))
        concatenate = Rule("concatenate", _PATTERN, _concatenated, lambda match: self._against(match, prices))
        return run_priced_rules(program, [concatenate, accumulate] if self.machine else [accumulate], prices)

    def _against(self, match: Match, prices: dict[fx.Node, tuple[str, str]]) -> str | None:
        """Why not to concatenate, on the machine there is."""
        first, second = _products(match.root)
        if (reason := _unlike(match)) is not None:
            return reason
        if not all(is_only_read_by(product, match.root) for product in (first, second)):
            return "a product has other users"
        if match["alpha"] != 1:
            return "its second product is scaled"
        accumulated, joined = _accumulating(match, in_place=True), _concatenating(match)
        compared = CostComparison(accumulated, joined)
        prices[match.root] = ("one product is faster than two on this machine", compared.on(self.machine))
        return compared.reason_against(self.machine)


def _products(root: fx.Node) -> tuple[Any, Any]:
    given = arguments(root)
    return given["self"], given["other"]


def _unlike(match: Match) -> str | None:
    """Why the two products are not summed element by element, as they are."""
    first, other = (product.meta["val"] for product in _products(match.root))
    if first.dtype != other.dtype:
        return "its products are of two dtypes"
    if not statically_equal(first.shape, other.shape):
        return "its products are not provably of one shape"
    if isinstance(match["alpha"], bool) or not isinstance(match["alpha"], (int, float)) or not match["alpha"]:
        return "its alpha is zero or not known"
    return None


def _against_accumulating(match: Match, prices: dict[fx.Node, tuple[str, str]]) -> str | None:
    if (reason := _unlike(match)) is not None:
        return reason
    if (roles := _roles(match)) is None:
        return "both products have other users, or are one"
    apart = (product_of(match["a"], match["b"]), product_of(match["c"], match["d"]))
    plain = (*apart, CallCost(0, 3 * bytes_of(match.root)))
    compared = CostComparison(plain, _accumulating(match, in_place=is_only_read_by(roles[0], match.root)))
    prices[match.root] = ("accumulating needs no sum of its own", str(compared))
    return None


def _roles(match: Match) -> tuple[fx.Node, Any, Any] | None:
    """The product to accumulate onto, and the matrices of the other, which nothing else may read; None if none may."""
    first, second = _products(match.root)
    if is_only_read_by(second, match.root):
        return first, match["c"], match["d"]
    if is_only_read_by(first, match.root) and match["alpha"] == 1:
        return second, match["a"], match["b"]
    return None


def _accumulating(match: Match, *, in_place: bool) -> tuple[CallCost, ...]:
    """The second product reads the first; if that is still needed, a copy of it."""
    first, second = product_of(match["a"], match["b"]), product_of(match["c"], match["d"])
    extra = bytes_of(match.root) * (1 if in_place else 3)
    return first, second._replace(bytes=second.bytes + extra)


def _concatenating(match: Match) -> tuple[CallCost, ...]:
    (rows, inner), (_, columns) = sizes_of(match["a"]), sizes_of(match["b"])
    inner += sizes_of(match["c"])[1]
    whole = product_of_sizes(rows, inner, columns, match.root.meta["val"])
    return copy_of(match["a"], match["c"]), copy_of(match["b"], match["d"]), whole


def _accumulated(match: Match) -> Any:
    roles = _roles(match)
    assert roles is not None
    return match.splice(lambda base, x, w: torch.addmm(base, x, w, **_scale(match["alpha"])), *roles)


def _scale(alpha: Any) -> dict[str, Any]:
    return {} if alpha == 1 else {"alpha": alpha}


def _concatenated(match: Match) -> Any:
    def function(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        return torch.mm(torch.cat([a, c], 1), torch.cat([b, d], 0))

    return match.splice(function, *(match[name] for name in "abcd"))
