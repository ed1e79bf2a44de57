"""What a text may make Python or torch compute while it is read: numbers that stay small, results that are few.

Tensors have no numbers then, so their size costs nothing; whole numbers, and lists of tensors, are really made.

    >>> why_too_large(operator.pow, (10, 10**9), {})
    'a number of at most 4096 bits'
    >>> why_too_large(operator.mul, ("ab", 3), {})
    'numbers or tensors as its arguments'
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from crossfade.graph.allowed import FUNCTIONS
from crossfade.graph.operators import by_name
from crossfade.graph.private import OpOverload, schema_of

MOST_BITS = 4096
MOST_RESULTS = 1 << 16

_NUMBERS = (int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Tensor, type(None))
_TAKE_LISTS = ("builtins.max", "builtins.min", "builtins.sum", "math.prod", "math.dist", "torch.sym_sum")
_BY_ITERATION = {FUNCTIONS[name] for name in _TAKE_LISTS if name in FUNCTIONS}
_POWERS = {operator.pow, FUNCTIONS["builtins.pow"]}
_FUNCTIONS = {function for function in FUNCTIONS.values() if function is not operator.getitem}


def why_too_large(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """What would be expected instead of a call that costs more than its text; None if the call is fine."""
    if isinstance(target, OpOverload):
        count = _results(target, by_name(target, args, kwargs))
        return f"at most {MOST_RESULTS} results, not {count}" if count > MOST_RESULTS else None
    if target not in _FUNCTIONS:
        return None
    numbers = _flat(args) if target in _BY_ITERATION else list(args)
    if kwargs or not all(isinstance(number, _NUMBERS) for number in numbers):
        return "numbers or tensors as its arguments"
    return f"a number of at most {MOST_BITS} bits" if _bits(target, numbers) > MOST_BITS else None


def _flat(args: tuple[Any, ...]) -> list[Any]:
    """Numbers, and those in lists: some functions take a list."""
    return [item for arg in args for item in (arg if isinstance(arg, (list, tuple)) else (arg,))]


def _bits(target: Any, numbers: list[Any]) -> int:
    """A bound on the bits of a whole number that a call makes, from its operands'."""
    sizes = [int(number).bit_length() if isinstance(number, int) else 0 for number in numbers]
    if target in _POWERS and len(numbers) > 1 and isinstance(numbers[1], int):
        return sizes[0] * max(int(numbers[1]), 1) if isinstance(numbers[0], int) else sizes[1]
    if target is operator.lshift and len(numbers) == 2 and isinstance(numbers[1], int):
        return sizes[0] + max(int(numbers[1]), 0)
    return sum(sizes)


def _split(arguments: dict[Any, Any]) -> int:
    size = _dim_size(arguments)
    each = arguments.get("split_size", arguments.get("size", 1))
    return size // each if isinstance(each, int) and each > 0 and isinstance(size, int) else 0


def _pieces(arguments: dict[Any, Any]) -> int:
    return next((arguments[name] for name in ("chunks", "sections") if isinstance(arguments.get(name), int)), 0)


def _dim_size(arguments: dict[Any, Any]) -> int:
    tensor, dim = arguments.get("self", arguments.get("input")), arguments.get("dim", 0)
    fits = isinstance(tensor, torch.Tensor) and isinstance(dim, int) and -tensor.dim() <= dim < tensor.dim()
    return tensor.shape[dim] if isinstance(tensor, torch.Tensor) and fits else 0


def _draws(arguments: dict[Any, Any]) -> int:
    return arguments["r"] if isinstance(arguments.get("r"), int) else 0


_COUNTS: dict[str, Callable[[dict[Any, Any]], int]] = {
    "aten::split": _split,
    "aten::split_copy": _split,
    "aten::unsafe_split": _split,
    "aten::unbind": _dim_size,
    "aten::unbind_copy": _dim_size,
    "aten::chunk": _pieces,
    "aten::unsafe_chunk": _pieces,
    "aten::tensor_split": _pieces,
    "aten::hsplit": _pieces,
    "aten::vsplit": _pieces,
    "aten::dsplit": _pieces,
    "aten::combinations": _draws,
}
"""How many tensors an operator makes that makes a list of them, from its arguments."""


def _results(target: OpOverload, arguments: dict[Any, Any]) -> int:
    count = _COUNTS.get(schema_of(target).name)
    return count(arguments) if count is not None else 0
