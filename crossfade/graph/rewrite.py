"""Changing graphs by declarative rules.

A rule is a pattern, a check that answers with a reason when it declines, and a replacement. Patterns are indexed by
their root operator and by what its arguments are made by, so that a rule costs nothing where it cannot apply.
"""

from __future__ import annotations

import ast
import operator
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import fx

from crossfade.errors import RewriteError, TextError
from crossfade.graph.aliasing import Aliasing
from crossfade.graph.effects import memory_of
from crossfade.graph.operators import argument_names, by_name, defaults_of
from crossfade.graph.private import is_erased
from crossfade.graph.program import Program, paused_garbage_collection
from crossfade.graph.splice import NeedsGuard, erase_if_dead, splice
from crossfade.graph.text import resolve_operator

WRITTEN = "its memory, or memory it is computed from, is written to"
"""Why a rule declines that would read at another place what `Match.is_written`."""


@dataclass(slots=True)
class Match:
    """Where a pattern matched: its root node and what each name in it stands for."""

    program: Program
    root: fx.Node
    bound: Mapping[str, Any]
    aliasing: Aliasing

    def __getitem__(self, name: str) -> Any:
        return self.bound[name]

    def is_written(self, *nodes: fx.Node) -> bool:
        """Whether something writes the memory behind any of these values: for rules that look beyond the root's inputs.

        Rules make no writes and replace nothing that is written, so the answer stays true while they are applied.
        """
        return any(map(self.aliasing.is_written, nodes))

    def splice(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Insert a function's nodes where the root stands, with its provenance."""
        return splice(self.program, function, *inputs, before=self.root, like=self.root, may_guard=False)


def _always(match: Match) -> str | None:
    return None


@dataclass(frozen=True, eq=False)
class Rule:
    """Rewrite `pattern` to what `replace` returns (a node or a constant), unless `check` returns a reason not to.

    A pattern is an expression of nested operator calls. Lower-case names capture (one name twice must be the same
    value), `_` matches anything, literals match themselves (`1` is neither `True` nor `1.0`), lists match item by
    item, `(aten.view | aten.reshape)` matches either. Arguments left out match their defaults only, written or not.

        >>> rule = Rule("double-negation", "aten.neg(aten.neg(x))", replace=lambda match: match["x"])
    """

    name: str
    pattern: str
    replace: Callable[[Match], Any]
    check: Callable[[Match], str | None] = _always


@dataclass
class Rewritten:
    """What a set of rules did: how often each applied, and each decline with its rule, node and reason."""

    counts: Counter[str] = field(default_factory=Counter)
    declined: list[tuple[Rule, fx.Node, str]] = field(default_factory=list)

    @property
    def changed(self) -> bool:
        """Whether any rule applied."""
        return bool(self.counts)


def apply_rules(program: Program, rules: Iterable[Rule]) -> Rewritten:
    """Apply the rules to a fixed point: one worklist over the nodes, users of what changed looked at again.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4] = input("x")
    ... a: f32[4] = aten.neg(x)
    ... b: f32[4] = aten.neg(a)
    ... c: f32[4] = aten.neg(b)
    ... return output("c", c)
    ... ''')
    >>> apply_rules(program, [Rule("double-negation", "aten.neg(aten.neg(x))", lambda m: m["x"])]).counts
    Counter({'double-negation': 1})
    >>> print(program)
    x: f32[4] = input("x")
    c: f32[4] = aten.neg(x)
    return output("c", c)
    """
    known = _Rules(rules)
    done = Rewritten()
    declined: dict[tuple[Rule, fx.Node], str] = {}  # only the last answer about a node counts
    work = deque(node for node in program.graph.nodes if node.op == "call_function" and node.target in known)
    queued = set(work)
    rewriter = _Rewriter(program, known, done.counts, declined)
    with paused_garbage_collection(), _results_apart(program):
        while work:
            node = work.popleft()
            queued.discard(node)
            if is_erased(node):
                continue
            for again in _with_users(rewriter.rewrite(node), known.depth - 1):
                if again.op == "call_function" and again not in queued and again.target in known:
                    work.append(again)
                    queued.add(again)
    done.declined = [(rule, node, reason) for (rule, node), reason in declined.items() if not is_erased(node)]
    return done


@contextmanager
def _results_apart(program: Program) -> Iterator[None]:
    """Let several nodes hold a program's results for a while, if they are many: replacing one rewrites all beside it.

    To rules that look at `users`, each holder is an output; whoever asks for `program.results` meanwhile gets an error.
    """
    output, results = program.output_node, program.results
    is_tuple = isinstance(output.args[0], tuple)
    if len(results) <= _HELD_TOGETHER:
        yield
        return
    with program.graph.inserting_after(output):
        held = [results[at : at + _HELD_TOGETHER] for at in range(0, len(results), _HELD_TOGETHER)]
        holders = [program.graph.create_node("output", "output", (some,)) for some in held]
    output.args = ()
    try:
        yield
    finally:
        results = [value for holder in holders for value in holder.args[0]]  # type: ignore[union-attr]
        output.args = (tuple(results) if is_tuple else results,)
        for holder in holders:
            program.graph.erase_node(holder)


_HELD_TOGETHER = 64


def _with_users(nodes: list[fx.Node], steps: int) -> Iterable[fx.Node]:
    """The nodes and their users' users, as far up as a pattern's root can stand above what changed."""
    found = last = dict.fromkeys(nodes)
    for _ in range(steps if nodes else 0):
        last = dict.fromkeys(user for node in last for user in node.users if user not in found)
        found |= last
    return found


class _Rules:
    """Rules by what they can apply to: the operator at the root of their pattern, and what its arguments are."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._by_root: dict[int, list[tuple[Rule, _Call]]] = {}  # by identity: torch's operators hash in Python, slowly
        self._narrowed: dict[tuple[int, int, Any], tuple[Any, list[tuple[Rule, _Call]]]] = {}
        self.depth = 0
        for rule in rules:
            pattern = compile_pattern(rule.pattern)
            self.depth = max(self.depth, pattern.depth)
            for target in pattern.targets:
                self._by_root.setdefault(id(target), []).append((rule, pattern))

    def __contains__(self, target: Any) -> bool:
        return id(target) in self._by_root

    def possible(self, node: fx.Node) -> list[tuple[Rule, _Call]]:
        """The rules that a node's operator, that of its first argument and the kind of its second do not rule out.

        Each combination of these is looked into once: there are few.
        """
        args = node.args
        if not args:
            return self._by_root[id(node.target)]
        first: Any = args[0]
        inner = first.target if isinstance(first, fx.Node) and first.op == "call_function" else None
        kind = _kind(args[1]) if len(args) > 1 else _ABSENT
        key = id(node.target), id(inner), kind
        entry = self._narrowed.get(key)
        if entry is None:
            rules = self._by_root[id(node.target)]
            found = [rule for rule in rules if rule[1].may_match(node.target, inner, kind)]
            entry = self._narrowed[key] = inner, found  # kept with the operator, whose id is then its own
        return entry[1]


class _Rewriter:
    """Applies rules one node at a time, and refuses what would be seen in memory."""

    def __init__(
        self, program: Program, rules: _Rules, counts: Counter[str], declined: dict[tuple[Rule, fx.Node], str]
    ) -> None:
        self.program, self.rules, self.counts, self.declined = program, rules, counts, declined
        self.aliasing = Aliasing(program)
        self.applied, self.patience = 0, 100 * len(program.graph.nodes)

    def rewrite(self, node: fx.Node) -> list[fx.Node]:
        """Apply the first rule that fits; return the nodes worth another look."""
        for rule, pattern in self.rules.possible(node):
            bound: dict[str, Any] = {}
            if not pattern.matches(node, bound):
                continue
            match = Match(self.program, node, bound, self.aliasing)
            if (reason := rule.check(match)) is not None:
                self.declined[rule, node] = reason
                continue
            users = list(node.users)
            previous = node.prev
            try:
                replacement = rule.replace(match)
            except NeedsGuard:
                self.declined[rule, node] = "it would hold for some sizes only"
                continue
            _check_replacement(rule, node, replacement)
            made = []
            while (previous := previous.next) is not node:
                made.append(previous)
            if (reason := self._seen(match, pattern, replacement, made)) is not None:
                self.declined[rule, node] = reason
                for new in reversed(made):
                    self.program.graph.erase_node(new)
                continue
            if isinstance(replacement, fx.Node):
                self.aliasing.replaced(node, replacement)
            _replace(node, replacement)
            self.declined.pop((rule, node), None)
            self._count(rule, node, replacement)
            return [*users, *made, *([replacement] if isinstance(replacement, fx.Node) else [])]
        return []

    def _seen(self, match: Match, pattern: _Call, replacement: Any, made: list[fx.Node]) -> str | None:
        """How somebody could see in memory that the rule was applied, if anybody could."""
        read = {source for new in made for source in new.all_input_nodes} - set(made)
        if pattern.depth == 1:  # what the root itself reads is read where it was
            read -= set(match.root.all_input_nodes)
        if any(self.aliasing.is_written(source) for source in read):
            return "it would read later what is written to"
        if any(self._is_overwritten(inner, match.root) for inner in pattern.inner(match.root)):
            return WRITTEN
        return self.aliasing.may_replace(match.root, replacement) if isinstance(replacement, fx.Node) else None

    def _is_overwritten(self, inner: fx.Node, root: fx.Node) -> bool:
        """Whether a value on the way to the root may be another by the time the root reads it; views follow along."""
        return self.aliasing.is_written(inner) and memory_of(inner) != memory_of(root)

    def _count(self, rule: Rule, node: fx.Node, replacement: Any) -> None:
        self.counts[rule.name] += 1
        self.applied += 1
        if replacement is node or self.applied > self.patience:
            raise RewriteError(
                f"the rule {rule.name} applying to {node.name} without end",
                remedy="let its check decline what its replacement makes",
            )


def _check_replacement(rule: Rule, node: fx.Node, replacement: Any) -> None:
    """Refuse what no graph can hold in a node's place."""
    if callable(replacement) or isinstance(replacement, torch.Tensor):
        raise RewriteError(
            f"the rule {rule.name} replacing {node.name} by {replacement!r}",
            expected="a node of the program or a number",
            remedy="return match.splice(function, *nodes), which records a function as nodes",
        )


def _replace(node: fx.Node, replacement: Any) -> None:
    """Give a node's users the replacement, then erase it, whatever its effects, and what only it kept alive."""
    if isinstance(replacement, fx.Node):
        node.replace_all_uses_with(replacement)
    else:
        for user in list(node.users):
            user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda n: replacement if n is node else n)
    inputs = node.all_input_nodes
    if not node.users:
        node.graph.erase_node(node)
    for source in inputs:
        erase_if_dead(source)


