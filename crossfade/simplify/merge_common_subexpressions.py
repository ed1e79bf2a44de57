"""Values computed twice are computed once."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph import collectives
from crossfade.graph.aliasing import Aliasing
from crossfade.graph.effects import alias_roots, is_pure, is_random, memory_behind, written_inputs
from crossfade.graph.operators import argument_names, defaults_of, remembered
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.private import OpOverload, schema_of, size_expression
from crossfade.graph.program import Program, paused_garbage_collection, tensor_bytes

_aten = torch.ops.aten
# fmt: off
_ALWAYS_VIEWS = frozenset({
    "alias", "as_strided", "detach", "diagonal", "expand", "permute", "select", "slice", "split", "split_with_sizes",
    "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view", "view_as_complex", "view_as_real",
    "_unsafe_view",
})
_TOLD_BY_SHAPES = frozenset({
    "expand", "permute", "reshape", "squeeze", "sym_numel", "sym_size", "sym_stride", "transpose", "unsqueeze", "view",
    "_unsafe_view",
})
# fmt: on
"""Operators whose numbers are sizes and dims, which all ranks have in common."""

_LEFT_TO_ANOTHER = "collectives are left to merge-duplicate-collectives"
_OTHER_NUMBERS = "its numbers may be others on another rank, and ranks communicate what it leads to or comes from"
_HELD = "it would be held in memory between its uses"
_TWICE = "it is a result of the program, which keeps a tensor of its own"
_MAY_COPY = "it may be a view or a copy, and its memory is written or returned"


@dataclass(frozen=True)
class MergeCommonSubexpressions(Pass):
    """Let a computation take the result of an earlier one of the same operator on the same values.

    Random draws differ, values read before and after a write differ, and no two results become one memory.
    What communicates or waits is left to `merge-duplicate-collectives`, which decides by what all ranks have in common.
    So that it still can, operators told by numbers what to do are not merged where they lead to a collective or come
    from one: the numbers may be equal on this rank only. `alike` promises that all ranks have this very program.
    What more than `held_bytes` would be held for, over more than `near` nodes, is computed again, as whoever
    checkpoints activations wants it; sizes that are the same expression are one value.

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
        self.values = _Values(self.roots)
        self.aliasing = Aliasing(program)
        self.lives = _Lives(self.nodes, self.roots)
        self.told_apart = set() if options.alike else _communicating(self.nodes)
        results = [value for value in program.results if isinstance(value, fx.Node)]
        self.returned, self.returned_memory = set(results), {self.roots[value] for value in results}
        self.first: dict[int, fx.Node] = {}
        self.starts: dict[Hashable, fx.Node] = {}
        self.again: set[fx.Node] = set()
        self.replaced: dict[fx.Node, fx.Node] = {}
        self.verdicts: list[Verdict] = []

    def visit(self, index: int, node: fx.Node) -> None:
        """Number a node, and let an equal earlier one stand for it if that is not seen."""
        pure = node.op == "call_function" and is_pure(node.target)
        number = self.values.number(node, pure)
        earlier = self.first.setdefault(number, node)
        if not pure and collectives.is_collective(node) and not written_inputs(node):
            earlier = self.starts.setdefault(self.values.key_of_call(node), node)
        if earlier is node:
            return
        if _is_list(node):  # merged element by element, below
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
        if node in self.told_apart and _is_told_by_numbers(node):
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


