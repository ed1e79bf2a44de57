"""Patterns of nested operator calls: parsed once, arranged for each operator, matched against nodes."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple

from torch import fx

from crossfade.errors import RewriteError, TextError
from crossfade.graph.operators import argument_names, by_name, defaults_of
from crossfade.graph.text import resolve_operator


@dataclass(frozen=True)
class _Anything:
    depth = 0

    def matches(self, value: Any, bound: dict[str, Any]) -> bool:
        return True


@dataclass(frozen=True)
class _Capture:
    name: str
    depth = 0

    def matches(self, value: Any, bound: dict[str, Any]) -> bool:
        return _same(bound.setdefault(self.name, value), value)


@dataclass(frozen=True)
class _Literal:
    value: Any
    depth = 0

    def matches(self, value: Any, bound: dict[str, Any]) -> bool:
        return _same(self.value, value)


@dataclass(frozen=True)
class _Sequence:
    items: tuple[Any, ...]

    @cached_property
    def depth(self) -> int:
        return max((item.depth for item in self.items), default=0)

    @cached_property
    def literals(self) -> list[tuple[int, _Literal]]:
        """What is quickly compared: the items that match a single value."""
        return [(place, item) for place, item in enumerate(self.items) if isinstance(item, _Literal)]

    def matches(self, value: Any, bound: dict[str, Any]) -> bool:
        if not isinstance(value, (tuple, list)) or len(value) != len(self.items):
            return False
        if not all(item.matches(value[place], bound) for place, item in self.literals):
            return False
        return all(item.matches(part, bound) for item, part in zip(self.items, value, strict=True))


@dataclass(frozen=True)
class CallPattern:
    """A call of one of some operators, whose arguments match patterns again."""

    targets: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    _known: dict[int, _Arranged] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def depth(self) -> int:
        """How many calls stand above the lowest one, itself included."""
        return 1 + max((item.depth for item in (*self.args, *dict(self.kwargs).values())), default=0)

    def matches(self, value: Any, bound: dict[str, Any]) -> bool:
        """Whether a value is such a call; what its names stand for is added to `bound`."""
        if not isinstance(value, fx.Node):
            return False
        arranged = self._known.get(id(value.target))
        if arranged is None:
            if value.target not in self.targets:
                return False
            arranged = self.arranged(value.target)
        args, kwargs = value.args, value.kwargs
        count = len(args)
        for place, name, default, item in arranged.named:
            given = args[place] if place < count else kwargs.get(name, default)
            if given is ABSENT or not item.matches(given, bound):
                return False
        if count <= arranged.first_other and not kwargs:
            return True
        for place, name, default in arranged.others:
            given = args[place] if place < count else kwargs.get(name, default)
            if given is not default and not _same(default, given):
                return False
        return True

    def inner(self, node: fx.Node) -> Iterator[fx.Node]:
        """The nodes that its inner calls match, where it matches a node."""
        for place, name, default, item in self.arranged(node.target).named:
            given: Any = node.args[place] if place < len(node.args) else node.kwargs.get(name, default)
            for part, value in zip(item.items, given, strict=True) if isinstance(item, _Sequence) else [(item, given)]:
                if isinstance(part, CallPattern):
                    yield value
                    yield from part.inner(value)

    def arranged(self, target: Any) -> _Arranged:
        """Its arguments as one of its operators takes them, remembered."""
        if id(target) not in self._known:
            self._known[id(target)] = _arranged(self, target)
        return self._known[id(target)]

    def may_match(self, target: Any, inner: Any, kind: Any) -> bool:
        """Whether it could match a call of `target` whose first argument `inner` makes, the second being of a kind."""
        for place, _, _, item in self.arranged(target).named:
            if place == 0 and isinstance(item, CallPattern) and inner not in item.targets:
                return False
            if place == 1 and not _may_be(item, kind):
                return False
        return True


class _Arranged(NamedTuple):
    """A pattern's arguments as one operator takes them: place, name, default of those it names, and of all others."""

    named: list[tuple[int, Any, Any, Any]]
    others: list[tuple[int, Any, Any]]
    first_other: int


def _arranged(pattern: CallPattern, target: Any) -> _Arranged:
    named, defaults = by_name(target, pattern.args, dict(pattern.kwargs)), defaults_of(target)
    names: list[Any] = [*argument_names(target)] or [*range(_MOST_ARGUMENTS)]
    places = [(place, name, defaults.get(name, ABSENT)) for place, name in enumerate(names)]
    wanted = [(*place, named[place[1]]) for place in places if place[1] in named]
    if len(wanted) < len(named):  # an argument that the operator does not have
        return _Arranged([(0, "", None, _Nothing())], [], len(places))
    if argument_names(target):  # where there is a schema, every argument is given or has a default
        wanted = [entry for entry in wanted if not isinstance(entry[3], _Anything)]
    others = [place for place in places if place[1] not in named]
    return _Arranged(wanted, others, min((place for place, _, _ in others), default=len(places)))


def kind_of(argument: Any) -> Any:
    """What shows quickly that an argument does not match: being a node, or the length of a list."""
    if isinstance(argument, fx.Node):
        return fx.Node
    return len(argument) if isinstance(argument, (tuple, list)) else None


def _may_be(item: Any, kind: Any) -> bool:
    """Whether part of a pattern can match something of a `kind_of`; an argument that is absent may be anything yet."""
    if kind is ABSENT or isinstance(item, (_Anything, _Capture)):
        return True
    if isinstance(item, _Sequence):
        return kind == len(item.items)
    return (kind is fx.Node) == isinstance(item, CallPattern)


ABSENT = object()
_MOST_ARGUMENTS = 8
"""As many positions as are looked at in calls of Python functions, which have no schema."""


@dataclass(frozen=True)
class _Nothing:
    def matches(self, value: Any, bound: dict[str, Any]) -> bool:
        return False


def _same(first: Any, second: Any) -> bool:
    """Equality that distinguishes `1`, `1.0` and `True`, also inside lists."""
    if first is second:
        return True
    if isinstance(first, (tuple, list)) and isinstance(second, (tuple, list)):
        return len(first) == len(second) and all(_same(a, b) for a, b in zip(first, second, strict=True))
    return type(first) is type(second) and first == second


@cache
def compile_pattern(text: str) -> CallPattern:
    """Parse a pattern once; a mistake in it names the pattern."""
    try:
        tree = _compile(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, TextError) as error:
        raise RewriteError(
            f"the pattern {text!r} ({error})", remedy="write nested calls like aten.mm(x, aten.t(w))"
        ) from error
    if not isinstance(tree, CallPattern):
        raise RewriteError(f"the pattern {text!r}", expected="a call at its root", remedy="start it with an operator")
    return tree


def _compile(item: ast.expr) -> Any:
    match item:
        case ast.Name(id="_"):
            return _Anything()
        case ast.Name(id=name):
            return _Capture(name)
        case ast.Call(func=func, args=args, keywords=keywords):
            named = tuple((k.arg or "", _compile(k.value)) for k in keywords)
            return CallPattern(_targets(func), tuple(_compile(a) for a in args), named)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return _Sequence(tuple(_compile(element) for element in items))
        case ast.Subscript(value=value, slice=index):
            return CallPattern((operator.getitem,), (_compile(value), _compile(index)), ())
    return _Literal(ast.literal_eval(item))


def _targets(func: ast.expr) -> tuple[Any, ...]:
    if isinstance(func, ast.BinOp) and isinstance(func.op, ast.BitOr):
        return (*_targets(func.left), *_targets(func.right))
    return (resolve_operator(ast.unparse(func)),)