# ---------------------------------------------------------------------------------------------------------- patterns


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
class _Call:
    targets: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    _known: dict[int, _Arranged] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def depth(self) -> int:
        """How many calls stand above the lowest one, itself included."""
        return 1 + max((item.depth for item in (*self.args, *dict(self.kwargs).values())), default=0)

    def matches(self, value: Any, bound: dict[str, Any]) -> bool:
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
            if given is _ABSENT or not item.matches(given, bound):
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
                if isinstance(part, _Call):
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
            if place == 0 and isinstance(item, _Call) and inner not in item.targets:
                return False
            if place == 1 and not _may_be(item, kind):
                return False
        return True


class _Arranged(NamedTuple):
    """A pattern's arguments as one operator takes them: place, name, default of those it names, and of all others."""

    named: list[tuple[int, Any, Any, Any]]
    others: list[tuple[int, Any, Any]]
    first_other: int


def _arranged(pattern: _Call, target: Any) -> _Arranged:
    named, defaults = by_name(target, pattern.args, dict(pattern.kwargs)), defaults_of(target)
    names: list[Any] = [*argument_names(target)] or [*range(_MOST_ARGUMENTS)]
    places = [(place, name, defaults.get(name, _ABSENT)) for place, name in enumerate(names)]
    wanted = [(*place, named[place[1]]) for place in places if place[1] in named]
    if len(wanted) < len(named):  # an argument that the operator does not have
        return _Arranged([(0, "", None, _Nothing())], [], len(places))
    if argument_names(target):  # where there is a schema, every argument is given or has a default
        wanted = [entry for entry in wanted if not isinstance(entry[3], _Anything)]
    others = [place for place in places if place[1] not in named]
    return _Arranged(wanted, others, min((place for place, _, _ in others), default=len(places)))


