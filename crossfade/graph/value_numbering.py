"""Value numbering: which values of a graph are equal, on this rank or on all ranks."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import fx

from crossfade.graph import collectives
from crossfade.graph.effects import is_pure, is_random, memory_behind, written_inputs
from crossfade.graph.operators import argument_names, defaults_of, remembered
from crossfade.graph.private import OpOverload, has_schema, schema_of, size_expression

# fmt: off
_NUMBERS_ARE_SIZES = frozenset({
    "expand", "permute", "reshape", "squeeze", "sym_numel", "sym_size", "sym_stride", "transpose", "unsqueeze", "view",
    "_unsafe_view",
})
# fmt: on
"""Operators whose numbers are sizes and dims, which all ranks have in common."""


class ValueNumbers:
    """Numbers values so that equal numbers mean equal values. Ask in the order of the graph.

    Memory that is written has another value after each write: a reference to it names the last write. The result of a
    collective is like no other value. With `on_all_ranks`, equal numbers mean that the values are equal on every rank,
    also where ranks run programs that differ in numbers: no value is equal to another that numbers chose (see
    `is_chosen_by_numbers`), and plain collectives of equal values have equal results.
    """

    def __init__(self, roots: dict[fx.Node, fx.Node], *, on_all_ranks: bool = False) -> None:
        self.roots, self.on_all_ranks = roots, on_all_ranks
        self.references: dict[fx.Node, tuple[Any, int]] = {}
        """What represents a value in the key of a call that reads it: its number, marked as no argument is."""
        self.known: dict[Hashable, int] = {}
        self.last_write: dict[fx.Node, int] = {}
        self.writes = itertools.count(1)

    def number(self, node: fx.Node) -> int:
        """The number of a node's value as the node makes it."""
        pure = node.op == "call_function" and is_pure(node.target)
        number = self.known.setdefault(self._key(node, pure or is_function(node)), len(self.references))
        self.references[node] = _Reference, number
        for target in () if pure else written_inputs(node):
            write = next(self.writes)
            for owner in memory_behind(target, self.roots):
                self.last_write[owner] = write
        return number

    def tell_apart(self, node: fx.Node) -> None:
        """Number views of this value apart from views of equal values, whose memory may be different."""
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

    def _key(self, node: fx.Node, follows: bool) -> Hashable:
        if self.on_all_ranks and node.op == "call_function":
            if (collective := collectives.view(node)) is not None and collective.plain:
                return self.key_of_call(node)
            if follows and _reads_numbers(node):
                return node
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and (node.op == "placeholder" or follows):
            return "size", size_expression(value)
        if node.op == "get_attr":
            return node.op, node.target
        return self.key_of_call(node) if follows else node

    def _item(self, value: Any) -> Hashable:
        if isinstance(value, fx.Node):
            reference = self.references[value]
            versions = self._versions(value) if self.last_write else ()
            return (*reference, versions) if any(versions) else reference
        if isinstance(value, (tuple, list)):
            return tuple, *[item if type(item) is int else self._item(item) for item in value]
        return value if type(value) is int else _constant(value)

    def _versions(self, node: fx.Node) -> tuple[int, ...]:
        """The last writes to the memory behind a value, counted from 1; 0 where there was none."""
        owners = memory_behind(node, self.roots) if is_list(node) else (self.roots[node],)
        return tuple([self.last_write.get(owner, 0) for owner in owners])


class _Reference:
    """Marks a part of a key as a value's number, which no argument is."""


def is_list(node: fx.Node) -> bool:
    """Whether a node's value is a list of tensors."""
    return isinstance(node.meta.get("val"), (tuple, list))


def is_chosen_by_numbers(node: fx.Node) -> bool:
    """Whether an operator takes numbers that may be different on another rank: which part to take, what to scale by.

    Sizes in views and the like are the same expression on all ranks; what else takes numbers or sizes counts as chosen.
    Which result of an operator is read is no choice of a rank's, unless the operator makes a list of like elements.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4, 2] = input("x")
    ... row: f32[2] = aten.select.int(x, 0, 1)
    ... flat: f32[8] = aten.view(x, [8])
    ... rows: (f32[2], f32[2], f32[2], f32[2]) = aten.unbind.int(x)
    ... first: f32[2] = rows[0]
    ... return output("row", row), output("flat", flat)
    ... ''')
    >>> [node.name for node in program.graph.nodes if node.op == "call_function" and is_chosen_by_numbers(node)]
    ['row', 'first']
    """
    return not isinstance(node.meta.get("val"), torch.SymInt) and _reads_numbers(node)


def _reads_numbers(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        source: Any = node.args[0]
        return _makes_a_list(source.target) or is_chosen_by_numbers(source)
    return aten_name(node.target) not in _NUMBERS_ARE_SIZES and _has_numbers((node.args, tuple(node.kwargs.values())))


def _has_numbers(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_has_numbers(item) for item in value)
    if isinstance(value, fx.Node):
        return isinstance(value.meta.get("val"), (torch.SymInt, torch.SymFloat))
    return isinstance(value, (int, float, complex)) and not isinstance(value, bool)


def is_function(node: fx.Node) -> bool:
    """Whether a node's value follows from its arguments alone; of what communicates, only that of a wait does.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4] = input("x")
    ... a: f32[4] = aten.exp(x)
    ... b: f32[4] = aten.bernoulli.p(a, 0.5)
    ... return output("b", b)
    ... ''')
    >>> [is_function(node) for node in program.graph.nodes if node.op == "call_function"]
    [True, False]
    """
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


def _constant(value: Any) -> Hashable:
    """A key for what is no node; lists are taken apart before, unless they are constants too."""
    if type(value) is int:
        return value  # no other constant's key is a number
    if isinstance(value, (int, float, complex, slice)):
        return type(value), repr(value)  # 0.0 and -0.0 differ, and NaN is itself
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


@remembered
def aten_name(target: Any) -> str:
    """The name of an ATen operator, whatever its overload."""
    schema = schema_of(target)
    return schema.name.removeprefix("aten::") if schema is not None else ""


@remembered
def _makes_a_list(target: Any) -> bool:
    returns: Any = schema_of(target).returns if has_schema(target) else ()
    return len(returns) == 1 and isinstance(returns[0].type, torch.ListType)
