"""A program of symbolic sizes with numbers in their place, to look at: what it would have been for these sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph.private import FakeTensorMode, size_expression
from crossfade.graph.program import Program

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def with_sizes(program: Program, sizes: Mapping[str, int]) -> tuple[Program, dict[fx.Node, fx.Node]]:
    """A copy of a program in which symbols are these numbers, and its node for each of the program's own but sizes.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[s0, 3] = input("x")
    ... n: int = aten.sym_size.int(x, 0)
    ... y: f32[3*s0] = aten.view(x, [3 * n])
    ... return output("y", y)
    ... '''.replace("3 * n", "-1"))
    >>> print(with_sizes(program, {"s0": 4})[0])
    x: f32[4, 3] = input("x")
    y: f32[12] = aten.view(x, [-1])
    return output("y", y)
    """
    graph, mode = fx.Graph(), program.fake_mode
    found: dict[fx.Node, Any] = {}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, _SYMBOLIC) and isinstance(number := _number(value, sizes), (bool, int, float)):
            found[node] = number
            continue
        found[node] = graph.node_copy(node, found.__getitem__)
        found[node].meta = {**node.meta, "val": _of_size(value, sizes, mode)}
    copied = replace(program, graph=graph, groups=dict(program.groups), constants=dict(program.constants))
    return copied, {node: copy for node, copy in found.items() if isinstance(copy, fx.Node)}


def _number(value: Any, sizes: Mapping[str, int]) -> Any:
    """What a symbolic value is for these sizes; the value itself if it depends on more than them."""
    if not isinstance(value, _SYMBOLIC):
        return value
    import sympy

    expression = value.node.expr if isinstance(value, torch.SymBool) else size_expression(value)
    if any(str(symbol) not in sizes for symbol in expression.free_symbols):
        return value
    number = expression.xreplace({symbol: sympy.Integer(sizes[str(symbol)]) for symbol in expression.free_symbols})
    kinds: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return kinds[type(value)](number)


def _of_size(value: Any, sizes: Mapping[str, int], mode: FakeTensorMode) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)([_of_size(item, sizes, mode) for item in value])
    if not isinstance(value, Tensor):
        return value
    shape, strides = ([_number(size, sizes) for size in found] for found in (value.shape, value.stride()))
    with mode:
        return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
