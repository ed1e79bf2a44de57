"""What stands before and after all-to-alls and can be computed piece by piece: dispatch, experts, combine.

A region has an exchange that brings values in, or one that takes them away, or both, and the calls between. All of them
work on pieces of the same values. It stands at one place of the program: what it needs stands above, what reads it
below.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.communicate.collective_matmul import WRITTEN, raised
from crossfade.graph import collectives, in_pieces, per_token
from crossfade.graph.collectives import Collective
from crossfade.graph.in_pieces import Cut, Place
from crossfade.graph.order import Order

NO_PRODUCT = "no product beside it can be computed in pieces"
SYMBOLIC = "its sizes are not known before it runs"
NOT_PLAIN = "it is not a plain collective that is waited for"
READ = "what reads its pieces stands above what they are made of"
NO_COMBINE = "no all-to-all takes away what is computed of it"
LARGE = "it does not divide into pieces"

_MOST = 64
"""Nodes of a region: experts are a dozen or two."""

_LOOKED_THROUGH = 8
"""Views that are asked for blocks in which an exchange's value might be cut."""


@dataclass(frozen=True)
class Shape:
    """Which region around an exchange: `way` is `"around"` (from it to the next), `"after"` or `"before"` it; each of
    `outer` blocks is cut into `pieces`."""

    way: str
    outer: int
    pieces: int


@dataclass(frozen=True)
class Region:
    """Calls that are to be done in pieces: `calls` are those between the exchanges, in order.

    `whole` has the values that are read elsewhere and must be put together; `place` is the node before which pieces are
    computed, and `raises` what is to be put above it.
    """

    shape: Shape
    entry: Collective | None
    exit: Collective | None
    calls: tuple[fx.Node, ...]
    how: Mapping[fx.Node, Cut]
    places: Mapping[fx.Node, Place]
    whole: tuple[fx.Node, ...]
    place: fx.Node
    raises: tuple[fx.Node, ...] = ()

    @property
    def exchanges(self) -> list[Collective]:
        """The exchanges that travel in pieces."""
        return [exchange for exchange in (self.entry, self.exit) if exchange is not None]

    @property
    def products(self) -> list[fx.Node]:
        """The products that are computed in pieces."""
        return [node for node in self.calls if in_pieces.is_product(node)]

    @property
    def given(self) -> tuple[fx.Node, ...]:
        """What the region is given: what is sent into it, and what calls read that they do not make."""
        made = {*self.calls, *(wait for exchange in self.exchanges for wait in exchange.waits)}
        read = [source for node in self.calls for source in node.all_input_nodes]
        sent = [source for exchange in self.exchanges for source in exchange.node.all_input_nodes]
        return tuple(dict.fromkeys(node for node in (*sent, *read) if node not in made))

    @property
    def nodes(self) -> list[fx.Node]:
        """The exchanges and the calls, in order."""
        return sorted({*self.calls, *(node for exchange in self.exchanges for node in exchange.nodes)})

    @property
    def reads(self) -> set[fx.Node]:
        """What is read where the region is computed: what it is given, and what that is raised with."""
        return {*self.given, *self.raises, *(source for node in self.raises for source in node.all_input_nodes)}

    def key(self) -> tuple[Any, ...]:
        """What is the same for regions that do the same, on values of the same shapes, in as many pieces."""
        number = {node: index for index, node in enumerate((*self.given, *self.nodes))}
        given = [
            (str(node.meta["val"].dtype), *node.meta["val"].shape, *node.meta["val"].stride()) for node in self.given
        ]
        called = [
            (str(node.target), repr(fx.map_arg((node.args, node.kwargs), lambda source: number[source])))
            for node in self.nodes
        ]
        return (self.shape, *given, *called, *(number[node] for node in self.whole))

    def among(self, known: Mapping[fx.Node, fx.Node], place: fx.Node) -> Region:
        """The same region made of other nodes, those that stand for its own, at a place."""

        def exchange(own: Collective | None) -> Collective | None:
            return collectives.view(known[own.node]) if own is not None else None

        how = {
            known[node]: replace(cut, cut={known[source]: where for source, where in cut.cut.items()})
            for node, cut in self.how.items()
        }
        return replace(
            self,
            entry=exchange(self.entry),
            exit=exchange(self.exit),
            calls=tuple(known[node] for node in self.calls),
            how=how,
            places={known[node]: where for node, where in self.places.items()},
            whole=tuple(known[node] for node in self.whole),
            place=place,
            raises=(),
        )

    def __str__(self) -> str:
        names = " to ".join(exchange.node.name for exchange in self.exchanges)
        products = ", ".join(node.name for node in self.products)
        return f"{names} with {products} in {self.shape.pieces} pieces"


