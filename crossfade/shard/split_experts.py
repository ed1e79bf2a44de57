"""Routed experts spread over the ranks of an axis: rows travel to the ranks of their experts, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from crossfade.graph import collectives
from crossfade.graph.exchange_rows import row_routes
from crossfade.graph.passes import Numerics, Pass, PassResult, Verdict
from crossfade.graph.per_token import Split, describe_again, elements, work_on_part
from crossfade.graph.program import Program
from crossfade.graph.splice import after, erase_if_dead, splice
from crossfade.graph.strides import laid_out
from crossfade.shard.expert_regions import ExpertRegion, Experts, GroupedProduct, find_experts, seen_through
from crossfade.shard.gather_parameters import part_of

_COUNTED = "tells the ranks how many rows each expert is sent"
_SENT = "sends rows to the ranks of their experts"
_BROUGHT_BACK = "brings rows back from the ranks of their experts"


@dataclass(frozen=True)
class SplitExperts(Pass):
    """Let each rank have a part of the experts, whole ones, and send rows to the ranks that have theirs.

    Experts are the matrices of products of groups of rows, each group with its own. Their rows, in the order of
    experts already, go where their experts are by an all-to-all of as many rows as there are, none dropped; what is
    computed of each row by itself between two products is computed there; and results come back in their old order.
    So it is in the backward. Buffers have room for as many rows as could arrive: products skip what is empty. With
    `rows_alone`, what shares a value among rows is computed where these came from, so that autograd may differentiate
    the result.

    Also known as: expert parallelism; dropless (capacity-free) routing, as of MegaBlocks; the token dispatcher of
    Megatron, `ExpertParallel` of torchtitan.

    Before:
        w: bf16[4, 8, 16] = parameter("w")
        x: bf16[6, 8] = input("x")
        ends: i32[4] = input("ends")
        y: bf16[6, 16] = aten._grouped_mm(x, w, ends)
        return output("y", y)

    After:
        w: bf16[2, 8, 16] = parameter("w")
        x: bf16[6, 8] = input("x")
        ends: i32[4] = input("ends")
        _to_copy: i64[4] = aten._to_copy(ends, dtype=i64)
        new_zeros: i64[1] = aten.new_zeros(ends, [1], dtype=i64, pin_memory=False)
        cat: i64[5] = aten.cat([new_zeros, _to_copy], -1)
        slice_1: i64[4] = aten.slice.Tensor(cat, -1, 0, 4)
        slice_2: i64[4] = aten.slice.Tensor(cat, -1, 1, 5)
        sub: i64[4] = aten.sub.Tensor(slice_2, slice_1)
        all_to_all_single: i64[4] = c10d.all_to_all_single(sub, [2, 2], [2, 2], "ep")
        wait_tensor: i64[4] = c10d.wait_tensor(all_to_all_single)
        row_routes: (i64[2], i64[2], i64[12], i64[12], i32[2]) = crossfade.row_routes(sub, wait_tensor, 2, 12)
        getitem: i64[2] = row_routes[0]
        getitem_1: i64[2] = row_routes[1]
        getitem_2: i64[12] = row_routes[2]
        getitem_3: i64[12] = row_routes[3]
        getitem_4: i32[2] = row_routes[4]
        exchange_rows: bf16[12, 8] = crossfade.exchange_rows(x, getitem, getitem_1, 12, "ep")
        wait_tensor_1: bf16[12, 8] = c10d.wait_tensor(exchange_rows)
        index_select: bf16[12, 8] = aten.index_select(wait_tensor_1, 0, getitem_2)
        y: bf16[12, 16] = aten._grouped_mm(index_select, w, getitem_4)
        index_select_1: bf16[12, 16] = aten.index_select(y, 0, getitem_3)
        exchange_rows_1: bf16[6, 16] = crossfade.exchange_rows(index_select_1, getitem_1, getitem, 6, "ep")
        wait_tensor_2: bf16[6, 16] = c10d.wait_tensor(exchange_rows_1)
        return output("y", wait_tensor_2)
    """

    name = "split-experts"
    numerics = Numerics.REASSOCIATES

    group: str = "ep"
    ranks: int = 2
    rows_alone: bool = False

    def run(self, program: Program) -> PassResult:
        """Cut the matrices, and move the rows of each region."""
        experts = find_experts(program, self.ranks, rows_alone=self.rows_alone)
        rewriting = _Rewriting(program, experts, self)
        rewriting.carry_out()
        counts = {"split": len(experts.parameters), "exchanges": len(rewriting.verdicts)}
        return PassResult(bool(experts.regions), counts, tuple(rewriting.verdicts))


class _Route(NamedTuple):
    """How rows travel: how many to and from each rank, how what arrives is put in the order of experts and back, and
    where the groups of this rank's experts end."""

    sent: fx.Node
    received: fx.Node
    order: fx.Node
    back: fx.Node
    ends: fx.Node


