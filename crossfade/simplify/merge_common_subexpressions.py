"""Values computed twice are computed once."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from crossfade.graph import collectives
from crossfade.graph.aliasing import Aliasing
from crossfade.graph.effects import alias_roots, written_inputs
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.program import Program, paused_garbage_collection, tensor_bytes
from crossfade.graph.value_numbering import ValueNumbers, aten_name, is_chosen_by_numbers, is_list

# fmt: off
_ALWAYS_VIEWS = frozenset({
    "alias", "as_strided", "detach", "diagonal", "expand", "permute", "select", "slice", "split", "split_with_sizes",
    "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view", "view_as_complex", "view_as_real",
    "_unsafe_view",
})
# fmt: on

_LEFT_TO_ANOTHER = "collectives are left to merge-duplicate-collectives"
_OTHER_NUMBERS = "its numbers may differ on another rank, and it leads to a collective or comes from one"
_HELD = "it would be held in memory between its uses"
_TWICE = "it is a result of the program, which keeps a tensor of its own"
_MAY_COPY = "it may be a view or a copy, and its memory is written or returned"


@dataclass(frozen=True)
class MergeCommonSubexpressions(Pass):
    """Let a computation take the result of an earlier one of the same operator on the same values.

    Random draws differ, values read before and after a write differ, and no two results become one memory.
    What communicates or waits is left to `merge-duplicate-collectives`, which decides by what all ranks have in common.
    So that it still can, operators that take numbers to choose a part or to scale by are not merged where they lead to
    a collective or come from one: the numbers may be equal on this rank only. `alike` promises that all ranks have this
    very program. What would hold more than `held_bytes` over more than `near` nodes is computed again, as activation
    checkpointing wants it; sizes that are the same expression are one value.

    Before:
        x: f32[4] = input("x")
        a: f32[4] = aten.neg(x)
        b: f32[4] = aten.exp(a)
        c: f32[4] = aten.neg(x)
        d: f32[4] = aten.exp(c)
        y: f32[4] = aten.add.Tensor(b, d)
        return output("y", y)

    After:
        x: f32[4] = input("x")
        a: f32[4] = aten.neg(x)
        b: f32[4] = aten.exp(a)
        y: f32[4] = aten.add.Tensor(b, b)
        return output("y", y)
    """

    name = "merge-common-subexpressions"
    numerics = Numerics.BITWISE
    nested = True

    alike: bool = False
    held_bytes: int = 65536
    near: int = 32

    def run(self, program: Program) -> PassResult:
        """One walk that numbers values; equal ones meet under one key."""
        with paused_garbage_collection():
            merger = _Merger(program, self)
            for index, node in enumerate(merger.nodes):
                merger.visit(index, node)
            return merger.finish()


class _Merger:
    """The walk: which values are known, which stand for which, and what was declined."""

    def __init__(self, program: Program, options: MergeCommonSubexpressions) -> None:
        self.program, self.options = program, options
        self.nodes = list(program.graph.nodes)
        self.roots = alias_roots(self.nodes)
        self.values = ValueNumbers(self.roots)
        self.aliasing = Aliasing(program)
        self.lives = _Lives(self.nodes, self.roots)
        self.communicating = set() if options.alike else _communicating(self.nodes)
        results = [value for value in program.results if isinstance(value, fx.Node)]
        self.returned, self.returned_memory = set(results), {self.roots[value] for value in results}
        self.first: dict[int, fx.Node] = {}
        self.starts: dict[Hashable, fx.Node] = {}
        self.again: set[fx.Node] = set()
        self.replaced: dict[fx.Node, fx.Node] = {}
        self.verdicts: list[Verdict] = []

    def visit(self, index: int, node: fx.Node) -> None:
        """Number a node, and let an equal earlier one stand for it if that is not seen."""
        number = self.values.number(node)
        earlier = self.first.setdefault(number, node)
        if collectives.is_collective(node) and not written_inputs(node):
            earlier = self.starts.setdefault(self.values.key_of_call(node), node)
        if earlier is node:
            return
        if is_list(node):  # merged element by element, below
            self.again |= {node} if node.users else set()
            return
        reason = self.reason_against(index, node, earlier)
        if reason is None:
            self.replace(node, earlier)
            return
        self.verdicts.append(Verdict.of(node, Outcome.LEFT, reason, detail=f"equal to {earlier.name}"))
        self.first[number] = node
        if reason is _MAY_COPY:
            self.values.tell_apart(node)

    def reason_against(self, index: int, node: fx.Node, earlier: fx.Node) -> str | None:
        """Why an equal value may not stand for a node, or None."""
        if collectives.communicates(node.target):
            return _LEFT_TO_ANOTHER
        if node in self.communicating and is_chosen_by_numbers(node):
            return _OTHER_NUMBERS
        if not isinstance(node.meta.get("val"), Tensor):
            return None
        if node in self.returned and earlier in self.returned and self.roots[node] is self.roots[earlier]:
            return _TWICE
        fixed = self.roots[node] in self.returned_memory or self.aliasing.is_written(node)
        if fixed and self.roots[node] is not node and not _is_view(node.target):
            return _MAY_COPY
        if (reason := self.aliasing.may_replace(node, earlier)) is not None:
            return reason
        far = index - self.lives.end(earlier) > self.options.near
        return _HELD if far and self.lives.bytes(earlier) > self.options.held_bytes else None

    def replace(self, node: fx.Node, earlier: fx.Node) -> None:
        """Give a node's users the earlier value; the program's results are rewritten once, at the end."""
        if isinstance(node.meta.get("val"), Tensor):
            self.aliasing.replaced(node, earlier)
        for user in list(node.users):
            if user.op != "output":
                user.replace_input_with(node, earlier)
        if node in self.returned:
            self.returned.add(earlier)
            self.returned_memory.add(self.roots[earlier])
        self.lives.extend(earlier, node)
        self.replaced[node] = earlier

    def finish(self) -> PassResult:
        """Rewrite the results, and erase what was merged and what only that used."""
        if any(value in self.replaced for value in self.program.results if isinstance(value, fx.Node)):
            self.program.set_results([self.replaced.get(value, value) for value in self.program.results])
        merged = len(self.replaced)
        for node in reversed(self.nodes):
            if not node.users and (node in self.replaced or node in self.again):
                self.program.graph.erase_node(node)
        counts = {"merged": merged, "left": len(self.verdicts)}
        return PassResult(bool(merged), counts, tuple(self.verdicts))


class _Lives:
    """How long memory is in use, and how much of it there is."""

    def __init__(self, nodes: list[fx.Node], roots: dict[fx.Node, fx.Node]) -> None:
        self.roots = roots
        self.last_use = {roots[source]: index for index, node in enumerate(nodes) for source in node.all_input_nodes}
        self.always = len(nodes)

    def end(self, node: fx.Node) -> int:
        """The position of the last use of a node's memory; the end, if it is the program's before and after."""
        root = self.roots[node]
        return self.always if root.op in ("placeholder", "get_attr") else self.last_use.get(root, 0)

    def bytes(self, node: fx.Node) -> int:
        """The size of the memory behind a node."""
        return tensor_bytes(self.roots[node].meta.get("val"))

    def extend(self, node: fx.Node, other: fx.Node) -> None:
        """Let a node be used wherever another one is."""
        root = self.roots[node]
        self.last_use[root] = max(self.last_use.get(root, 0), self.last_use.get(self.roots[other], 0))


def _communicating(nodes: list[fx.Node]) -> set[fx.Node]:
    """The nodes that lead to something that communicates, or come from it."""
    starts = {node for node in nodes if node.op == "call_function" and collectives.communicates(node.target)}
    if not starts:
        return set()
    before, behind = set(starts), set(starts)
    for node in reversed(nodes):
        if node in before:
            before.update(node.all_input_nodes)
    for node in nodes:
        if not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    return before | behind


def _is_view(target: Any) -> bool:
    return target is operator.getitem or aten_name(target) in _ALWAYS_VIEWS
