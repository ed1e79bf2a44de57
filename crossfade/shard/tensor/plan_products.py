"""Products of activations and a weight, whatever operator computes them: a name for every dim of both and the result.

Names that the weight shares with the result only are put out, those that it shares with the activations only are
contracted over, and those of all three are a batch: a matrix for each head, group or expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from crossfade.graph.operators import arguments
from crossfade.graph.private import schema_of
from crossfade.shard.tensor.equations import read_equation
from crossfade.shard.tensor.factors import Dims, Factors, without_broadcasts

aten = torch.ops.aten

_TRANSPOSED = {aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input}
CONVOLUTIONS: set[Any] = {
    *(getattr(getattr(aten, f"conv{size}d"), form) for size in (1, 2, 3) for form in ("default", "padding")),
    aten.convolution.default,
    *_TRANSPOSED,
}


@dataclass(frozen=True)
class Product:
    """One multiplication of activations by a weight, and what its dims are called."""

    node: fx.Node
    source: fx.Node
    """The activations."""
    activations: Dims
    weight: Dims
    result: Dims
    in_groups: bool = False
    """Whether the shared dim is of groups, each of which sees only its own channels (a convolution)."""


def product_of(node: fx.Node, value: fx.Node) -> Product | None:
    """The product that a node computes with a weight as one of two factors; None if it does anything else with it."""
    if node.target in CONVOLUTIONS:
        return _convolution(node, value)
    if is_grouped_product(node):
        rows, stack = node.args[:2]
        named = (("m", "k"), ("e", "k", "n"), ("m", "n"))
        fits = isinstance(rows, fx.Node) and stack is value and _rank(rows) == 2 and _rank(value) == 3
        return Product(node, rows, *named) if fits and isinstance(rows, fx.Node) else None
    factors = _factors(node)
    if factors is None or sum(factor is value for factor in factors) != 1:
        return None
    at = factors.index(value)
    source = factors[1 - at]
    inputs, result = _named(node, factors)
    return Product(node, source, inputs[1 - at], inputs[at], result)


def is_product(node: fx.Node) -> bool:
    """Whether a node multiplies and adds up, which it may do with weights."""
    known = node.target in _OPERANDS or node.target in CONVOLUTIONS or node.target is aten.einsum.default
    return known or is_grouped_product(node)


def is_grouped_product(node: fx.Node) -> bool:
    """Whether a node multiplies rows by the matrix of their group, of a stack of them: how experts compute by default.

    Told by name: the one operator is only in torch, the other only where the transformers library is loaded.
    """
    name = getattr(schema_of(node.target), "name", "")
    return name in ("aten::_grouped_mm", "transformers::grouped_mm_fallback")


_OPERANDS: dict[Any, tuple[str, str]] = {
    aten.linear.default: ("input", "weight"),
    aten.addmm.default: ("mat1", "mat2"),
    aten.mm.default: ("self", "mat2"),
    aten.bmm.default: ("self", "mat2"),
    aten.baddbmm.default: ("batch1", "batch2"),
    aten.matmul.default: ("self", "other"),
}
"""The two factors of operators that multiply."""


def _factors(node: fx.Node) -> list[fx.Node] | None:
    given = arguments(node)
    if node.target in _OPERANDS:
        found = [given[name] for name in _OPERANDS[node.target]]
    elif node.target is aten.einsum.default and len(given["tensors"]) == 2:
        found = list(given["tensors"])
    else:
        return None
    return found if all(isinstance(factor, fx.Node) for factor in found) else None


def _named(node: fx.Node, factors: list[fx.Node]) -> tuple[tuple[Dims, ...], Dims]:
    """The dims of both factors and of the result; a dim that is one long and broadcasts has no name."""
    shapes = [tuple(factor.meta["val"].shape) for factor in factors]
    inputs, result = _by_operator(node, [len(shape) for shape in shapes])
    return without_broadcasts(Factors(inputs, (result,)), shapes).inputs, result


def _by_operator(node: fx.Node, ranks: list[int]) -> tuple[tuple[Dims, ...], Dims]:
    left, right = ranks
    if node.target is aten.einsum.default:
        return read_equation(str(arguments(node)["equation"]), ranks)
    if node.target is aten.linear.default:
        rows = tuple(f"b{index}" for index in reversed(range(left - 1)))
        return ((*rows, "k"), ("n", "k")[2 - right :]), (*rows, *("n",)[: right - 1])
    batches = tuple(f"b{index}" for index in reversed(range(max(left, right) - 2)))
    first = (*batches, "m", "k")[-left:] if left > 1 else ("k",)
    second = (*batches, "k", "n")[-right:] if right > 1 else ("k",)
    return (first, second), (*batches, *("m",)[: left - 1], *("n",)[: right - 1])


def _convolution(node: fx.Node, value: fx.Node) -> Product | None:
    """Channels put out and taken in; of a convolution in groups the first dim of the weight is of all groups."""
    given = arguments(node)
    source = given["input"]
    if given["weight"] is not value or source is value:
        return None
    size = _rank(value) - 2
    batch = ("b",) if _rank(source) == len(("b",)) + 1 + size else ()
    places, window, made = (tuple(f"{letter}{index}" for index in range(size)) for letter in "xwy")
    if given["groups"] > 1:
        return Product(node, source, (*batch, "c", *places), ("c", "each", *window), (*batch, "c", *made), True)
    kept = ("i", "o") if is_transposed(node) else ("o", "i")
    return Product(node, source, (*batch, "i", *places), (*kept, *window), (*batch, "o", *made))


def is_transposed(node: fx.Node) -> bool:
    """Whether a convolution's weight keeps `[in, out / groups, ...]`."""
    return node.target in _TRANSPOSED or bool(arguments(node).get("transposed"))


def _rank(node: fx.Node) -> int:
    return len(node.meta["val"].shape)
