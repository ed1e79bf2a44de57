"""`scan` as a loop."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from crossfade.graph.passes import Numerics, Pass, PassResult
from crossfade.graph.program import Program
from crossfade.simplify.loops import Turns
from crossfade.simplify.lowering import lower_calls


@dataclass(frozen=True)
class LowerScans(Pass):
    """Run a `scan` as a `while_loop` that carries what the scan does, so that later passes meet one kind of loop.

    Each turn makes a new tensor of all rows, with its own row in it; a pass that writes in place saves that.

    Not in a default pipeline: torch runs `scan` itself. For a backend that knows only `while_loop`:
    `simplification().before("simplify-nodes", LowerScans())`.

    Also known as: Inductor's `decompose_scan_to_while_loop`; `jax.lax.scan`, which is an XLA while loop.

    Before:
        def body():
            total: f32[3] = input("total")
            row: f32[3] = input("row")
            add: f32[3] = aten.add.Tensor(total, row)
            neg: f32[3] = aten.neg(add)
            return output("0", add), output("1", neg)
        start: f32[3] = input("start")
        x: f32[4, 3] = input("x")
        body: graph = constant("body")
        s: (f32[3], f32[4, 3]) = higher_order.scan(body, [start], [x], [])
        last: f32[3] = s[0]
        y: f32[4, 3] = s[1]
        return output("last", last), output("y", y)

    After:
        def s_goes_on():
            given_0: i64[] = input("given_0")
            given_1: f32[3] = input("given_1")
            given_2: f32[4, 3] = input("given_2")
            given_3: f32[4, 3] = input("given_3")
            lt: b8[] = aten.lt.Scalar(given_0, 4)
            return lt
        def s_turn():
            given_0: i64[] = input("given_0")
            given_1: f32[3] = input("given_1")
            given_2: f32[4, 3] = input("given_2")
            given_3: f32[4, 3] = input("given_3")
            view: i64[1] = aten.view(given_0, [1])
            index_select: f32[1, 3] = aten.index_select(given_3, 0, view)
            squeeze: f32[3] = aten.squeeze.dim(index_select, 0)
            add: f32[3] = aten.add.Tensor(given_1, squeeze)
            neg: f32[3] = aten.neg(add)
            unsqueeze: f32[1, 3] = aten.unsqueeze(neg, 0)
            index_copy: f32[4, 3] = aten.index_copy(given_2, 0, view, unsqueeze)
            add_1: i64[] = aten.add.Tensor(given_0, 1)
            return output("0", add_1), output("1", add), output("2", index_copy)
        start: f32[3] = input("start")
        x: f32[4, 3] = input("x")
        s_goes_on: graph = constant("s_goes_on")
        s_turn: graph = constant("s_turn")
        full: i64[] = aten.full([], 0, dtype=i64, device=device("cpu"))
        empty: f32[4, 3] = aten.empty.memory_format([4, 3], dtype=f32, device=device("cpu"))
        while_loop: (i64[], f32[3], f32[4, 3]) = higher_order.while_loop(s_goes_on, s_turn, (full, start, empty), (x,))
        last: f32[3] = while_loop[1]
        y: f32[4, 3] = while_loop[2]
        return output("last", last), output("y", y)
    """

    name = "lower-scans"
    numerics = Numerics.BITWISE
    nested = True

    def run(self, program: Program) -> PassResult:
        """Lower each call whose sizes and memory are known."""

        def lower(node: fx.Node) -> str | None:
            called, carried, rows, others = (*node.args, *node.kwargs.values())
            return Turns(program, node, called, carried, rows, others).lower()  # type: ignore[arg-type]

        return lower_calls(program, ("scan",), "a loop does the same", lower)
