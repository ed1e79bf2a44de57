"""Which values may stand for which without anyone seeing a difference in memory.

A functional graph still has memory behind it: results that are views of inputs, two results on one storage, inputs that
an op writes. A rewrite that swaps one value for an equal one must leave all of that as it was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph.effects import may_write, memory_of, written_inputs
from crossfade.graph.operators import remembered
from crossfade.graph.private import schema_of, statically_equal
from crossfade.graph.program import Program


class Aliasing:
    """Who shares memory with inputs and results, and what is written: asked before every replacement.

    Built in one walk; `replaced` keeps it true while the graph is rewritten.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4] = input("x")
    ... a: f32[4] = aten.clone(x)
    ... b: f32[4] = aten.neg(a)
    ... return output("a", a), output("b", b)
    ... ''')
    >>> x, a, b, out = program.graph.nodes
    >>> Aliasing(program).may_replace(a, x)
    'a result of the program would share memory with an input'
    """

    def __init__(self, program: Program) -> None:
        graph = program.graph
        given = (*graph.find_nodes(op="placeholder"), *graph.find_nodes(op="get_attr"))
        strided = graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default, sort=False)
        writers = (node for node in graph.nodes if node.op == "call_function" and may_write(node.target))
        self._given = set(map(memory_of, given))
        self._written = {memory_of(target) for node in writers for target in written_inputs(node)}
        self._strided = set(map(memory_of, strided))
        self._results = {memory_of(value) for value in program.results if isinstance(value, fx.Node)}

    def is_written(self, node: fx.Node) -> bool:
        """Whether something writes the memory behind a value: read at another place, it might not be the same."""
        return bool(self._written) and memory_of(node) in self._written

    def may_replace(self, node: fx.Node, other: fx.Node, other_strides: bool = False) -> str | None:
        """Why `other` may not stand for `node` everywhere, though it has the same value; None if it may.

        With `other_strides`, someone else sees to it that nobody minds these.
        """
        if (reason := _seen_difference(node.meta.get("val"), other.meta.get("val"), other_strides)) is not None:
            return reason
        old, new = memory_of(node), memory_of(other)
        if old == new and old in self._written and may_copy(node.target):
            return "its memory is written to"
        if old == new:
            return "it is a result of the program, which keeps a tensor of its own" if _collide(node, other) else None
        if {old, new} & self._written:
            return "its memory is written to"
        if {old, new} & self._strided:
            return "a view reads its memory by strides"
        if old in self._results:
            if old is not node:
                return "a result of the program shares its memory"
            if new in self._given:
                return "a result of the program would share memory with an input"
            if new in self._results:
                return "two results of the program would share memory"
        return None

    def replaced(self, node: fx.Node, other: fx.Node) -> None:
        """Keep account of `other` now standing for `node`."""
        if memory_of(node) in self._results:
            self._results.add(memory_of(other))


@remembered
def may_copy(target: Any) -> bool:
    """Whether an operator returns its input's memory only where it need not copy: then a write is seen or not."""
    schema = schema_of(target)
    return schema is not None and schema.name in _MAY_COPY


_MAY_COPY = frozenset(f"aten::{name}" for name in ("to", "type_as", "reshape", "contiguous", "flatten", "reshape_as"))


def _collide(node: fx.Node, other: fx.Node) -> bool:
    """Whether one tensor object would be returned where there were two: an input as a result, or one result twice."""
    taken = other.op in ("placeholder", "get_attr") or any(user.op == "output" for user in other.users)
    return taken and any(user.op == "output" for user in node.users)


def _seen_difference(old: Any, new: Any, other_strides: bool) -> str | None:
    """What a reader of two equal values could still tell apart: how they lie in memory."""
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        return None
    if old.dtype != new.dtype or old.device != new.device:
        return "its dtype or device would change"
    if not statically_equal(old.shape, new.shape):
        return "its shape is not provably the same"
    strided = old.layout == torch.strided == new.layout
    if strided and not other_strides and not statically_equal(old.stride(), new.stride()):
        return "its strides would change"
    if old.is_conj() != new.is_conj() or old.is_neg() != new.is_neg():
        return "its conjugate or negative bit would change"
    return None
