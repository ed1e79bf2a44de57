"""Chains of matrix products."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.cost.machine import Machine
from crossfade.graph.aliasing import Aliasing
from crossfade.graph.operators import arguments
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict, from_context
from crossfade.graph.program import Program
from crossfade.graph.splice import erase_if_dead, splice
from crossfade.simplify.products import CallCost, CostComparison, is_only_read_by, product_of_sizes, sizes_of

_MM = torch.ops.aten.mm.default
_LONGEST = 48
"""Finding the best order takes the third power of a chain's length."""

Tree = int | tuple[Any, Any]
"""How a chain is computed: a matrix by its position, or the product of two trees."""


@dataclass(frozen=True)
class AssociateMatmuls(Pass):
    """Compute a chain of products in the order that costs least, where nothing else reads what lies in between.

    That is the order of the fewest floating-point operations, taken if it moves no more bytes either; with a `machine`
    the order that is fastest there. Sums are taken in another order, and other products are rounded on the way.

    Also known as: matrix chain ordering, `torch.linalg.multi_dot`; the associative reordering of dots in XLA's
    algebraic simplifier.

    Before:
        a: f32[64, 2] = input("a")
        b: f32[2, 64] = input("b")
        c: f32[64, 2] = input("c")
        mm: f32[64, 64] = aten.mm(a, b)
        mm_1: f32[64, 2] = aten.mm(mm, c)
        return output("y", mm_1)

    After:
        a: f32[64, 2] = input("a")
        b: f32[2, 64] = input("b")
        c: f32[64, 2] = input("c")
        mm_2: f32[2, 2] = aten.mm(b, c)
        mm_3: f32[64, 2] = aten.mm(a, mm_2)
        return output("y", mm_3)
    """

    name = "associate-matmuls"
    numerics = Numerics.REASSOCIATES

    machine: Machine | None = from_context()

    def run(self, program: Program) -> PassResult:
        """Decide for each chain as a whole."""
        aliasing = Aliasing(program)
        verdicts = [self._reorder(program, root, aliasing) for root in _roots(program.graph)]
        return PassResult.of(verdicts, Outcome.REPLACED, done="chains")

    def _reorder(self, program: Program, root: fx.Node, aliasing: Aliasing) -> Verdict:
        chain = Chain.of(root)
        if len(chain.factors) > _LONGEST:
            return Verdict.of(root, Outcome.LEFT, "its chain is too long to try all orders")
        best = chain.best(self._price)
        if best == chain.tree:
            return Verdict.of(root, Outcome.LEFT, "no other order of its chain is cheaper")
        compared = CostComparison(tuple(chain.calls(chain.tree)), tuple(chain.calls(best)))
        reason, numbers = compared.reason_against(self.machine), compared.on(self.machine)
        if reason is None and any(aliasing.is_written(factor) for factor in chain.factors):
            reason = "it would read later what is written to"
        if reason is None:
            reason = _replace(program, root, chain.factors, best, aliasing)
        if reason is not None:
            return Verdict.of(root, Outcome.LEFT, reason, detail=numbers)
        return Verdict.of(root, Outcome.REPLACED, "another order of its chain is cheaper", detail=numbers)

    def _price(self, call: CallCost) -> float:
        return call.flops if self.machine is None else call.seconds(self.machine)


@dataclass(frozen=True)
class Chain:
    """Matrices that are multiplied one after another, in which order, and their sizes: one more than matrices."""

    factors: tuple[fx.Node, ...]
    tree: Tree
    sizes: tuple[int, ...]
    value: Tensor

    @classmethod
    def of(cls, root: fx.Node) -> Chain:
        """The chain that a product computes, as far up as nothing else reads the products in it."""
        factors: list[fx.Node] = []
        done: list[Tree] = []
        waiting: list[tuple[fx.Node, bool]] = [(root, False)]
        while waiting:
            node, is_ready = waiting.pop()
            if is_ready:
                right, left = done.pop(), done.pop()
                done.append((left, right))
            elif node is root or _is_inner(node):
                left_node, right_node = _factors(node)
                waiting += [(node, True), (right_node, False), (left_node, False)]
            else:
                done.append(len(factors))
                factors.append(node)
        sizes = (sizes_of(factors[0])[0], *(sizes_of(factor)[1] for factor in factors))
        return cls(tuple(factors), done[0], sizes, root.meta["val"])

    def calls(self, tree: Tree) -> Iterable[CallCost]:
        """The products of an order."""
        if isinstance(tree, tuple):
            left, right = tree
            yield from self.calls(left)
            yield from self.calls(right)
            yield self._call(_first(left), _first(right), _last(right) + 1)

    def best(self, price: Callable[[CallCost], float]) -> Tree:
        """The order of the lowest price, by the usual dynamic program; the first one on the left among equals."""
        count = len(self.factors)
        cost = {(i, i + 1): 0.0 for i in range(count)}
        tree: dict[tuple[int, int], Tree] = {(i, i + 1): i for i in range(count)}
        for length in range(2, count + 1):
            for start in range(count - length + 1):
                end = start + length
                options = [
                    (cost[start, cut] + cost[cut, end] + price(self._call(start, cut, end)), -cut)
                    for cut in range(start + 1, end)
                ]
                cost[start, end], cut = min(options)
                tree[start, end] = tree[start, -cut], tree[-cut, end]
        return tree[0, count]

    def _call(self, start: int, cut: int, end: int) -> CallCost:
        return product_of_sizes(self.sizes[start], self.sizes[cut], self.sizes[end], self.value)


def _first(tree: Tree) -> int:
    while isinstance(tree, tuple):
        tree = tree[0]
    return tree


def _last(tree: Tree) -> int:
    while isinstance(tree, tuple):
        tree = tree[1]
    return tree


def _factors(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    given = arguments(node)
    return given["self"], given["mat2"]


def _is_inner(node: fx.Node) -> bool:
    """Whether all that reads a product is one argument of another one."""
    user = next(iter(node.users), None)
    return node.target is _MM and user is not None and user.target is _MM and is_only_read_by(node, user)


def _roots(graph: fx.Graph) -> list[fx.Node]:
    """The last product of each chain of at least two."""
    products = graph.find_nodes(op="call_function", target=_MM)
    return [product for product in products if not _is_inner(product) and any(map(_is_inner, _factors(product)))]


def _replace(
    program: Program, root: fx.Node, factors: tuple[fx.Node, ...], tree: Tree, aliasing: Aliasing
) -> str | None:
    """Compute the chain by another tree, unless that would be visible in memory: then, how."""

    def multiplied(matrices: list[Tensor], tree: Tree) -> Tensor:
        if not isinstance(tree, tuple):
            return matrices[tree]
        return torch.mm(multiplied(matrices, tree[0]), multiplied(matrices, tree[1]))

    new = splice(program, lambda *matrices: multiplied(list(matrices), tree), *factors, before=root, like=root)
    if (reason := aliasing.may_replace(root, new)) is not None:
        erase_if_dead(new)
        return reason
    aliasing.replaced(root, new)
    root.replace_all_uses_with(new)
    erase_if_dead(root)
    return None