def _kind(argument: Any) -> Any:
    """What shows quickly that an argument does not match: being a node, or the length of a list."""
    if isinstance(argument, fx.Node):
        return fx.Node
    return len(argument) if isinstance(argument, (tuple, list)) else None


def _may_be(item: Any, kind: Any) -> bool:
    """Whether part of a pattern can match something of a `_kind`; an argument that is absent may be anything yet."""
    if kind is _ABSENT or isinstance(item, (_Anything, _Capture)):
        return True
    if isinstance(item, _Sequence):
        return kind == len(item.items)
    return (kind is fx.Node) == isinstance(item, _Call)


_ABSENT = object()
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
def compile_pattern(text: str) -> _Call:
    """Parse a pattern once; a mistake in it names the pattern."""
    try:
        tree = _compile(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, TextError) as error:
        raise RewriteError(
            f"the pattern {text!r} ({error})", remedy="write nested calls like aten.mm(x, aten.t(w))"
        ) from error
    if not isinstance(tree, _Call):
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
            return _Call(_targets(func), tuple(_compile(a) for a in args), named)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return _Sequence(tuple(_compile(element) for element in items))
        case ast.Subscript(value=value, slice=index):
            return _Call((operator.getitem,), (_compile(value), _compile(index)), ())
    return _Literal(ast.literal_eval(item))


def _targets(func: ast.expr) -> tuple[Any, ...]:
    if isinstance(func, ast.BinOp) and isinstance(func.op, ast.BitOr):
        return (*_targets(func.left), *_targets(func.right))
    return (resolve_operator(ast.unparse(func)),)