def shapes_around(exchange: Collective, pieces: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Blocks of an exchange's values that could be cut, each with the numbers of pieces that divide them."""
    value: Tensor = exchange.node.meta["val"]
    counted = collectives.counts_rows_as_it_runs(exchange.node)
    ranks = None if counted else collectives.equal_parts(exchange.node)
    seen = [list(value.shape), *_views_of(exchange)]
    outers = {math.prod(shape[:dim]) for shape in seen for dim in range(1, len(shape))} | ({ranks} if ranks else set())
    for outer in sorted(outers):
        for number in pieces:
            found = in_pieces.place_behind(value.shape, outer, number)
            if found is not None and (found.dim or (ranks is not None and outer % ranks == 0)):
                yield outer, number


def _views_of(exchange: Collective) -> list[list[int]]:
    """The shapes in which what an exchange brings or takes is seen."""
    shapes, node = [], exchange.inputs[0]
    for _ in range(_LOOKED_THROUGH):
        if not (per_token.is_view(node.target) or node.target is torch.ops.aten.clone.default):
            break
        node = node.all_input_nodes[0]
        if _same_rows(node, exchange):
            shapes.append(list(node.meta["val"].shape))
    for wait in exchange.waits:
        shapes += [list(user.meta["val"].shape) for user in wait.users if per_token.is_view(user.target)]
    return shapes


def _same_rows(node: fx.Node, exchange: Collective) -> bool:
    return bool(node.meta["val"].numel() == exchange.inputs[0].meta["val"].numel())


class Regions:
    """Finds regions in one program."""

    def __init__(self, order: Order) -> None:
        self.order, self.written = order, order.rewritten()

    def reason_against(self, exchange: Collective) -> str | None:
        """Why an exchange cannot travel in pieces, whatever stands around it."""
        value = exchange.node.meta["val"]
        if not exchange.plain or len(exchange.waits) != 1:
            return NOT_PLAIN
        if not all(isinstance(size, int) for node in (exchange.node, exchange.inputs[0]) for size in _shape(node)):
            return SYMBOLIC
        if {exchange.node, exchange.inputs[0], *exchange.waits} & self.written:
            return WRITTEN
        return None if value.dim() else LARGE

    def region(self, exchange: Collective, shape: Shape) -> Region | str:
        """The region of a shape around an exchange, or why there is none."""
        grown = _grown_before(exchange, shape) if shape.way == "before" else _grown_after(self, exchange, shape)
        return grown if isinstance(grown, str) else self._placed(grown)

    def _placed(self, region: Region) -> Region | str:
        """Where pieces of it can be computed."""
        position = self.order.position
        own = {*region.calls, *(node for exchange in region.exchanges for node in exchange.nodes)}
        if not self.written.isdisjoint((*own, *region.given)):
            return WRITTEN
        ends = region.exit.waits if region.exit is not None else ()
        outside = [user for node in own.difference(ends) for user in node.users if user not in own]
        outside += [region.exit.node] if region.exit is not None else []
        place = min(outside, key=position.__getitem__)
        needed = [
            node for node in region.given if region.entry is None or node not in region.entry.node.all_input_nodes
        ]
        found = raised(self.order, needed, place, self.written)
        if isinstance(found, str):
            return found
        if not own.isdisjoint((*found, *(source for node in found for source in node.all_input_nodes))):
            return READ
        return replace(region, place=place, raises=tuple(found))


def _shape(node: fx.Node) -> Sequence[Any]:
    value = node.meta["val"]
    return value.shape if isinstance(value, Tensor) else (None,)


def _places_of(exchange: Collective, shape: Shape) -> tuple[Place, Place, Cut] | str:
    """Where what is sent and what arrives are cut."""
    sent = in_pieces.place_behind(exchange.inputs[0].meta["val"].shape, shape.outer, shape.pieces)
    if collectives.counts_rows_as_it_runs(exchange.node):  # has another number of rows on either side: none is cut
        arrived = in_pieces.place_behind(exchange.node.meta["val"].shape, shape.outer, shape.pieces)
        sent = arrived if arrived is not None and arrived.dim > 0 else None
    if sent is None:
        return LARGE
    how = in_pieces.cut(exchange.node, {exchange.inputs[0]: sent}, shape.pieces)
    if isinstance(how, str):
        return how
    assert isinstance(how.place, Place)
    return sent, how.place, how


def _grown_after(regions: Regions, exchange: Collective, shape: Shape) -> Region | str:
    """From an exchange down to the next, or to the last products."""
    found = _places_of(exchange, shape)
    if isinstance(found, str):
        return found
    how: dict[fx.Node, Cut] = {exchange.node: found[2]}
    places = dict.fromkeys((exchange.node, *exchange.waits), found[1])
    calls, leave, why = list[fx.Node](), list[Collective](), NO_PRODUCT
    queue, seen = [user for wait in exchange.waits for user in wait.users], set[fx.Node]()
    heapq.heapify(queue)
    while queue and len(calls) < _MOST:
        node = heapq.heappop(queue)
        if node in seen or node.op == "output":
            continue
        seen.add(node)
        cut = _taken(node, places, shape.pieces)
        if isinstance(cut, str):
            why = cut if in_pieces.is_product(node) and why == NO_PRODUCT else why
            continue
        how[node] = cut
        other = collectives.view(node)
        if other is not None:
            leave.append(other)
            continue
        calls.append(node)
        assert isinstance(cut.place, Place)
        places[node] = cut.place
        for user in node.users:
            heapq.heappush(queue, user)
    if shape.way == "around":
        usable = [other for other in leave if regions.reason_against(other) is None]
        if not usable:
            return NO_COMBINE
        last = usable[0]
        wanted = _reached([last.inputs[0]], calls, attrgetter("all_input_nodes"))
        places |= dict.fromkeys((last.node, *last.waits), how[last.node].place)  # type: ignore[arg-type]
    else:
        last = None
        products = [node for node in calls if in_pieces.is_product(node)]
        wanted = _reached(products, calls, attrgetter("all_input_nodes"))
    calls = [node for node in calls if node in wanted]
    if not any(in_pieces.is_product(node) for node in calls):
        return why
    return _region(shape, exchange, last, calls, how, places)


def _taken(node: fx.Node, places: Mapping[fx.Node, Place], pieces: int) -> Cut | str:
    """How a call takes what is in pieces; elements of several results are taken from those."""
    if not isinstance(node.meta.get("val"), Tensor):
        return per_token.UNKNOWN
    given = {source: places[source] for source in node.all_input_nodes if source in places}
    return in_pieces.cut(node, given, pieces) if given else per_token.UNKNOWN


def _grown_before(exchange: Collective, shape: Shape) -> Region | str:
    """From the products that make what an exchange takes, down to it."""
    found = _places_of(exchange, shape)
    if isinstance(found, str):
        return found
    sent, arrived, cut = found
    how: dict[fx.Node, Cut] = {exchange.node: cut}
    places = {exchange.inputs[0]: sent, **dict.fromkeys((exchange.node, *exchange.waits), arrived)}
    calls, why, stack = list[fx.Node](), NO_PRODUCT, [exchange.inputs[0]]
    while stack and len(calls) < _MOST:
        node = stack.pop()
        if node in how:
            continue
        wanted = in_pieces.wanted(node, places[node], shape.pieces)
        if isinstance(wanted, str):
            why = wanted if in_pieces.is_product(node) else why
            continue
        if any(places.get(source, place) != place for source, place in wanted.cut.items()):
            return per_token.DIFFERENT_DIMS
        how[node] = wanted
        calls.append(node)
        if not in_pieces.is_product(node):
            places |= wanted.cut
            stack += wanted.cut
    below = _reached([node for node in calls if in_pieces.is_product(node)], calls, attrgetter("users"))
    calls = sorted(node for node in calls if node in below)
    if not calls:
        return why
    return _region(shape, None, exchange, calls, how, places)


def _reached(begins: Sequence[fx.Node], calls: Sequence[fx.Node], onwards: Callable[[fx.Node], Any]) -> set[fx.Node]:
    """Of some calls, those that are reached from some of them, these included, over what comes next to each."""
    own, found, stack = set(calls), set[fx.Node](), list(begins)
    while stack:
        node = stack.pop()
        if node in own and node not in found:
            found.add(node)
            stack += onwards(node)
    return found


def _region(
    shape: Shape,
    entry: Collective | None,
    last: Collective | None,
    calls: Sequence[fx.Node],
    how: Mapping[fx.Node, Cut],
    places: Mapping[fx.Node, Place],
) -> Region:
    """A region that is yet to be placed."""
    exchanges = [exchange for exchange in (entry, last) if exchange is not None]
    own = {*calls, *(exchange.node for exchange in exchanges)}
    made = [*(entry.waits[:1] if entry is not None else ()), *calls]
    whole = _put_together(made, own, last)
    kept = {node: how[node] for node in own}
    values = {*made, *own, *(wait for exchange in exchanges for wait in exchange.waits)}
    return Region(
        shape,
        entry,
        last,
        tuple(calls),
        kept,
        {node: place for node, place in places.items() if node in values},
        tuple(whole),
        exchanges[0].node,
    )


def _put_together(made: Sequence[fx.Node], own: set[fx.Node], last: Collective | None) -> list[fx.Node]:
    """The values that are read elsewhere; of views, what they are views of, since a view of that costs nothing."""
    inside, needed = {*made}, set[fx.Node]()
    for node in reversed(made):
        outside = any(user not in own for user in node.users)
        if not outside and node not in needed:
            continue
        source = node.all_input_nodes[0]
        if per_token.is_view(node.target) and source in inside:
            needed.discard(node)
            needed.add(source)
        else:
            needed.add(node)
    return [node for node in made if node in needed]
