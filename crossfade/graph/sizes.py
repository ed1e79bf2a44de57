"""Symbolic sizes in a program's text: `f32[s0, 2*s0 + 1]`. A symbol is known by its name in all of a text."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

import torch

from crossfade.graph.private import symbolic_size

_SYMBOL = re.compile(r"s\d{1,6}")
_HINT = 5040
"""What a symbol stands for where torch asks for an example: many numbers divide it, and no two symbols share one."""

_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Max": torch.sym_max,
    "Min": torch.sym_min,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
}


class Sizes:
    """Reads sizes; a symbol that was not met before is made.

    >>> from crossfade.graph.private import symbolic_shapes
    >>> str(Sizes(symbolic_shapes()).read(ast.parse("2*s0 + 1", mode="eval").body))
    '2*s0 + 1'
    """

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self.symbols: dict[str, Any] = {}

    def read(self, size: ast.expr) -> Any:
        """A number or an expression of symbols; ValueError if it is neither."""
        match size:
            case ast.Constant(value=int(number)) if not isinstance(number, bool):
                return number
            case ast.Name(id=name) if _SYMBOL.fullmatch(name):
                return self._symbol(name)
            case ast.UnaryOp(op=ast.USub(), operand=item):
                return -self.read(item)
            case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
                return _OPERATIONS[type(operation)](self.read(left), self.read(right))
            case ast.BinOp(left=base, op=ast.Pow(), right=ast.Constant(value=int(power))) if 0 < power < 16:
                return self.read(base) ** power
            case ast.Call(func=ast.Name(id=name), args=[first, second], keywords=[]) if name in _FUNCTIONS:
                return _FUNCTIONS[name](self.read(first), self.read(second))
        raise ValueError("a size that is neither a number nor made of symbols like s0")

    def _symbol(self, name: str) -> Any:
        if name not in self.symbols:
            self.symbols[name] = symbolic_size(self.environment, name, _HINT * (len(self.symbols) + 1))
        return self.symbols[name]