class _Values:
    """Numbers values so that equal numbers mean equal values. Ask in the order of the graph.

    Memory that is written has another value after each write: a reference to it names the last one.
    """

    def __init__(self, roots: dict[fx.Node, fx.Node]) -> None:
        self.roots = roots
        self.references: dict[fx.Node, tuple[Any, int]] = {}
        """What stands for a value in the key of a call that reads it: its number, marked as no argument is."""
        self.known: dict[Hashable, int] = {}
        self.last_write: dict[fx.Node, int] = {}
        self.writes = itertools.count()

    def number(self, node: fx.Node, pure: bool) -> int:
        """The number of a node's value as the node makes it; `pure` if it is known to have no effect."""
        key = self._key(node, pure or _is_function(node))
        number = self.known.setdefault(key, len(self.references))
        self.references[node] = _Reference, number
        for target in () if pure else written_inputs(node):
            write = next(self.writes)
            for owner in memory_behind(target, self.roots):
                self.last_write[owner] = write
        return number

    def tell_apart(self, node: fx.Node) -> None:
        """Let views of a value be no views of an equal one, whose memory may be another."""
        self.references[node] = _Reference, -len(self.references)

    def key_of_call(self, node: fx.Node) -> Hashable:
        """Equal for calls of one operator on equal values, however spelled: what is not a default, by its place."""
        places, defaults = _places_of(node.target)
        given: Iterable[tuple[Any, Any]] = enumerate(node.args)
        if node.kwargs:
            given = (*given, *sorted((places.get(name, name), value) for name, value in node.kwargs.items()))
        key: list[Hashable] = [id(node.target)]
        for place, value in given:
            item = self._item(value)
            if defaults.get(place, _Reference) != item:
                key += place, item
        return tuple(key)

    def _key(self, node: fx.Node, is_function: bool) -> Hashable:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and (node.op == "placeholder" or is_function):
            return "size", size_expression(value)
        if node.op == "get_attr":
            return node.op, node.target
        return self.key_of_call(node) if is_function else node

    def _item(self, value: Any) -> Hashable:
        if isinstance(value, fx.Node):
            reference = self.references[value]
            return (*reference, self._version(value)) if self.last_write else reference
        if isinstance(value, (tuple, list)):
            return tuple, *[one if type(one) is int else self._item(one) for one in value]
        return value if type(value) is int else _constant(value)

    def _version(self, node: fx.Node) -> Hashable:
        if not _is_list(node):
            return self.last_write.get(self.roots[node])
        return tuple([self.last_write.get(owner) for owner in memory_behind(node, self.roots)])


def _constant(value: Any) -> Hashable:
    """A key for what is no node; lists are to be taken apart before, unless they are constants too."""
    if type(value) is int:
        return value  # no other constant's key is a number
    if isinstance(value, (int, float, complex, slice)):
        return type(value), repr(value)  # tells 0.0 from -0.0, and NaN is itself
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return type(value), size_expression(value)
    if isinstance(value, (tuple, list)):
        return tuple, *[_constant(item) for item in value]
    return value if isinstance(value, Hashable) else (id, id(value))


@remembered
def _places_of(target: Any) -> tuple[dict[str, int], dict[Any, Hashable]]:
    """The places of an operator's arguments by their names, and the keys of their defaults by their places."""
    places = {name: place for place, name in enumerate(argument_names(target))}
    return places, {places[name]: _constant(value) for name, value in defaults_of(target).items()}


class _Reference:
    """Marks a key's part as a value's number, which no argument is."""


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


def _is_function(node: fx.Node) -> bool:
    """Whether a node's value is told by its arguments alone; that of a wait is, and nothing else of communication."""
    if node.op != "call_function":
        return False
    if collectives.is_wait(node):
        return True
    return _is_deterministic(node.target) and not (written_inputs(node) or is_random(node))


@remembered
def _is_deterministic(target: Any) -> bool:
    if collectives.communicates(target):
        return False
    if isinstance(target, OpOverload):
        return not fx.Graph().call_function(target).is_impure(impure_random=False)
    return getattr(target, "__module__", "") in ("_operator", "math", "builtins")


@remembered
def _name(target: Any) -> str:
    schema = schema_of(target)
    return schema.name.removeprefix("aten::") if schema is not None else ""


def _is_view(target: Any) -> bool:
    return target is operator.getitem or _name(target) in _ALWAYS_VIEWS


def _is_list(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (tuple, list))


def _is_told_by_numbers(node: fx.Node) -> bool:
    if node.target is operator.getitem:  # which element is no choice of a rank's, but how the list was made is
        source: Any = node.args[0]
        return _is_told_by_numbers(source)
    if isinstance(node.meta.get("val"), torch.SymInt):  # merged for its expression
        return False
    return _name(node.target) not in _TOLD_BY_SHAPES and _has_numbers((node.args, tuple(node.kwargs.values())))


def _has_numbers(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_has_numbers(item) for item in value)
    return isinstance(value, (int, float, complex)) and not isinstance(value, bool)
