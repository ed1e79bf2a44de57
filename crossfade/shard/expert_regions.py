"""What routed experts compute in a program: products of sorted rows with a matrix for each group, and what is between.

A model routes each token to a few experts by sorting rows by their expert and telling where each expert's rows end;
everything that is multiplied group by group with the same ends belongs to one region, forward and backward. Found are
the rows that experts are given, what is computed of each row by itself between two products, the rows that are used
outside, and the matrices. Nothing is said about how rows were sorted: what a product means follows from its ends.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from crossfade.errors import RewriteError
from crossfade.graph import per_token
from crossfade.graph.operators import RENAMING, REORDERING, arguments, permutation_of
from crossfade.graph.per_token import Split
from crossfade.graph.private import schema_of
from crossfade.graph.program import InputKind, Output, OutputKind, Program, source_line

_aten = torch.ops.aten

_FORWARD, _BACKWARD = "transformers::grouped_mm_fallback", "transformers::grouped_mm_fallback_backward"
_OF_ROWS, _OF_GROUPS = "rows", "groups"


@dataclass(frozen=True)
class GroupedProduct:
    """One product of groups of rows, each with the matrix of its group, or with other rows of its group.

    `rows` are the operands that are rows, with the dim along which these lie, `matrices` the operand with one matrix a
    group; `results` has for each result whether it has rows or a matrix a group, and along which dim.
    """

    node: fx.Node
    ends: fx.Node
    rows: tuple[tuple[fx.Node, int], ...]
    matrices: fx.Node | None
    results: tuple[tuple[str, int], ...]

    def results_of(self, kind: str) -> Iterator[tuple[fx.Node, int]]:
        """The nodes of results of a kind, with the dim of rows or groups."""
        if len(self.results) == 1:
            if self.results[0][0] == kind:
                yield self.node, self.results[0][1]
            return
        for element in per_token.elements(self.node):
            found, dim = self.results[element.args[1]]  # type: ignore[index]
            if found == kind:
                yield element, dim


@dataclass(frozen=True)
class ExpertRegion:
    """Everything that is multiplied by the same ends of groups, and the calls between, each with how it takes rows."""

    ends: fx.Node
    products: tuple[GroupedProduct, ...]
    inside: Mapping[fx.Node, Split]
    places: Mapping[fx.Node, int]
    """The dim of rows of each value that is made inside."""
    rows: int
    """How many rows there are, in all groups and behind them."""

    @property
    def groups(self) -> int:
        """How many experts there are."""
        return int(self.ends.meta["val"].shape[0])


@dataclass(frozen=True)
class Experts:
    """The regions of a program, the parameters that are their matrices, and every value with one entry an expert."""

    regions: tuple[ExpertRegion, ...]
    parameters: tuple[str, ...]
    matrices: Mapping[fx.Node, Split | None] = field(default_factory=dict)
    """The matrices and their gradients, with how a call works on a part of them; None for inputs and products."""

    def __str__(self) -> str:
        sizes = ", ".join(f"{region.groups} experts for {region.rows} rows" for region in self.regions)
        return f"{sizes or 'no experts'}: {', '.join(self.parameters)}"


def grouped_product(node: fx.Node) -> GroupedProduct | None:
    """What a node multiplies group by group; None if it does something else."""
    name = getattr(schema_of(node.target), "name", "") if node.op == "call_function" else ""
    if name == "aten::_grouped_mm":
        return _by_operands(node)
    if name not in (_FORWARD, _BACKWARD):
        return None
    given = arguments(node)
    rows, matrices, ends = given["input"], given["weight"], given["offs"]
    if name == _FORWARD:
        return GroupedProduct(node, ends, ((rows, 0),), matrices, ((_OF_ROWS, 0),))
    both = (rows, 0), (given["grad_output"], 0)
    return GroupedProduct(node, ends, both, matrices, ((_OF_ROWS, 0), (_OF_GROUPS, 0)))


def _by_operands(node: fx.Node) -> GroupedProduct | None:
    given = arguments(node)
    left, right, ends = given["self"], given["mat2"], given.get("offs")
    if not isinstance(ends, fx.Node) or given.get("bias") is not None:
        return None
    match left.meta["val"].dim(), right.meta["val"].dim():
        case 2, 3:
            return GroupedProduct(node, ends, ((left, 0),), right, ((_OF_ROWS, 0),))
        case 3, 2:
            return GroupedProduct(node, ends, ((right, 1),), left, ((_OF_ROWS, 1),))
        case _:
            return GroupedProduct(node, ends, ((left, 1), (right, 0)), None, ((_OF_GROUPS, 0),))


def find_experts(program: Program, ranks: int, *, rows_alone: bool = False) -> Experts:
    """The experts of a program, each rank to have the same number of whole ones; refused where that cannot be.

    With `rows_alone`, nothing between two products is given anything but rows: what autograd differentiates later must
    not sum, for a vector that all rows share, over rows that came from other ranks.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... w: bf16[4, 8, 8] = parameter("w")
    ... x: bf16[6, 8] = input("x")
    ... ends: i32[4] = input("ends")
    ... y: bf16[6, 8] = aten._grouped_mm(x, w, ends)
    ... return output("y", y)
    ... ''')
    >>> print(find_experts(program, 2))
    4 experts for 6 rows: w
    """
    order = {node: index for index, node in enumerate(program.graph.nodes)}
    found = [product for node in program.graph.nodes if (product := grouped_product(node)) is not None]
    by_ends: dict[fx.Node, list[GroupedProduct]] = {}
    for product in found:
        by_ends.setdefault(product.ends, []).append(product)
    taken: set[fx.Node] = set()
    regions = tuple(_region(ends, products, order, taken, rows_alone) for ends, products in by_ends.items())
    matrices = _Matrices(program, found, order, ranks)
    return Experts(regions, *matrices.found())


def _region(
    ends: fx.Node,
    products: list[GroupedProduct],
    order: Mapping[fx.Node, int],
    taken: set[fx.Node],
    rows_alone: bool,
) -> ExpertRegion:
    """What is computed of the rows of some products, between these; what is not `taken` by another region."""
    own = {product.node for product in products}
    places = {node: dim for product in products for node, dim in product.results_of(_OF_ROWS)}
    calls: dict[fx.Node, Split] = {}
    for node in _downwards(places, order):
        if node in own or node in places or node in taken or node.op == "output":
            continue
        how = _of_each_row(node, places)
        if how is None or (rows_alone and _shared(node, how)):
            continue
        calls[node] = how
        if isinstance(how.place, int):
            places[node] = how.place
        else:
            places |= {element: how.place[element.args[1]] for element in per_token.elements(node)}  # type: ignore[index]
    inside = _leading_to_products(products, calls, places)
    taken |= inside.keys()
    kept = {node: dim for node, dim in places.items() if _maker(node) in inside or _maker(node) in own}
    operand, dim = products[0].rows[0]
    rows = operand.meta["val"].shape[dim]
    if not isinstance(rows, int):
        raise RewriteError(
            f"{rows} rows for experts ({operand.name}), whose number is known only when it runs",
            expected="as many rows at every run, by which exchanges have room for those of all ranks",
            remedy="export the model with fixed sizes, without dynamic_shapes, or leave the axis ep out of the mesh",
        )
    return ExpertRegion(ends, tuple(products), inside, kept, rows)


def _downwards(places: Mapping[fx.Node, int], order: Mapping[fx.Node, int]) -> Iterator[fx.Node]:
    """The users of some values, and of what becomes one of these meanwhile, in the order of the program."""
    queue = [(order[user], user) for node in places for user in node.users]
    heapq.heapify(queue)
    last = -1
    while queue:
        index, node = heapq.heappop(queue)
        if index == last:
            continue
        last = index
        yield node
        for made in (node, *per_token.elements(node)):
            if made in places:
                for user in made.users:
                    heapq.heappush(queue, (order[user], user))


def _of_each_row(node: fx.Node, places: Mapping[fx.Node, int]) -> Split | None:
    """How a call takes rows that it computes each by itself; None if it does not."""
    how = per_token.split(node, {source: places[source] for source in node.all_input_nodes if source in places}, 1)
    if isinstance(how, str):
        return None
    results = how.place if isinstance(how.place, tuple) else (how.place,)
    return None if per_token.SUMMED in results else how


def _shared(node: fx.Node, how: Split) -> list[fx.Node]:
    """What a call is given of numbers that are no rows, and may have a gradient."""
    values = {source: source.meta.get("val") for source in node.all_input_nodes if source not in how.cut}
    return [
        source
        for source, value in values.items()
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    ]


def _leading_to_products(
    products: list[GroupedProduct], calls: Mapping[fx.Node, Split], places: Mapping[fx.Node, int]
) -> dict[fx.Node, Split]:
    """Of some calls, those that a product's rows are computed by, in the order of the program."""
    queue = [operand for product in products for operand, dim in product.rows if places.get(operand) == dim]
    wanted = set()
    for value in queue:
        node = _maker(value)
        if node in calls and node not in wanted:
            wanted.add(node)
            queue += node.all_input_nodes
    return {node: how for node, how in calls.items() if node in wanted}


def _maker(value: fx.Node) -> fx.Node:
    """The call that makes a value: of one of several results, the one that makes all of them."""
    return value.args[0] if value.target is operator.getitem else value  # type: ignore[return-value]


def seen_through(value: fx.Node, dim: int) -> list[tuple[fx.Node, int]]:
    """A value and those that it is another view of, each with the dim that lies along `dim` in the value."""
    chain = [(value, dim)]
    while value.target in REORDERING | RENAMING:
        dim = permutation_of(value)[dim] if value.target in REORDERING else dim
        value = value.args[0]  # type: ignore[assignment]
        chain.append((value, dim))
    return chain


class _Matrices:
    """The parameters that hold experts' matrices, and what else has one entry an expert: all of it can be cut."""

    def __init__(
        self, program: Program, products: list[GroupedProduct], order: Mapping[fx.Node, int], ranks: int
    ) -> None:
        self.program, self.order, self.ranks = program, order, ranks
        self.products = {product.node: product for product in products}
        self.names = {node: item.name for item, node in program.named_inputs() if item.kind is InputKind.PARAMETER}
        self.places: dict[fx.Node, int] = {}
        self.how: dict[fx.Node, Split | None] = {}

    def found(self) -> tuple[tuple[str, ...], Mapping[fx.Node, Split | None]]:
        """The parameters' names, and every value with an entry for each expert."""
        for product in self.products.values():
            if product.matrices is not None:
                self._take(self._parameter_behind(product.matrices), 0)
            for node, dim in product.results_of(_OF_GROUPS):
                self._take(node, dim)
        parameters = tuple(self.names[node] for node in self.how if node in self.names)
        outputs = {value: out for out, value in self.program.named_results() if isinstance(value, fx.Node)}
        for node in list(self.how):
            self._check_result(node, parameters, outputs)
        for node in _downwards(self.places, self.order):
            if node.op != "output" and node not in self.how:
                self._follow(node)
                if node in self.how:
                    self._check_result(node, parameters, outputs)
        return parameters, dict(sorted(self.how.items(), key=lambda item: self.order[item[0]]))

    def _take(self, node: fx.Node, dim: int) -> None:
        self.places[node], self.how[node] = dim, None

    def _parameter_behind(self, matrices: fx.Node) -> fx.Node:
        node = matrices
        while node not in self.names:
            sources = [source for source in node.all_input_nodes if isinstance(source.meta.get("val"), Tensor)]
            if len(sources) != 1:
                raise _cannot(matrices, "multiplies experts' rows by matrices that are no parameter")
            node = sources[0]
        experts = int(node.meta["val"].shape[0])
        if experts % self.ranks:
            raise RewriteError(
                f"{experts} experts ({self.names[node]}) over {self.ranks} ranks",
                expected="as many experts on every rank",
                remedy="give the axis ep a number of ranks that divides the number of experts",
            )
        return node

    def _follow(self, node: fx.Node) -> None:
        """A call on values with an entry for each expert: a product, or something that it does to each entry."""
        given = {source: self.places[source] for source in node.all_input_nodes if source in self.places}
        product = self.products.get(node)
        if product is not None:
            if set(given) != {product.matrices} or given[product.matrices] != 0:  # type: ignore[index]
                raise _cannot(node, "uses experts' matrices for something else than a product with their rows")
            return
        how = per_token.split(node, given, self.ranks)
        if isinstance(how, str):
            raise _cannot(node, f"uses the matrices of all experts at once: {how}")
        if how.place == per_token.SUMMED or not isinstance(how.place, int) or not set(how.cut) <= set(given):
            raise _cannot(node, "uses the matrices of all experts at once")
        self.places[node], self.how[node] = how.place, how

    def _check_result(self, node: fx.Node, parameters: tuple[str, ...], outputs: Mapping[fx.Node, Output]) -> None:
        out = outputs.get(node)
        if out is not None and not (out.kind is OutputKind.GRADIENT and out.name in parameters):
            raise _cannot(node, f"is a result of its own ({out.name}), with an entry for each expert")


def _cannot(node: fx.Node, why: str) -> RewriteError:
    line = f" [{source_line(node)}]" if source_line(node) else ""
    return RewriteError(
        f"{node.name}{line} {why}",
        expected="experts' matrices that only multiply the rows of their experts",
        remedy="leave the axis ep out of the mesh, or compute that outside of the step",
    )
