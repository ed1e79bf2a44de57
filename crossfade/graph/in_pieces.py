"""Calls on pieces of their arguments, one piece after another: where a value can be cut, and put together again.

`per_token` says which operators compute each token by itself, for parts that lie on different ranks. Here one rank has
all of them: a value is cut inside a dim as well, such as the rows of every rank's block or of every expert, and
products are cut along their rows, columns or batch, whichever is not summed over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph import collectives, per_token
from crossfade.graph.collectives import Kind
from crossfade.graph.operators import REORDERING, arguments, by_name, permutation_of
from crossfade.graph.per_token import DIFFERENT_DIMS, MIXES, SIZES, SUMMED, UNKNOWN, VIEW_MIXES
from crossfade.graph.private import schema_of

_aten = torch.ops.aten

SUMS = "a product sums over what could be cut"
ROWS = "how many rows each expert or rank has is known only when it runs"
UNEVEN = "what ranks send each other differs in size"
NARROW = "a piece of it would not lie as its kernel needs it"
DIVIDES = "its size does not divide by the pieces"

_VIEWS = {_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default}
_COPIES = {_aten.clone.default, _aten.contiguous.default}
_KERNEL_BYTES = 16
"""What the rows of a grouped product are aligned to."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value is cut into pieces: in `dim`, in each of the `outer` blocks of equal size that it consists of."""

    dim: int
    outer: int = 1

    def fits(self, shape: Sequence[Any], pieces: int) -> bool:
        """Whether pieces of a value of this shape are equal, and not empty.

        >>> Place(0, outer=2).fits([8, 3], pieces=4), Place(0, outer=2).fits([8, 3], pieces=8)
        (True, False)
        """
        size = shape[self.dim]
        return isinstance(size, int) and size > 0 and size % (self.outer * pieces) == 0

    def take(self, value: Tensor, pieces: int, index: int) -> Tensor:
        """One piece of a value.

        >>> Place(0, outer=2).take(torch.arange(8), pieces=2, index=1)
        tensor([2, 3, 6, 7])
        """
        size = value.shape[self.dim] // pieces
        if self.outer == 1:
            return value.narrow(self.dim, index * size, size)
        before, after = value.shape[: self.dim], value.shape[self.dim + 1 :]
        blocks = value.reshape([*before, self.outer, pieces, size // self.outer, *after])
        return blocks.select(self.dim + 1, index).reshape([*before, size, *after])

    def together(self, pieces: Sequence[Tensor]) -> Tensor:
        """The value that these are the pieces of.

        >>> place = Place(0, outer=2)
        >>> place.together([place.take(torch.arange(8), 2, index) for index in range(2)])
        tensor([0, 1, 2, 3, 4, 5, 6, 7])
        """
        if self.outer == 1:
            return torch.cat(list(pieces), self.dim)
        before, size, after = pieces[0].shape[: self.dim], pieces[0].shape[self.dim], pieces[0].shape[self.dim + 1 :]
        blocks = [piece.reshape([*before, self.outer, size // self.outer, *after]) for piece in pieces]
        return torch.cat(blocks, self.dim + 1).reshape([*before, size * len(pieces), *after])


Places = Mapping[fx.Node, Place]


@dataclass(frozen=True)
class Cut:
    """How a call works on pieces: the place of what it makes (one for each of several results), the arguments of which
    it is given pieces, and the arguments, by name, that are other numbers for a piece."""

    place: Place | tuple[Place, ...]
    cut: Mapping[fx.Node, Place]
    sizes: Mapping[str, Any] = field(default_factory=dict)


def cut(node: fx.Node, places: Places, pieces: int) -> Cut | str:
    """How a call works on pieces, given the places of the arguments that are in pieces; else why it does not.

    >>> from crossfade.graph.text import parse
    >>> x, w, y, out = parse('''
    ... x: f32[4, 6] = input("x")
    ... w: f32[6, 2] = input("w")
    ... y: f32[4, 2] = aten.mm(x, w)
    ... return output("y", y)
    ... ''').graph.nodes
    >>> cut(y, {x: Place(0)}, pieces=2)
    Cut(place=Place(dim=0, outer=1), cut={x: Place(dim=0, outer=1)}, sizes={})
    >>> cut(y, {x: Place(1)}, pieces=2)
    'a product sums over what could be cut'
    """
    how = _how(node, places, pieces)
    if isinstance(how, str):
        return how
    made = [(node, how.place)] if isinstance(how.place, Place) else []
    for value, place in (*made, *how.cut.items()):
        if not place.fits(value.meta["val"].shape, pieces):
            return DIVIDES
    return how


def wanted(node: fx.Node, place: Place, pieces: int) -> Cut | str:
    """How a call makes a value in pieces at this place, if its arguments are; else why it does not.

    >>> from crossfade.graph.text import parse
    >>> x, w, y, out = parse('''
    ... x: f32[4, 6] = input("x")
    ... w: f32[6, 2] = input("w")
    ... y: f32[4, 2] = aten.mm(x, w)
    ... return output("y", y)
    ... ''').graph.nodes
    >>> wanted(y, Place(1), pieces=2).cut
    {w: Place(dim=1, outer=1)}
    """
    sources = _sources_of(node, place, pieces)
    if isinstance(sources, str):
        return sources
    how = cut(node, sources, pieces)
    return UNKNOWN if not isinstance(how, str) and how.place != place else how


def on_piece(node: fx.Node, how: Cut, known: Mapping[fx.Node, Any], pieces: int, index: int) -> Any:
    """What a call makes of one piece: `known` has pieces of what is in pieces inside already, the others whole."""

    def given(source: fx.Node) -> Any:
        value, place = known[source], how.cut.get(source)
        whole = isinstance(value, Tensor) and value.shape == source.meta["val"].shape
        return place.take(value, pieces, index) if place is not None and whole else value

    if node.target in _VIEWS:
        return given(node.all_input_nodes[0]).reshape(next(iter(how.sizes.values())))
    args, kwargs = fx.map_arg((node.args, node.kwargs), given)
    if not how.sizes:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    return node.target(**{**by_name(node.target, args, kwargs), **how.sizes})  # type: ignore[operator]


def is_product(node: fx.Node) -> bool:
    """Whether a call multiplies matrices, in a way that is understood here."""
    return node.op == "call_function" and (node.target in _OPERANDS or _grouped(node) is not None)


def viewed_place(before: Sequence[int], place: Place, after: Sequence[int], pieces: int) -> Place | None:
    """Where a value is cut if it is seen in another shape; None if no dim has the pieces.

    >>> viewed_place([8, 3], Place(0, outer=2), [2, 4, 3], pieces=2)
    Place(dim=1, outer=1)
    >>> viewed_place([2, 4, 3], Place(1), [24], pieces=2)
    Place(dim=0, outer=2)
    """
    outer = math.prod(before[: place.dim]) * place.outer
    return place_behind(after, outer, pieces)


def place_behind(shape: Sequence[int], outer: int, pieces: int) -> Place | None:
    """The place in a value of a shape that has so many blocks in all, each of which is cut.

    >>> place_behind([8, 3], 2, pieces=2), place_behind([8, 3], 8, pieces=3), place_behind([8, 3], 3, pieces=2)
    (Place(dim=0, outer=2), Place(dim=1, outer=1), None)
    """
    for dim, size in enumerate(shape):
        before = math.prod(shape[:dim])
        if outer % before:
            return None
        if size % (outer // before * pieces) == 0 and size:
            return Place(dim, outer // before)
    return None


def _how(node: fx.Node, places: Places, pieces: int) -> Cut | str:
    if node.op != "call_function" or not _is_static(node):
        return SIZES if node.op == "call_function" else UNKNOWN
    if node.target in _VIEWS:
        return _view(node, places, pieces)
    if node.target in _COPIES:
        return Cut(next(iter(places.values())), dict(places))
    if node.target in _OPERANDS:
        return _of_product(node, places)
    if _grouped(node) is not None:
        return _of_grouped(node, places, pieces)
    if node.target is _aten.index_select.default:
        return _of_selection(node, places)
    if collectives.is_wait(node):
        return Cut(next(iter(places.values())), dict(places))
    if collectives.is_collective(node):
        return _of_exchange(node, places, pieces)
    if len({place.outer for place in places.values()}) > 1:
        return DIFFERENT_DIMS
    how = per_token.split(node, {source: place.dim for source, place in places.items()}, pieces)
    if isinstance(how, str):
        return how
    outer = next(iter(places.values())).outer
    dims = how.place if isinstance(how.place, tuple) else (how.place,)
    if SUMMED in dims:
        return MIXES
    made = tuple(Place(dim, outer) for dim in dims)
    sources = {source: Place(dim, outer) for source, dim in how.cut.items()}
    return Cut(made if isinstance(how.place, tuple) else made[0], sources, how.sizes)


def _is_static(node: fx.Node) -> bool:
    values = [node.meta.get("val"), *(source.meta.get("val") for source in node.all_input_nodes)]
    tensors = [value for value in values if isinstance(value, Tensor)]
    return all(isinstance(size, int) for tensor in tensors for size in tensor.shape)


def _view(node: fx.Node, places: Places, pieces: int) -> Cut | str:
    ((source, place),) = places.items()
    shape = list(node.meta["val"].shape)
    seen = viewed_place(source.meta["val"].shape, place, shape, pieces)
    if seen is None:
        return VIEW_MIXES
    shape[seen.dim] //= pieces
    return Cut(seen, {source: place}, {"size": shape})


_OPERANDS: dict[Any, tuple[str, str, str | None]] = {
    _aten.mm.default: ("self", "mat2", None),
    _aten.bmm.default: ("self", "mat2", None),
    _aten.addmm.default: ("mat1", "mat2", "self"),
    _aten.baddbmm.default: ("batch1", "batch2", "self"),
}
"""The arguments of products: left, right, and what is added."""


def _of_product(node: fx.Node, places: Places) -> Cut | str:
    """Rows of the left operand, columns of the right one, or matrices of both; what is added with them."""
    given, number = arguments(node), node.meta["val"].dim()
    left, right, added = _OPERANDS[node.target]
    found = set()
    for source, place in places.items():
        if source in (given[left], given[right]):
            if place.dim == (number - 1 if source is given[left] else number - 2):
                return SUMS
            found.add(place)
        if added is not None and source is given[added]:
            found.add(Place(place.dim + number - source.meta["val"].dim(), place.outer))
    if len(found) != 1 or given[left] is given[right]:
        return DIFFERENT_DIMS
    (place,) = found
    return Cut(place, _operands_in_pieces(node, place))


def _operands_in_pieces(node: fx.Node, place: Place) -> dict[fx.Node, Place]:
    """The operands of a product, of whose result pieces are wanted, that are to be in pieces."""
    given, number = arguments(node), node.meta["val"].dim()
    left, right, added = _OPERANDS[node.target]
    sources = {given[left]: place} if place.dim != number - 1 else {}
    sources |= {given[right]: place} if place.dim != number - 2 else {}
    if added is not None:
        shape = given[added].meta["val"].shape
        dim = place.dim - number + len(shape)
        sources |= {given[added]: Place(dim, place.outer)} if dim >= 0 and shape[dim] != 1 else {}
    return sources


def _grouped(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The operands of a product of groups of rows."""
    name = getattr(schema_of(node.target), "name", "")
    if name == "aten::_grouped_mm":
        given = arguments(node)
        return (given["self"], given["mat2"]) if given.get("bias") is None else None
    if name == "transformers::grouped_mm_fallback":
        given = arguments(node)
        return given["input"], given["weight"]
    return None


def _operands_of_groups(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    operands = _grouped(node)
    assert operands is not None
    return operands


def _columns(node: fx.Node) -> dict[tuple[int, int], int]:
    """Of a product of groups, the dims of operands (0 left, 1 right) that are dims of the result, and which."""
    left, right = (operand.meta["val"].dim() for operand in _operands_of_groups(node))
    match left, right:
        case 2, 3:
            return {(1, 2): 1}
        case 3, 2:
            return {(0, 1): 0}
        case 2, 2:
            return {(0, 0): 1, (1, 1): 2}
        case _:
            return {(0, 1): 1, (1, 2): 2}


def _of_grouped(node: fx.Node, places: Places, pieces: int) -> Cut | str:
    operands, columns, found = _operands_of_groups(node), _columns(node), set()
    for source, place in places.items():
        if source not in operands or operands[0] is operands[1]:
            return ROWS
        side = operands.index(source)
        if (side, place.dim) not in columns:
            summed = place.dim == (operands[0].meta["val"].dim() - 1, operands[1].meta["val"].dim() - 2)[side]
            return SUMS if summed else ROWS
        found.add(Place(columns[side, place.dim], place.outer))
        if source.meta["val"].shape[place.dim] // pieces * source.meta["val"].dtype.itemsize % _KERNEL_BYTES:
            return NARROW
    return Cut(found.pop(), dict(places)) if len(found) == 1 and len(places) == 1 else DIFFERENT_DIMS


def _of_selection(node: fx.Node, places: Places) -> Cut | str:
    given = arguments(node)
    if set(places) != {given["self"]}:
        return MIXES
    place = places[given["self"]]
    return MIXES if given["dim"] % node.meta["val"].dim() == place.dim else Cut(place, dict(places))


def _of_exchange(node: fx.Node, places: Places, pieces: int) -> Cut | str:
    """Whatever is not exchanged along dim 0; or as much of every rank's block."""
    exchange = collectives.view(node)
    assert exchange is not None
    if exchange.kind is not Kind.ALL_TO_ALL or set(places) != {exchange.inputs[0]}:
        return UNKNOWN
    place = places[exchange.inputs[0]]
    if place.dim > 0:
        return Cut(place, dict(places))
    if collectives.counts_rows_as_it_runs(node):
        return ROWS
    ranks = collectives.equal_parts(node)
    if ranks is None:
        return UNEVEN
    if place.outer % ranks:
        return MIXES
    part = node.meta["val"].shape[0] // ranks // pieces
    return Cut(place, dict(places), dict.fromkeys(("output_split_sizes", "input_split_sizes"), [part] * ranks))


def _sources_of(node: fx.Node, place: Place, pieces: int) -> dict[fx.Node, Place] | str:
    """The places that arguments must have for what a call makes of them to have this one."""
    if node.op != "call_function" or not _is_static(node):
        return UNKNOWN
    sources, number = node.all_input_nodes, node.meta["val"].dim() if isinstance(node.meta["val"], Tensor) else 0
    if node.target in _VIEWS:
        seen = viewed_place(node.meta["val"].shape, place, sources[0].meta["val"].shape, pieces)
        return {sources[0]: seen} if seen is not None else VIEW_MIXES
    if node.target in REORDERING:
        return {sources[0]: Place(permutation_of(node)[place.dim], place.outer)}
    if node.target in _OPERANDS:
        return _operands_in_pieces(node, place)
    if (operands := _grouped(node)) is not None:
        found = [(side, dim) for (side, dim), made in _columns(node).items() if made == place.dim]
        return {operands[side]: Place(dim, place.outer) for side, dim in found} or ROWS
    if node.target is _aten.index_select.default:
        return {sources[0]: place}
    if node.target in _COPIES or per_token.is_pointwise(node.target):
        return _broadcast(sources, place, number) or UNKNOWN
    return UNKNOWN


def _broadcast(sources: Iterable[fx.Node], place: Place, number: int) -> dict[fx.Node, Place]:
    found = {}
    for source in sources:
        shape = source.meta["val"].shape if isinstance(source.meta["val"], Tensor) else ()
        dim = place.dim - number + len(shape)
        if dim >= 0 and shape[dim] != 1:
            found[source] = Place(dim, place.outer)
    return found
