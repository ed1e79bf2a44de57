"""Changing graphs by declarative rules.

A rule is a pattern, a check that answers with a reason when it declines, and a replacement. Patterns are indexed by
their root operator, so that a rule costs nothing on graphs without it.
"""

from __future__ import annotations

import ast
import operator
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import fx

from crossfade.errors import RewriteError, TextError
from crossfade.graph.aliasing import Aliasing
from crossfade.graph.operators import argument_names, by_name, defaults_of
from crossfade.graph.program import Program
from crossfade.graph.splice import NeedsGuard, erase_if_dead, splice
from crossfade.graph.text import resolve_operator


@dataclass(frozen=True)
class Match:
    """Where a pattern matched: its root node and what each name in it stands for."""

    program: Program
    root: fx.Node
    bound: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.bound[name]

    def splice(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Insert a function's nodes where the root stands, with its provenance."""
        return splice(self.program, function, *inputs, before=self.root, like=self.root, may_guard=False)


def _always(match: Match) -> str | None:
    return None


@dataclass(frozen=True)
class Rule:
    """Rewrite `pattern` to what `replace` returns (a node or a constant), unless `check` returns a reason not to.

    A pattern is an expression of nested operator calls. Lower-case names capture (one name twice must be the same
    thing), `_` matches anything, literals match themselves (`1` is neither `True` nor `1.0`), lists match item by
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
    index: dict[Any, list[tuple[Rule, _Call]]] = {}
    for rule in rules:
        pattern = compile_pattern(rule.pattern)
        for target in pattern.targets:
            index.setdefault(target, []).append((rule, pattern))
    done = Rewritten()
    declined: dict[tuple[Rule, fx.Node], str] = {}  # only the last answer about a node counts
    work = deque(node for node in program.graph.nodes if node.op == "call_function" and node.target in index)
    queued = set(work)
    depth = max((pattern.depth for entries in index.values() for _, pattern in entries), default=0)
    rewriter = _Rewriter(program, index, done.counts, declined)
    while work:
        node = work.popleft()
        queued.discard(node)
        if node._erased:
            continue
        for again in _with_users(rewriter.rewrite(node), depth - 1):
            if again.op == "call_function" and again.target in index and again not in queued:
                work.append(again)
                queued.add(again)
    done.declined = [(rule, node, reason) for (rule, node), reason in declined.items() if not node._erased]
    return done


def _with_users(nodes: list[fx.Node], steps: int) -> list[fx.Node]:
    """The nodes and their users' users, as far up as a pattern's root can stand above what changed."""
    found = dict.fromkeys(nodes)
    for _ in range(steps):
        found |= dict.fromkeys(user for node in found for user in node.users)
    return list(found)


class _Rewriter:
    """Applies rules one node at a time, and refuses what would be seen in memory."""

    def __init__(
        self,
        program: Program,
        rules: Mapping[Any, list[tuple[Rule, _Call]]],
        counts: Counter[str],
        declined: dict[tuple[Rule, fx.Node], str],
    ) -> None:
        self.program, self.rules, self.counts, self.declined = program, rules, counts, declined
        self.aliasing = Aliasing(program)
        self.patience = 100 * len(program.graph.nodes)

    def rewrite(self, node: fx.Node) -> list[fx.Node]:
        """Apply the first rule that fits; return the nodes worth another look."""
        for rule, pattern in self.rules[node.target]:
            bound: dict[str, Any] = {}
            if not pattern.matches(node, bound):
                continue
            match = Match(self.program, node, bound)
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
            made = []
            while (previous := previous.next) is not node:
                made.append(previous)
            if (reason := self._seen(match, pattern, replacement, made)) is not None:
                self.declined[rule, node] = reason
                for one in reversed(made):
                    self.program.graph.erase_node(one)
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
        read = {source for one in made for source in one.all_input_nodes} - set(made)
        if pattern.depth == 1:  # what the root itself reads is read where it was
            read -= set(match.root.all_input_nodes)
        if any(self.aliasing.is_written(source) for source in read):
            return "it would read later what is written to"
        return self.aliasing.may_replace(match.root, replacement) if isinstance(replacement, fx.Node) else None

    def _count(self, rule: Rule, node: fx.Node, replacement: Any) -> None:
        self.counts[rule.name] += 1
        if replacement is node or self.counts.total() > self.patience:
            raise RewriteError(
                f"the rule {rule.name} applying to {node.name} without end",
                remedy="let its check decline what its replacement makes",
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

    @property
    def depth(self) -> int:
        return max((item.depth for item in self.items), default=0)

    def matches(self, value: Any, bound: dict[str, Any]) -> bool:
        if not isinstance(value, (tuple, list)) or len(value) != len(self.items):
            return False
        return all(item.matches(one, bound) for item, one in zip(self.items, value, strict=True))


@dataclass(frozen=True)
class _Call:
    targets: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    _known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def depth(self) -> int:
        """How many calls stand above the lowest one, itself included."""
        return 1 + max((item.depth for item in (*self.args, *dict(self.kwargs).values())), default=0)

    def matches(self, value: Any, bound: dict[str, Any]) -> bool:
        if not isinstance(value, fx.Node) or value.target not in self.targets:
            return False
        wanted, others = self._arranged(value.target)
        args, kwargs = value.args, value.kwargs
        for place, name, item, default in wanted:
            given = args[place] if place < len(args) else kwargs.get(name, default)
            if given is _ABSENT or not item.matches(given, bound):
                return False
        for place, name, default in others:
            given = args[place] if place < len(args) else kwargs.get(name, default)
            if given is not default and not _same(default, given):
                return False
        return True

    def _arranged(self, target: Any) -> tuple[list[tuple[int, Any, Any, Any]], list[tuple[int, Any, Any]]]:
        """For one operator: where each argument that the pattern names stands, and the defaults of all others."""
        known = self._known.get(target)
        if known is None:
            named, defaults = by_name(target, self.args, dict(self.kwargs)), defaults_of(target)
            names: list[Any] = [*argument_names(target)] or [*range(_MOST_ARGUMENTS)]
            places = [(place, name, defaults.get(name, _ABSENT)) for place, name in enumerate(names)]
            wanted = [(place, name, named[name], default) for place, name, default in places if name in named]
            known = wanted, [one for one in places if one[1] not in named]
            if len(wanted) < len(named):  # an argument that the operator does not have
                known = [(0, "", _Nothing(), None)], []
            self._known[target] = known
        return known


_ABSENT = object()
_MOST_ARGUMENTS = 8
"""As many positions as are looked at in calls of Python functions, which have no schema."""


@dataclass(frozen=True)
class _Nothing:
    def matches(self, value: Any, bound: dict[str, Any]) -> bool:
        return False


def _same(one: Any, other: Any) -> bool:
    """Equality that tells `1`, `1.0` and `True` apart, also inside lists."""
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    return one is other or (type(one) is type(other) and one == other)


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
            return _Sequence(tuple(_compile(one) for one in items))
        case ast.Subscript(value=value, slice=index):
            return _Call((operator.getitem,), (_compile(value), _compile(index)), ())
    return _Literal(ast.literal_eval(item))


def _targets(func: ast.expr) -> tuple[Any, ...]:
    if isinstance(func, ast.BinOp) and isinstance(func.op, ast.BitOr):
        return (*_targets(func.left), *_targets(func.right))
    return (resolve_operator(ast.unparse(func)),)
