"""Changing graphs by declarative rules.

A rule is a pattern, a check that answers with a reason when it declines, and a replacement. Patterns are indexed by
their root operator and by what its arguments are made by, so that a rule costs nothing where it cannot apply.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from crossfade.errors import RewriteError
from crossfade.graph.aliasing import Aliasing
from crossfade.graph.changed_strides import same_bits_below
from crossfade.graph.effects import memory_of
from crossfade.graph.patterns import ABSENT, CallPattern, compile_pattern, kind_of
from crossfade.graph.private import is_erased
from crossfade.graph.program import Program, paused_garbage_collection
from crossfade.graph.splice import NeedsGuard, erase_if_dead, splice

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

    With `other_strides`, what replaces the root may lie differently in memory where that changes no result.
    """

    name: str
    pattern: str
    replace: Callable[[Match], Any]
    check: Callable[[Match], str | None] = _always
    other_strides: bool = False


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
        self._by_root: dict[
            int, list[tuple[Rule, CallPattern]]
        ] = {}  # by identity: torch's operators hash in Python, slowly
        self._narrowed: dict[tuple[int, int, Any], tuple[Any, list[tuple[Rule, CallPattern]]]] = {}
        self.depth = 0
        for rule in rules:
            pattern = compile_pattern(rule.pattern)
            self.depth = max(self.depth, pattern.depth)
            for target in pattern.targets:
                self._by_root.setdefault(id(target), []).append((rule, pattern))

    def __contains__(self, target: Any) -> bool:
        return id(target) in self._by_root

    def possible(self, node: fx.Node) -> list[tuple[Rule, CallPattern]]:
        """The rules that a node's operator, that of its first argument and the kind of its second do not rule out.

        Each combination of these is looked into once: there are few.
        """
        args = node.args
        if not args:
            return self._by_root[id(node.target)]
        first: Any = args[0]
        inner = first.target if isinstance(first, fx.Node) and first.op == "call_function" else None
        kind = kind_of(args[1]) if len(args) > 1 else ABSENT
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
            seen = self._seen(match, pattern, replacement, made, rule.other_strides)
            if isinstance(seen, str):
                self.declined[rule, node] = seen
                for new in reversed(made):
                    self.program.graph.erase_node(new)
                continue
            for below, value in seen.items():
                below.meta["val"] = value
            if isinstance(replacement, fx.Node):
                self.aliasing.replaced(node, replacement)
            _replace(node, replacement)
            self.declined.pop((rule, node), None)
            self._count(rule, node, replacement)
            return [*users, *made, *([replacement] if isinstance(replacement, fx.Node) else [])]
        return []

    def _seen(
        self, match: Match, pattern: CallPattern, replacement: Any, made: list[fx.Node], other_strides: bool
    ) -> str | dict[fx.Node, Any]:
        """How somebody could see in memory that the rule was applied; if nobody could, whose values lie differently."""
        read = {source for new in made for source in new.all_input_nodes} - set(made)
        if pattern.depth == 1:  # what the root itself reads is read where it was
            read -= set(match.root.all_input_nodes)
        if any(self.aliasing.is_written(source) for source in read):
            return "it would read later what is written to"
        if any(self._is_overwritten(inner, match.root) for inner in pattern.inner(match.root)):
            return WRITTEN
        if not isinstance(replacement, fx.Node):
            return {}
        reason = self.aliasing.may_replace(match.root, replacement, other_strides)
        below = same_bits_below(self.program, match.root, replacement.meta.get("val")) if other_strides else {}
        return reason or below

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
