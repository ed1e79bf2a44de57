"""Nodes computed where they are needed."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from crossfade.graph import collectives
from crossfade.graph.effects import has_hidden_effect, is_pure, is_random, written_inputs
from crossfade.graph.memory import Storages
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.private import HigherOrderOperator
from crossfade.graph.program import Program, paused_garbage_collection
from crossfade.graph.prologues import prologue_of

_BARRIER = "a collective, a write, a random draw or a call of other graphs stands before its first user"
_MEMORY = "what it reads would be kept longer, and that could take more memory"
_LAUNCH = "a collective is made from it, and could start later only"
_MANY = 16
"""Lists of more tensors than this are not looked through for what a move would keep: it is not made."""


@dataclass(frozen=True)
class ReorderForLocality(Pass):
    """Move each node down to just above its first user, so that values are made when they are needed.

    No node crosses a collective's start or wait, a write, a random draw, a check or a higher-order operator; nodes that
    go to one place keep their order; what only the program's results use stays, and so does what a collective is made
    from at once, as early as it stands. A move is made only if it does not
    raise the peak of live bytes: what a node reads for the last time must take less memory than what it makes, and no
    more than what is made just below its new place.

    Also known as: Inductor's `reorder_for_locality`.

    Before:
        x: f32[4, 4] = input("x")
        exp: f32[4, 4] = aten.exp(x)
        neg: f32[4, 4] = aten.neg(x)
        sum_1: f32[] = aten.sum(neg)
        mul: f32[4, 4] = aten.mul.Tensor(exp, sum_1)
        return output("y", mul)

    After:
        x: f32[4, 4] = input("x")
        neg: f32[4, 4] = aten.neg(x)
        sum_1: f32[] = aten.sum(neg)
        exp: f32[4, 4] = aten.exp(x)
        mul: f32[4, 4] = aten.mul.Tensor(exp, sum_1)
        return output("y", mul)
    """

    name = "reorder-for-locality"
    numerics = Numerics.BITWISE
    nested = True

    def run(self, program: Program) -> PassResult:
        """One walk from the end: below the node looked at, everything has found its place."""
        left: Counter[str] = Counter()
        moved = 0
        with paused_garbage_collection():
            mover = _Mover(program.graph)
            for node in reversed(mover.nodes):
                user = mover.first_user(node)
                reason = mover.why_stay(node, user) if user is not None else ""
                if reason:
                    left[reason] += 1
                elif user is not None:
                    moved += mover.put_above(user, node)
                mover.settle(node)
        verdicts = tuple(Verdict(f"{count} nodes", Outcome.LEFT, reason) for reason, count in sorted(left.items()))
        return PassResult(bool(moved), {"moved": moved}, verdicts)


class _Mover:
    """A graph whose nodes move one by one, from the end up, and who is the last to use which memory meanwhile."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self._storages = Storages(self.nodes)
        self._makes = self._cells_made()
        self._keepers: dict[int, list[int]] = {}
        for keeper, kept in enumerate(self._storages.then):
            for cell in kept:
                self._keepers.setdefault(cell, []).append(keeper)
        self._last_use: dict[int, fx.Node] = {}
        self._barriers = {node for node in self.nodes if _is_barrier(node)}
        self._launched = _launched(self._barriers)
        self._segment: dict[fx.Node, int] = {}
        seen = 0
        for node in self.nodes:
            self._segment[node] = seen
            seen += node in self._barriers
        self._run: dict[fx.Node, list[fx.Node]] = {}
        """For a user, the nodes right above it that are there for it and have nothing above them for their own sake."""
        self._in_run_of: dict[fx.Node, tuple[fx.Node, int]] = {}

    def first_user(self, node: fx.Node) -> fx.Node | None:
        """The highest user of a node that may move; None if it may not, or only the program's results use it."""
        if node.op not in ("call_function", "get_attr") or not node.users:
            return None
        if node in self._barriers or _is_in_flight(node):
            return None
        first = min(node.users)
        return first if first.op != "output" else None

    def why_stay(self, node: fx.Node, user: fx.Node) -> str:
        """Why a node may not go down to its first user; nothing if it may, or is there."""
        below = self._place_above(user)
        if node.next is below:
            return ""
        if self._segment[node] != self._segment[user]:
            return _BARRIER
        if node in self._launched:
            return _LAUNCH
        made = self._makes[node]
        longer = self._ended_above(below, self._storages.touches[node]) - set(made)
        fleeting = self._bytes(self._ended_above(below, made))
        size, kept = self._bytes(longer), self._bytes(made) - fleeting
        if any(len(self._storages.then[cell]) > _MANY for cell in longer):
            return _MEMORY
        if size and not (kept > size and size + fleeting <= self._bytes(self._makes[below])):
            return _MEMORY
        return ""

    def put_above(self, user: fx.Node, node: fx.Node) -> bool:
        """Put a node above its first user, and above what was put there before; True if that moved it."""
        below = self._place_above(user)
        moves = node.next is not below
        if moves:
            below.prepend(node)
        if user in self._in_run_of:  # it brings others along from now on: what comes next goes below it
            above, index = self._in_run_of.pop(user)
            del self._run[above][index:]
        run = self._run.setdefault(user, [])
        self._in_run_of[node] = user, len(run)
        run.append(node)
        return moves

    def settle(self, node: fx.Node) -> None:
        """The node has found its place: it may be the last to use what it touches."""
        for cell in self._storages.touches[node]:
            last = self._last_use.get(cell)
            if last is None or last < node:
                self._last_use[cell] = node

    def _place_above(self, user: fx.Node) -> fx.Node:
        """The node above which the next one for a user goes."""
        run = self._run.get(user)
        return run[-1] if run else user

    def _ended_above(self, place: fx.Node, cells: Iterable[int]) -> set[int]:
        """Those of some cells, and of what they keep, that nothing uses from a place on."""
        found: set[int] = set()
        waiting = list(cells)
        while waiting:
            cell = waiting.pop()
            if cell not in found and not self._is_used_from(place, cell):
                found.add(cell)
                kept = self._storages.then[cell]
                waiting += kept if len(kept) <= _MANY else ()
        return found

    def _is_used_from(self, place: fx.Node, cell: int) -> bool:
        last = self._last_use.get(cell)
        if last is not None and not last < place:
            return True
        return any(self._is_used_from(place, keeper) for keeper in self._keepers.get(cell, ()))

    def _bytes(self, cells: Iterable[int]) -> int:
        return sum(self._storages.size[cell] for cell in cells)

    def _cells_made(self) -> dict[fx.Node, list[int]]:
        """The cells that each node is the first to touch, in whatever order the nodes run."""
        begun = bytearray(len(self._storages.size))
        made: dict[fx.Node, list[int]] = {}
        for node, touched in self._storages.touches.items():
            made[node] = first = [cell for cell in touched if not begun[cell]]
            for cell in first:
                begun[cell] = 1
        return made


def _is_barrier(node: fx.Node) -> bool:
    """Whether nothing may cross a node: it communicates, writes, draws, checks, or calls what may."""
    if node.op != "call_function" or is_pure(node.target):
        return False
    if isinstance(node.target, HigherOrderOperator) or collectives.is_wait(node):
        return True
    communicates = collectives.group_of(node) is not None
    return communicates or is_random(node) or has_hidden_effect(node) or bool(written_inputs(node))


def _launched(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """What collectives are made from: what they are given, or what only prepares that is."""
    found: set[fx.Node] = set()
    for start in filter(collectives.is_collective, nodes):
        prologue = prologue_of(start)
        found.update(source for node in (start, *prologue) for source in node.all_input_nodes)
        found.difference_update(prologue)
    return found


def _is_in_flight(node: fx.Node) -> bool:
    """Whether a node takes one result of a coalesced collective, which stays with it."""
    return node.target is operator.getitem and collectives.is_collective(node.all_input_nodes[0])
