"""What computation stands between a collective's start and its wait: what hides it, as the program is written."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from crossfade.cost.flops import formula_of
from crossfade.graph import collectives
from crossfade.graph.collectives import Collective
from crossfade.graph.effects import aliased_by, may_write
from crossfade.graph.order import Order
from crossfade.graph.packing import COPIES_OUT


@dataclass(frozen=True)
class Window:
    """Positions in a program: where a collective starts, where its result is first used, and the first and the last of
    the matmuls between its start and its wait; None where nothing hides it."""

    start: int
    first_use: int
    hidden_by: tuple[int, int] | None


class Hiding:
    """Where the matmuls of a program stand, asked for the windows of its collectives.

    Only operators made of matrix products count (attention and convolutions are such): what they take is known to be
    long without a machine. That is decided by operators, which all ranks that run one program have in common.

        >>> from crossfade.graph.text import parse
        >>> program = parse('''
        ... x: f32[4, 4] = input("x")
        ... s: f32[4, 4] = c10d.all_reduce(x, "sum", "dp")
        ... mm: f32[4, 4] = aten.mm(x, x)
        ... w: f32[4, 4] = c10d.wait_tensor(s)
        ... y: f32[4, 4] = aten.add.Tensor(mm, w)
        ... return output("y", y)
        ... ''', groups={"dp": 2})
        >>> hiding = Hiding(Order(program.graph))
        >>> hiding.window(collectives.find(program.graph)[0])
        Window(start=1, first_use=4, hidden_by=(2, 2))
    """

    def __init__(self, order: Order) -> None:
        self._position = order.position
        self._matmuls = [
            place for place, node in enumerate(order.nodes) if node.op == "call_function" and formula_of(node.target)
        ]

    def window(self, collective: Collective) -> Window:
        """Where one collective stands, and what hides it."""
        start = self._position[collective.node]
        awaited = min((self._position[wait] for wait in collective.waits), default=start)
        first, after = bisect_left(self._matmuls, start), bisect_left(self._matmuls, awaited)
        hidden_by = (self._matmuls[first], self._matmuls[after - 1]) if first < after else None
        return Window(start, self._first_use(collective.waits), hidden_by)

    def matmuls_between(self, first: int, last: int) -> int:
        """How many matmuls stand from one position to another."""
        return bisect_left(self._matmuls, last) - bisect_left(self._matmuls, first)

    def _first_use(self, waits: Sequence[fx.Node]) -> int:
        """The position of the first node that computes with a result: views, elements and copies only hand it on."""
        found = len(self._position)
        waiting = [user for wait in waits for user in wait.users]
        seen = set(waiting)
        while waiting:
            user = waiting.pop()
            if _hands_on(user):
                waiting += [below for below in user.users if below not in seen]
                seen.update(user.users)
            else:
                found = min(found, self._position[user])
        return found


def _hands_on(node: fx.Node) -> bool:
    if node.op != "call_function" or collectives.is_collective(node) or may_write(node.target):
        return False
    return node.target is operator.getitem or node.target in COPIES_OUT or aliased_by(node) is not None