class _Rewriting:
    """A program on its way to experts that are spread over ranks: calls stay, what they are given changes."""

    def __init__(self, program: Program, experts: Experts, options: SplitExperts) -> None:
        self.program, self.experts = program, experts
        self.group, self.ranks = options.group, options.ranks
        self.verdicts: list[Verdict] = []
        self.region_of: dict[fx.Node, ExpertRegion] = {}
        self.products: dict[fx.Node, GroupedProduct] = {}
        self.made: dict[fx.Node, ExpertRegion] = {}
        for region in experts.regions:
            own = {product.node: product for product in region.products}
            self.products |= own
            self.region_of |= dict.fromkeys([*own, *region.inside], region)
            self.made |= dict.fromkeys(region.places, region)
        self.strides = {node: node.meta["val"].stride() for node in self.made}
        self.leaving = {node: self._users_outside(node) for node in self.made}
        self.routes: dict[fx.Node, _Route] = {}
        self.moved: dict[tuple[fx.Node, fx.Node, int], fx.Node] = {}
        self.replaced: list[fx.Node] = []

    def carry_out(self) -> None:
        """Go through the program once."""
        for node in list(self.program.graph.nodes):
            if node in self.experts.matrices:
                self._cut(node, self.experts.matrices[node])
            region = self.region_of.get(node)
            if region is not None and node in self.products:
                self._multiply(self.products[node], region)
            elif region is not None:
                self._compute(node, region.inside[node], region)
            if self.leaving.get(node):
                self._bring_back(node)
        for view in self.replaced:
            erase_if_dead(view)

    def _users_outside(self, value: fx.Node) -> list[fx.Node]:
        """Those that are given a row's value where the row came from; what is of no use itself goes."""
        region = self.made[value]
        own = {*region.inside, *(product.node for product in region.products), *elements(value)}
        outside = [user for user in value.users if user not in own]
        unused = [user for user in outside if not user.users and user.op != "output" and not user.is_impure()]
        for user in unused:
            self.program.graph.erase_node(user)
        return [user for user in outside if user not in unused]

    def _cut(self, node: fx.Node, how: Split | None) -> None:
        if node.op == "placeholder":
            node.meta["val"] = part_of(node.meta["val"], self.ranks)
        elif how is not None:
            work_on_part(self.program, node, how)

    def _multiply(self, product: GroupedProduct, region: ExpertRegion) -> None:
        node = product.node
        for operand, dim in product.rows:
            if operand not in region.places:
                node.replace_input_with(operand, self._here(operand, dim, region, node))
        node.replace_input_with(product.ends, self._route(region).ends)
        describe_again(self.program, node)

    def _compute(self, node: fx.Node, how: Split, region: ExpertRegion) -> None:
        for source, dim in how.cut.items():
            if source not in region.places:
                node.replace_input_with(source, self._here(source, dim, region, node))
        work_on_part(self.program, node, replace(how, sizes=self._sizes_here(how)))

    def _sizes_here(self, how: Split) -> Mapping[str, Any]:
        """Sizes of as many rows as there is room for."""
        place = how.place if isinstance(how.place, int) else 0
        return {
            name: [*sizes[:place], sizes[place] * self.ranks, *sizes[place + 1 :]] for name, sizes in how.sizes.items()
        }

    def _route(self, region: ExpertRegion) -> _Route:
        if region.ends not in self.routes:
            rows, ranks, group = region.rows * self.ranks, self.ranks, self.group
            first = after(self.program, region.ends)
            nodes = splice(self.program, _routes, region.ends, rows, ranks, group, before=first, like=region.ends)
            self.routes[region.ends] = _Route(*nodes[1:])
            self._account(nodes[0], _COUNTED)
        return self.routes[region.ends]

    def _here(self, value: fx.Node, dim: int, region: ExpertRegion, user: fx.Node) -> fx.Node:
        """What all ranks have of a value for this rank's experts, `dim` the one of rows: sent once, however seen."""
        route, chain = self._route(region), seen_through(value, dim)
        base, along = chain[-1]
        key = region.ends, base, along
        if key not in self.moved:
            rows, group = region.rows * self.ranks, self.group

            def send(value: Tensor, sent: Tensor, received: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
                leaving = _first(value, along)
                arrived = collectives.wait(collectives.all_to_all_rows(leaving, sent, received, rows, group))
                here = arrived.index_select(0, order)
                return arrived, here.movedim(0, along) if along else here

            arrived, here = splice(
                self.program, send, base, route.sent, route.received, route.order, before=user, like=base
            )
            self.moved[key] = here
            self._account(arrived, _SENT)
        here = self.moved[key]
        for view, place in reversed(chain[:-1]):
            if (region.ends, view, place) not in self.moved:
                self.moved[region.ends, view, place] = self._view(view, here, user)
            here = self.moved[region.ends, view, place]
        return here

    def _view(self, view: fx.Node, here: fx.Node, user: fx.Node) -> fx.Node:
        """What has been sent, as another value looked at what it was before."""
        with self.program.graph.inserting_before(user):
            copied = self.program.graph.node_copy(view)
        copied.meta = dict(view.meta)
        copied.replace_input_with(view.all_input_nodes[0], here)
        describe_again(self.program, copied)
        self.replaced.append(view)
        return copied

    def _bring_back(self, value: fx.Node) -> None:
        """Give those outside what was computed of their rows, in the order and the layout that it had."""
        region, strides, users = self.made[value], self.strides[value], self.leaving[value]
        route, dim, rows, group = self._route(region), region.places[value], region.rows, self.group

        def bring(value: Tensor, sent: Tensor, received: Tensor, back: Tensor) -> tuple[Tensor, Tensor]:
            leaving = _first(value, dim).index_select(0, back)
            arrived = collectives.wait(collectives.all_to_all_rows(leaving, sent, received, rows, group))
            return arrived, laid_out(arrived.movedim(0, dim) if dim else arrived, strides)

        arrived, home = splice(
            self.program, bring, value, route.received, route.sent, route.back, before=value.next, like=value
        )
        self._account(arrived, _BROUGHT_BACK)
        for user in users:
            user.replace_input_with(value, home)

    def _account(self, wait: fx.Node, reason: str) -> None:
        start = collectives.started_by(wait)
        exchange = collectives.view(start) if start is not None else None
        assert exchange is not None
        self.verdicts.append(Verdict.inserted(exchange.node, reason, made_for=None, bytes=exchange.bytes))


def _routes(ends: Tensor, rows: int, ranks: int, group: str) -> tuple[Tensor, ...]:
    """The numbers of rows that arrive, and what a `_Route` has, of where the groups of this rank's rows end."""
    leaving = torch.diff(ends.to(torch.int64), prepend=ends.new_zeros(1, dtype=torch.int64))
    arriving = collectives.wait(collectives.all_to_all(leaving, ranks, group))
    return arriving, *row_routes(leaving, arriving, ranks, rows)


def _first(value: Tensor, dim: int) -> Tensor:
    """A value with a dim in front."""
    return value.movedim(dim, 0) if dim else value
