"""`map` as a loop."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from crossfade.graph.passes import Numerics, Pass, PassResult
from crossfade.graph.program import Program
from crossfade.simplify.loops import Turns
from crossfade.simplify.lowering import lower_calls


@dataclass(frozen=True)
class LowerMaps(Pass):
    """Run a `map` as a `while_loop` over the rows of what it maps, so that later passes meet one kind of loop.

    Each turn makes a new tensor of all rows, with its own row in it; a pass that writes in place saves that.

    Not in a default pipeline: torch runs `map` itself. For a backend that knows only `while_loop`:
    `simplification().before("simplify-nodes", LowerMaps())`.

    Also known as: Inductor's `decompose_map_to_while_loop`; `jax.lax.map`, which is an XLA while loop.

    Before:
        def body():
            row: f32[3] = input("row")
            k: f32[3] = input("k")
            mul: f32[3] = aten.mul.Tensor(row, k)
            return output("0", mul)
        x: f32[4, 3] = input("x")
        k: f32[3] = input("k")
        body: graph = constant("body")
        m: (f32[4, 3],) = higher_order.map_impl(body, [x], [k])
        y: f32[4, 3] = m[0]
        return output("y", y)

    After:
        def m_goes_on():
            given_0: i64[] = input("given_0")
            given_1: f32[4, 3] = input("given_1")
            given_2: f32[4, 3] = input("given_2")
            given_3: f32[3] = input("given_3")
            lt: b8[] = aten.lt.Scalar(given_0, 4)
            return lt
        def m_turn():
            given_0: i64[] = input("given_0")
            given_1: f32[4, 3] = input("given_1")
            given_2: f32[4, 3] = input("given_2")
            given_3: f32[3] = input("given_3")
            view: i64[1] = aten.view(given_0, [1])
            index_select: f32[1, 3] = aten.index_select(given_2, 0, view)
            squeeze: f32[3] = aten.squeeze.dim(index_select, 0)
            mul: f32[3] = aten.mul.Tensor(squeeze, given_3)
            unsqueeze: f32[1, 3] = aten.unsqueeze(mul, 0)
            index_copy: f32[4, 3] = aten.index_copy(given_1, 0, view, unsqueeze)
            add: i64[] = aten.add.Tensor(given_0, 1)
            return output("0", add), output("1", index_copy)
        x: f32[4, 3] = input("x")
        k: f32[3] = input("k")
        m_goes_on: graph = constant("m_goes_on")
        m_turn: graph = constant("m_turn")
        full: i64[] = aten.full([], 0, dtype=i64, device=device("cpu"))
        empty: f32[4, 3] = aten.empty.memory_format([4, 3], dtype=f32, device=device("cpu"))
        while_loop: (i64[], f32[4, 3]) = higher_order.while_loop(m_goes_on, m_turn, (full, empty), (x, k))
        y: f32[4, 3] = while_loop[1]
        return output("y", y)
    """

    name = "lower-maps"
    numerics = Numerics.BITWISE
    nested = True

    def run(self, program: Program) -> PassResult:
        """Lower each call whose sizes and memory are known."""

        def lower(node: fx.Node) -> str | None:
            called, rows, others = (*node.args, *node.kwargs.values())
            return Turns(program, node, called, (), rows, others).lower()  # type: ignore[arg-type]

        return lower_calls(program, ("map_impl",), "a loop does the same", lower)
