"""Matrix products by their shape: tiles that processors compute in waves, of which the last may be nearly empty."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from crossfade.cost.keys import Keys
from crossfade.graph.operators import remembered
from crossfade.graph.private import schema_of

_ALIGNMENT = 16
"""Bytes that a processor loads at once into a tile."""
_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 64))


@dataclass(frozen=True)
class Products:
    """How a device computes matrix products: with so many `processors`, each a tile at a time.

    The machine's rate is that of full waves of the largest tiles. A tile of half the size has the share `smaller` of
    it, since more is read for each result; each tile takes `fill` more elements of the inner dim to begin and end.
    Where a matrix's rows do not begin at multiples of 16 bytes, as those of logits over 50,257 tokens, the share
    `unaligned` is left of the rate. Fused attention reaches the share `attention` of it, and its gradient
    `attention_backward` of that: by the FlashAttention-3 paper, FlashAttention-2 on H100 reaches 370 TFLOP/s forward
    and 322 backward.

        >>> products = Products(processors=108)
        >>> full, one_more = (products.seconds(1, rows, 1152, 4096, rate=250e12) for rows in (3072, 3073))
        >>> one_more > 1.4 * full
        True
    """

    processors: int
    smaller: float = 0.85
    fill: float = 100.0
    attention: float = 0.5
    unaligned: float = 0.35
    attention_backward: float = 0.87
    peak: float = 0.0
    """Operations a second in half precision that the data sheet promises; 0 where it is not known."""

    def seconds(self, batch: int, rows: int, columns: int, inner: int, rate: float, *, aligned: bool = True) -> float:
        """Seconds of a product at a rate of operations a second, by the tile that suits it best."""
        return _seconds(self, batch, rows, columns, inner) / (rate if aligned else rate * self.unaligned)


@functools.lru_cache(maxsize=65536)
def _seconds(products: Products, batch: int, rows: int, columns: int, inner: int) -> float:
    """Operations at the full rate that take as long."""
    return min(_with_tile(products, batch, rows, columns, inner, *tile) for tile in _TILES)


def _with_tile(products: Products, batch: int, rows: int, columns: int, inner: int, high: int, wide: int) -> float:
    tiles = batch * math.ceil(rows / high) * math.ceil(columns / wide)
    waves = math.ceil(tiles / products.processors)
    share = products.smaller ** math.log2(256 * 128 / (high * wide))
    return waves * products.processors * 2 * high * wide * (inner + products.fill) / share


def shape_of(node: fx.Node, keys: Keys) -> tuple[int, int, int, int] | None:
    """Batch, rows, columns and inner dim of a plain product; None for anything else.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4, 8] = input("x")
    ... w: f32[8, 5] = input("w")
    ... y: f32[4, 5] = aten.mm(x, w)
    ... return output("y", y)
    ... ''')
    >>> shape_of(list(program.graph.nodes)[2], Keys())
    (1, 4, 5, 8)
    """
    first = _first_factor(node.target)
    if first is None:
        return None
    factor = node.args[first]
    if not isinstance(factor, fx.Node):
        return None
    (made,), left = keys.tensors(node)[:1], keys.tensors(factor)[0]
    batch = math.prod(made.sizes[:-2]) if made.sizes[:-2] else 1
    return (batch, made.sizes[-2], made.sizes[-1], left.sizes[-1])


def is_aligned(node: fx.Node, keys: Keys) -> bool:
    """Whether the rows of the matrices of a product, its result too, begin at multiples of 16 bytes.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4, 8] = input("x")
    ... w: f32[8, 5] = input("w")
    ... y: f32[4, 5] = aten.mm(x, w)
    ... return output("y", y)
    ... ''')
    >>> is_aligned(list(program.graph.nodes)[2], Keys())
    False
    """
    factors = factors_of(node)
    if not factors:
        return True
    matrices = [keys.tensors(value)[0] for value in (*factors, node)]
    return all(max(each.strides[-2:]) * each.dtype.itemsize % _ALIGNMENT == 0 for each in matrices)


def factors_of(node: fx.Node) -> list[fx.Node]:
    """The matrices that a plain product multiplies; none of anything else."""
    first = _first_factor(node.target)
    return [] if first is None else [each for each in node.args[first : first + 2] if isinstance(each, fx.Node)]


@remembered
def _first_factor(target: Callable[..., object]) -> int | None:
    """Which argument is the first factor."""
    schema = schema_of(target)
    name = schema.name if schema is not None else ""
    return {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::_scaled_mm": 0}.get(name)


def is_attention(node: fx.Node) -> bool:
    """Whether a node is attention in one operator."""
    schema = schema_of(node.target)
    return schema is not None and "scaled_dot_product" in schema.name


def share_of_attention(products: Products, node: fx.Node) -> float:
    """The share of a machine's rate that a node reaches as attention in one operator or as its gradient; else 1."""
    if not is_attention(node):
        return 1.0
    return products.attention * (products.attention_backward if "backward" in schema_of(node.target).name else 1.0)
