"""Which element of a source each index of a result reads, for results that only rearrange elements.

A *layout* has for each dim of the result its factors, outermost first: `(size, stride)`, the stride counted in bytes of
the source as if that were contiguous. An index of the dim is read as a number in these sizes. Viewing regroups factors,
permuting reorders dims, slicing moves the offset, joining equal pieces adds a factor, and seeing other dtypes in the
same bytes changes the innermost factor: all spellings of one re-layout end in one layout.

    [4, 6] float32, as it is             (4, 24) | (6, 4)
    viewed as [24]                       (24, 4)
    split in 2 along dim 0, joined on 1  (2, 24) | (2, 48) (6, 4)
    viewed as bytes                      (4, 24) | (24, 1)

Sizes may be symbolic. They are compared without guards: what is not provable does not hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from crossfade.graph.private import statically_equal

Size = Any
"""An int or a SymInt."""


class Unreadable(Exception):
    """A re-layout that no layout says: a `reason` that is the same for all such cases, a `detail` with its numbers."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


class LayoutFactor(NamedTuple):
    """A part of a dim: `size` steps of `stride` bytes; a stride of 0 repeats what it has."""

    size: Size
    stride: Size


Factors = tuple[LayoutFactor, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The factors of each dim, the bytes before the first element, and the bytes of one element.

    >>> print(viewed(natural((2, 6), 4), (2, 3, 2)))
    (2, 24) | (3, 8) | (2, 4)
    """

    dims: tuple[Factors, ...]
    offset: Size
    itemsize: int

    @property
    def shape(self) -> tuple[Size, ...]:
        """The sizes of the result."""
        return tuple(product(factor.size for factor in dim) for dim in self.dims)

    def __str__(self) -> str:
        dims = [" ".join(f"({factor.size}, {factor.stride})" for factor in dim) or "(1)" for dim in self.dims]
        return " | ".join(dims) + (f" + {self.offset}" if not same(self.offset, 0) else "")


def same(first: Size, second: Size) -> bool:
    """Whether two sizes are provably equal."""
    return first == second if type(first) is int and type(second) is int else statically_equal(first, second)


def same_shape(first: Sequence[Size], second: Sequence[Size]) -> bool:
    """Whether two shapes are provably equal."""
    return len(first) == len(second) and all(map(same, first, second))


def product(sizes: Iterable[Size]) -> Size:
    """The product of sizes; 1 for none."""
    result: Size = 1
    for size in sizes:
        result = result * size
    return result


def divided(size: Size, by: Size) -> Size | None:
    """The exact quotient of two sizes, or None if it is not provably whole.

    >>> divided(12, 4), divided(12, 5)
    (3, None)
    """
    if same(size, by):
        return 1
    if same(by, 0):
        return None
    quotient = size // by
    return quotient if same(quotient * by, size) else None


def natural(shape: Sequence[Size], itemsize: int) -> Layout:
    """The layout of a tensor over itself."""
    dims: list[Factors] = []
    stride: Size = itemsize
    for size in reversed(shape):
        dims.append(() if same(size, 1) else (LayoutFactor(size, stride),))
        stride = stride * size
    return Layout(tuple(reversed(dims)), 0, itemsize)


def of_tensor(value: torch.Tensor) -> Layout:
    """The layout of a tensor over itself."""
    return natural(value.shape, value.element_size())


def same_layout(first: Layout, second: Layout) -> bool:
    """Whether two layouts over one source provably read the same elements."""
    return (
        first.itemsize == second.itemsize
        and len(first.dims) == len(second.dims)
        and same(first.offset, second.offset)
        and all(map(same_factors, first.dims, second.dims))
    )


def same_factors(first: Factors, second: Factors) -> bool:
    """Whether two dims' factors are provably the same."""
    return len(first) == len(second) and all(map(same_shape, first, second))


def merged(factors: Iterable[LayoutFactor]) -> Factors:
    """Factors without those of size 1, neighbours put together where one steps over the other exactly.

    >>> merged([LayoutFactor(2, 24), LayoutFactor(1, 5), LayoutFactor(3, 8)])
    (LayoutFactor(size=6, stride=8),)
    """
    done: list[LayoutFactor] = []
    for factor in factors:
        if same(factor.size, 1):
            continue
        if done and same(done[-1].stride, factor.size * factor.stride):
            factor = LayoutFactor(done.pop().size * factor.size, factor.stride)
        done.append(factor)
    return tuple(done)


def grouped(factors: Iterable[LayoutFactor], sizes: Sequence[Size]) -> list[Factors]:
    """Factors regrouped in dims of these sizes, split where a dim ends inside one.

    >>> grouped([LayoutFactor(6, 4)], (2, 3))
    [(LayoutFactor(size=2, stride=12),), (LayoutFactor(size=3, stride=4),)]
    """
    rest = list(reversed(merged(factors)))
    groups: list[Factors] = []
    for wanted in sizes:
        group: list[LayoutFactor] = []
        left = wanted
        while not same(left, 1):
            factor = rest.pop() if rest else LayoutFactor(0, 0)
            more = divided(left, factor.size)
            inner = divided(factor.size, left) if more is None else None
            if more is not None:
                left = more
            elif inner is not None and not same(factor.size, 0):
                rest.append(LayoutFactor(inner, factor.stride))
                factor, left = LayoutFactor(left, factor.stride * inner), 1
            else:
                found = " ".join(str(factor.size) for factor in merged(factors))
                raise Unreadable(CROSSED, f"factors of {found or 1} viewed as {list(sizes)}")
            group.append(factor)
        groups.append(merged(group))
    if rest:
        raise Unreadable(CROSSED, f"a factor of {rest[-1].size} left over when viewed as {list(sizes)}")
    return groups


CROSSED = "a view cuts across dims that lie apart"
UNALIGNED = "a slice cuts across what makes up its dim"
UNEQUAL = "what is joined are not equal pieces at equal distances"


def viewed(layout: Layout, shape: Sequence[Size]) -> Layout:
    """The same elements in the same order, in another shape."""
    factors = [factor for dim in layout.dims for factor in dim]
    return replace(layout, dims=tuple(grouped(factors, shape)))


def permuted(layout: Layout, order: Sequence[int]) -> Layout:
    """Dims in another order."""
    return replace(layout, dims=tuple(layout.dims[dim] for dim in order))


def sliced(layout: Layout, dim: int, start: Size, length: Size) -> Layout:
    """`length` neighbours along a dim, from `start` on.

    >>> print(sliced(natural((4, 6), 1), 0, 2, 2))
    (2, 6) | (6, 1) + 12
    """
    factors, moved = _cut(layout.dims[dim], start, length)
    dims = (*layout.dims[:dim], merged(factors), *layout.dims[dim + 1 :])
    return replace(layout, dims=dims, offset=layout.offset + moved)


def _cut(factors: Factors, start: Size, length: Size) -> tuple[Factors, Size]:
    """The factors of a slice of a dim, and the bytes it begins later."""
    if not factors or (same(start, 0) and same(length, product(factor.size for factor in factors))):
        return factors, 0
    first, rest = factors[0], factors[1:]
    inner = product(factor.size for factor in rest)
    blocks, whole = divided(length, inner), divided(start, inner)
    if blocks is not None and whole is not None:
        return (LayoutFactor(blocks, first.stride), *rest), whole * first.stride
    if type(start) is int and type(length) is int and type(inner) is int:
        block = start // inner
        if block == (start + length - 1) // inner:
            deeper, moved = _cut(rest, start - block * inner, length)
            return deeper, moved + block * first.stride
    sizes = " ".join(str(factor.size) for factor in factors)
    raise Unreadable(UNALIGNED, f"{length} from {start} on, of a dim made of {sizes}")


def selected(layout: Layout, dim: int, index: Size) -> Layout:
    """One index of a dim, which is then gone."""
    slice_ = sliced(layout, dim, index, 1)
    return replace(slice_, dims=(*slice_.dims[:dim], *slice_.dims[dim + 1 :]))


def joined(layouts: Sequence[Layout], dim: int) -> Layout:
    """Equal pieces one after the other along a dim; they must lie at equal distances in the source."""
    first = layouts[0]
    if len(layouts) == 1:
        return first
    step = layouts[1].offset - first.offset
    for number, piece in enumerate(layouts):
        start = first.offset + number * step
        if not same_layout(replace(piece, offset=0), replace(first, offset=0)):
            raise Unreadable(UNEQUAL, f"piece 0 is {first}, piece {number} is {piece}")
        if not same(piece.offset, start):
            raise Unreadable(UNEQUAL, f"piece {number} begins at byte {piece.offset}, not {start}")
    outer = LayoutFactor(len(layouts), step)
    return replace(first, dims=(*first.dims[:dim], merged((outer, *first.dims[dim])), *first.dims[dim + 1 :]))


def unsqueezed(layout: Layout, dim: int) -> Layout:
    """A dim of size 1 more."""
    return replace(layout, dims=(*layout.dims[:dim], (), *layout.dims[dim:]))


def broadcast(layout: Layout, shape: Sequence[Size]) -> Layout:
    """Dims of size 1 repeated, and new ones before the first, as `expand` does."""
    more = len(shape) - len(layout.dims)
    sizes = (*([1] * more), *layout.shape)
    dims = [()] * more + list(layout.dims)
    for dim, (old, new) in enumerate(zip(sizes, shape, strict=True)):
        if not same(old, new):
            dims[dim] = (LayoutFactor(new, 0),)
    return replace(layout, dims=tuple(dims))


def retyped(layout: Layout, itemsize: int) -> Layout:
    """The same bytes as elements of another size, along the last dim.

    >>> print(retyped(natural((2, 3), 4), 1))
    (2, 12) | (12, 1)
    """
    if itemsize == layout.itemsize:
        return layout
    *dims, last = layout.dims
    if itemsize < layout.itemsize:
        last = merged((*last, LayoutFactor(layout.itemsize // itemsize, itemsize)))
        return replace(layout, dims=(*dims, last), itemsize=itemsize)
    ratio = itemsize // layout.itemsize
    whole = divided(last[-1].size, ratio) if last and same(last[-1].stride, layout.itemsize) else None
    if whole is None:
        raise Unreadable("its bytes are not seen as elements where they lie together", f"{ratio} of {layout}")
    last = merged((*last[:-1], LayoutFactor(whole, itemsize)))
    return replace(layout, dims=(*dims, last), itemsize=itemsize)


class Piece(NamedTuple):
    """A factor inside one dim of the source."""

    dim: int
    size: Size
    stride: Size


def pieces(factors: Factors, source: Layout) -> list[Piece]:
    """Factors cut where a dim of the source ends; one that is repeated has the dim -1.

    >>> pieces((LayoutFactor(24, 4),), natural((4, 6), 4))
    [Piece(dim=0, size=4, stride=24), Piece(dim=1, size=6, stride=4)]
    """
    found: list[Piece] = []
    for factor in factors:
        if same(factor.stride, 0):
            found.append(Piece(-1, factor.size, 0))
        else:
            found += _pieces_of(factor, source)
    return found


def _pieces_of(factor: LayoutFactor, source: Layout) -> list[Piece]:
    steps = ((dim, own[0], divided(factor.stride, own[0].stride)) for dim, own in enumerate(source.dims) if own)
    dim, whole, step = next((entry for entry in steps if entry[2] is not None), (-1, LayoutFactor(0, 0), None))
    room = divided(whole.size, step) if step is not None else None
    cut: list[Piece] = []
    left, stride = factor.size, factor.stride
    while room is not None:
        if divided(room, left) is not None:
            return [Piece(dim, left, stride), *cut]
        left = divided(left, room)
        if left is None:
            break
        cut.insert(0, Piece(dim, room, stride))
        dim = next((outer for outer in range(dim - 1, -1, -1) if source.dims[outer]), -1)
        if dim < 0:
            break
        ((room, stride),) = source.dims[dim]
    raise Unreadable(
        "it reads dims of the tensor in pieces", f"{factor.size} steps of {factor.stride} bytes over {source}"
    )
