"""Values that come to lie in memory differently, and what that does to those who read them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.errors import RewriteError
from crossfade.graph import collectives
from crossfade.graph.effects import written_inputs
from crossfade.graph.private import schema_of, statically_equal, tree_flatten
from crossfade.graph.program import Program

_MOST = 64
"""Other strides usually end at the first op that computes something: more readers of each value are not looked at."""

_BY_STRIDES = ("strid", "storage", "resize", "is_contiguous", "is_non_overlapping")
"""Words in the names of operators whose results depend on how their argument lies in memory."""


class Strides:
    """Plans values of other strides in the place of some nodes', one set after another, before the graph is changed.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4, 2] = input("x")
    ... a: f32[4, 2] = aten.neg(x)
    ... b: f32[4, 2] = aten.exp(a)
    ... return output("b", b)
    ... ''')
    >>> x, a, b, out = program.graph.nodes
    >>> with program.fake_mode:
    ...     wide, _ = torch.empty(4, 4).split(2, dim=1)
    >>> print(Strides(program).take({a: wide}))
    None
    >>> Strides(program).take({b: wide})
    'a result of the program would have other strides'
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._taken: dict[fx.Node, Any] = {}

    def take(self, values: Mapping[fx.Node, Tensor]) -> str | None:
        """Plan some values; or plan none and say which reader could not take them.

        Views of such a value have other strides too, or cannot be taken; what is computed from it mostly has not.
        """
        found = _followed(self.program, values, self._taken)
        if isinstance(found, str):
            return found
        self._taken |= found | dict(values)
        return None


def replace_strided(program: Program, others: Mapping[fx.Node, fx.Node]) -> None:
    """Give the users of some nodes others of equal values and other strides, and update the users' metadata."""
    found = _followed(program, {node: other.meta["val"] for node, other in others.items()}, {})
    if isinstance(found, str):
        raise RewriteError(f"values laid out differently, though {found}", remedy="plan them with Strides first")
    for user, value in found.items():
        user.meta["val"] = value
    for node, other in others.items():
        node.replace_all_uses_with(other)


def _followed(
    program: Program, values: Mapping[fx.Node, Tensor], taken: Mapping[fx.Node, Any]
) -> dict[fx.Node, Any] | str:
    """The values of all nodes below that change their strides with the given ones, or why one of them cannot.

    `taken` are values that others have changed before.
    """
    changed: dict[fx.Node, Any] = {
        node: value for node, value in values.items() if not _is_laid_out_as(node.meta["val"], value)
    }
    waiting = [user for node in changed for user in node.users]
    heapq.heapify(waiting)  # nodes compare by their place in the graph
    seen: set[fx.Node] = set()
    while waiting:
        user = heapq.heappop(waiting)
        if user in seen:
            continue
        seen.add(user)
        if len(seen) > _MOST * len(values):
            return "too many ops would read it by other strides"
        if (reason := _against_reader(user)) is not None:
            return reason
        try:
            new = _described(program, user, lambda source: changed.get(source, taken.get(source, source.meta["val"])))
        except (RuntimeError, ValueError):
            return "a view of it could not be taken"
        if not _is_laid_out_as(taken.get(user, user.meta["val"]), new):
            changed[user] = new
            for below in user.users:
                heapq.heappush(waiting, below)
    return {node: value for node, value in changed.items() if node not in values}


def _described(program: Program, user: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
    args, kwargs = fx.map_arg((user.args, user.kwargs), value_of)
    with torch.no_grad(), program.fake_mode:
        return user.target(*args, **kwargs)  # type: ignore[operator]


def _against_reader(user: fx.Node) -> str | None:
    if user.op == "output":
        return "a result of the program would have other strides"
    schema = schema_of(user.target)
    name = schema.name if schema is not None else f"aten::{getattr(user.target, '__name__', '')}"
    if collectives.is_collective(user) or collectives.is_wait(user) or written_inputs(user):
        return "something communicates or writes it"
    is_known = schema is not None or getattr(user.target, "__module__", "") == "_operator"
    if not is_known or not name.startswith("aten::"):
        return "an op of another library would read it by other strides"
    return "something goes by its strides" if any(word in name for word in _BY_STRIDES) else None


def _is_laid_out_as(old: Any, new: Any) -> bool:
    """Whether two values have the same shape and strides."""
    before, after = tree_flatten(old)[0], tree_flatten(new)[0]
    return len(before) == len(after) and all(map(_is_alike, before, after))


def _is_alike(old: Any, new: Any) -> bool:
    if not isinstance(old, Tensor):
        return isinstance(old, (int, torch.SymInt)) and statically_equal(old, new)
    if old.layout is not torch.strided:
        return True
    return statically_equal((*old.shape, *old.stride()), (*new.shape, *new.stride()))
