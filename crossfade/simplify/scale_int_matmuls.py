"""Integer matrix products that are scaled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph.operators import arguments
from crossfade.graph.passes import Numerics
from crossfade.graph.rewrite import Match, Rule
from crossfade.graph.rule_pass import RulePass
from crossfade.simplify.products import is_only_read_by

_CONVERTED = (
    "aten._to_copy(aten._int_mm(a, b), dtype=dtype)",
    "aten.to.dtype(aten._int_mm(a, b), dtype)",
    "prims.convert_element_type(aten._int_mm(a, b), dtype)",
)


@dataclass(frozen=True)
class ScaleIntMatmuls(RulePass):
    """Let the multiplication that scales an int8 product convert it too: it casts what it reads to the scale's dtype.

    That is a call less, and where kernels cast as they load (CUDA) a pass over the result less; on the CPU the
    multiplication makes the converted copy itself. Nothing else about such products is rewritten: the matrix product
    stays `_int_mm`, as no operator of torch takes integers and a scale in one.

    Not in a default pipeline: only int8-quantized inference has such products. Add it with
    `simplification().after("simplify-nodes", ScaleIntMatmuls())`.

    Also known as: Inductor's `force_fuse_int_mm_with_mul`, which goes further: its own kernel scales too.

    Before:
        a: i8[32, 8] = input("a")
        b: i8[8, 16] = input("b")
        scale: f32[16] = input("scale")
        product: i32[32, 16] = aten._int_mm(a, b)
        converted: f32[32, 16] = aten._to_copy(product, dtype=f32)
        scaled: f32[32, 16] = aten.mul.Tensor(converted, scale)
        return output("y", scaled)

    After:
        a: i8[32, 8] = input("a")
        b: i8[8, 16] = input("b")
        scale: f32[16] = input("scale")
        product: i32[32, 16] = aten._int_mm(a, b)
        mul: f32[32, 16] = aten.mul.Tensor(product, scale)
        return output("y", mul)
    """

    name = "scale-int-matmuls"
    numerics = Numerics.BITWISE

    def rules(self) -> Sequence[Rule]:
        """One rule for each spelling of the conversion and each side of the multiplication."""
        patterns = [f"aten.mul.Tensor({converted}, scale)" for converted in _CONVERTED]
        patterns += [f"aten.mul.Tensor(scale, {converted})" for converted in _CONVERTED]
        return [Rule("conversion", pattern, _scaled, _against) for pattern in patterns]


def _converted(match: Match) -> tuple[fx.Node, bool]:
    """The conversion, and whether it is the left factor."""
    given = arguments(match.root)
    return (given["other"], False) if given["self"] is match["scale"] else (given["self"], True)


def _against(match: Match) -> str | None:
    converted, _ = _converted(match)
    scale = match["scale"].meta.get("val") if isinstance(match["scale"], fx.Node) else None
    if not is_only_read_by(converted, match.root):
        return "the converted product has other users"
    if not isinstance(scale, Tensor):
        return "its scale is a number, by which integers become torch's default dtype"
    if not scale.dtype.is_floating_point or not match.root.meta["val"].dtype == scale.dtype == match["dtype"]:
        return "its scale has another dtype than it is converted to"
    if scale.dtype.itemsize < 4:  # torch's kernels may multiply single elements before they round them
        return "its scale is of half precision"
    return None


def _scaled(match: Match) -> Any:
    converted, on_the_left = _converted(match)
    factors = [converted.all_input_nodes[0], match["scale"]]
    return match.splice(torch.mul, *(factors if on_the_left else reversed(factors)))
