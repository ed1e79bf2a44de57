"""Results that get memory of their own again, after a pass put several values into one piece of memory.

Callers may write into what a program returns. Two results that were apart must stay apart; a result and a view of it,
or one result returned twice, must stay together.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import fx

from crossfade.graph.collectives import is_wait
from crossfade.graph.effects import aliased_by
from crossfade.graph.in_place import has_layout_of
from crossfade.graph.private import schema_of
from crossfade.graph.program import Program
from crossfade.graph.splice import erase_if_dead, insert_call

_clone = torch.ops.aten.clone.default


def return_copies(program: Program, homes: Mapping[fx.Node, Hashable]) -> None:
    """Return what lies in the memory of these values out of copies, one for each home that they had.

    Copies are made at the end, so that they keep no wait up; views of what is copied are taken of the copy, and a view
    that nothing else is returned beside is all that is copied.

        >>> from crossfade.graph.text import parse
        >>> program = parse('''
        ... x: f32[4] = input("x")
        ... n: f32[4] = aten.neg(x)
        ... v: f32[2, 2] = aten.view(n, [2, 2])
        ... return output("n", n), output("v", v), output("n again", n)
        ... ''')
        >>> return_copies(program, {program.results[0]: "n"})
        >>> print(program)
        x: f32[4] = input("x")
        n: f32[4] = aten.neg(x)
        clone: f32[4] = aten.clone(n)
        v_1: f32[2, 2] = aten.view(clone, [2, 2])
        return output("n", clone), output("v", v_1), output("n again", clone)
    """
    old = program.results
    copies = _Copies(program, homes)
    results = [copies.of(value) for value in old]
    if copies.made:
        program.set_results(results)
        for value in dict.fromkeys(old):
            if isinstance(value, fx.Node):
                erase_if_dead(value)


class _Copies:
    """Copies of memory, and what is seen through them."""

    def __init__(self, program: Program, homes: Mapping[fx.Node, Hashable]) -> None:
        self.program = program
        self.homes = dict(homes)
        self.made: dict[Hashable, fx.Node] = {}
        self._seen: dict[fx.Node, fx.Node] = {}
        returned: dict[Hashable, list[fx.Node]] = {}
        for value in dict.fromkeys(result for result in program.results if isinstance(result, fx.Node)):
            if way := self._way(value):
                returned.setdefault(self.homes[way[-1]], []).append(value)
        self.homes |= {values[0]: home for home, values in returned.items() if len(values) == 1}

    def of(self, value: Any) -> Any:
        """The same value in a copy, if its memory is to be copied; else the value itself."""
        way = self._way(value) if isinstance(value, fx.Node) else []
        for node in reversed(way):
            if node not in self._seen:
                self._seen[node] = self._copied(node)
        return self._seen[value] if way else value

    def _way(self, value: fx.Node) -> list[fx.Node]:
        """From a value to the one whose memory is copied, through what shares that memory; empty if there is none."""
        way = [value]
        while way[-1] not in self.homes:
            source = aliased_by(way[-1])
            if source is None:
                return []
            way.append(source)
        return way

    def _copied(self, node: fx.Node) -> fx.Node:
        if node in self.homes:
            return self._copy(node, self.homes[node])
        source = self._seen[aliased_by(node)]  # type: ignore[index]
        if _is_the_same_place(node):
            return source if has_layout_of(source.meta.get("val"), node.meta.get("val")) else self._copy(node, node)
        with self.program.graph.inserting_before(self.program.output_node):
            view = self.program.graph.node_copy(node, lambda source: self._seen.get(source, source))
        view.meta = dict(node.meta)
        return view

    def _copy(self, node: fx.Node, home: Hashable) -> fx.Node:
        if home not in self.made:
            self.made[home] = insert_call(self.program, _clone, node, before=self.program.output_node, like=node)
        return self.made[home]


def _is_the_same_place(node: fx.Node) -> bool:
    """Whether a node names its argument's memory as the argument does: a wait, or what was written in place."""
    schema = schema_of(node.target)
    return is_wait(node) or (node.target is not operator.getitem and schema is not None and schema.is_mutable)
