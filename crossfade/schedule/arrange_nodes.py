"""Nodes put in an order that is given: one that was planned before, and reviewed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import fx

from crossfade.errors import RewriteError
from crossfade.graph.order import reorder
from crossfade.graph.passes import Numerics, Pass, PassResult
from crossfade.graph.program import Program

_TO = ".."


@dataclass(frozen=True)
class ArrangeNodes(Pass):
    """Put all nodes in the given order: stretches of the order that the program has, each `first..last`, or one node.

    What plans an order for a machine (`overlap-communication`) says it in this form; plan files hold it. An order that
    is not one of all of the program's nodes is refused, and one in which something is used before it is made. The
    example's is `("x..s", "exp", "d..neg", "output")`.

    Also known as: XLA's scheduling annotations; a schedule file.

    Not run by default: a step that is compiled as a plan file says (`compile_step(..., plan=...)`) runs it.

    Before:
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        d: f32[4] = c10d.wait_tensor(s)
        neg: f32[4] = aten.neg(d)
        exp: f32[4] = aten.exp(x)
        return output("y", neg), output("z", exp)

    After:
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        exp: f32[4] = aten.exp(x)
        d: f32[4] = c10d.wait_tensor(s)
        neg: f32[4] = aten.neg(d)
        return output("y", neg), output("z", exp)
    """

    name = "arrange-nodes"
    numerics = Numerics.BITWISE

    order: tuple[str, ...] = ()

    def run(self, program: Program) -> PassResult:
        """Put the nodes in order."""
        changed = bool(self.order) and reorder(program.graph, list(self._nodes(program)))
        return PassResult(changed, {"stretches": len(self.order)})

    def _nodes(self, program: Program) -> Iterator[fx.Node]:
        nodes = list(program.graph.nodes)
        position = {node.name: index for index, node in enumerate(nodes)}
        for stretch in self.order:
            first, _, last = stretch.partition(_TO)
            if unknown := [name for name in (first, last or first) if name not in position]:
                raise RewriteError(
                    f"an order with {unknown[0]!r}, which is no node of the program",
                    expected="an order of this program's nodes",
                    remedy="plan it again",
                )
            yield from nodes[position[first] : position[last or first] + 1]


def stretches(program: Program, order: Sequence[str]) -> tuple[str, ...]:
    """An order of a program's nodes by name, in stretches of the order that they have.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4] = input("x")
    ... a: f32[4] = aten.neg(x)
    ... b: f32[4] = aten.exp(x)
    ... c: f32[4] = aten.neg(b)
    ... return output("a", a), output("c", c)
    ... ''')
    >>> stretches(program, ["x", "b", "c", "a", "output"])
    ('x', 'b..c', 'a', 'output')
    """
    position = {node.name: index for index, node in enumerate(program.graph.nodes)}
    cuts = [index for index, (name, after) in enumerate(pairwise(order), 1) if position[after] != position[name] + 1]
    pieces = [order[start:end] for start, end in pairwise([0, *cuts, len(order)])]
    return tuple(piece[0] if len(piece) == 1 else f"{piece[0]}{_TO}{piece[-1]}" for piece in pieces)
