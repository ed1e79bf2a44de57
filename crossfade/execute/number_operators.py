"""Operators that take numbers, with tensors of one element in their place: for kernels that are compiled once, and for
graphs of kernels that are recorded once, though rates and corrections change from step to step.

Each computes in the precision in which torch's own kernel computes with a number: single for half precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph.operators import arguments
from crossfade.graph.private import tree_flatten

_aten = torch.ops.aten


def takes_numbers(node: fx.Node) -> bool:
    """Whether an operator, in the way in which a node calls it, is known with tensors in place of numbers."""
    if node.target not in OPERATORS:
        return False
    computed_on = arguments(node)["self"]
    return isinstance(computed_on, fx.Node) and isinstance(computed_on.meta.get("val"), Tensor)


def _with_numbers(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The operator that computes so, in the precision of numbers, and returns its first argument's dtype."""

    def operator(self: Tensor, *rest: Any, **named: Any) -> Tensor:
        precise = torch.promote_types(self.dtype, torch.float32) if self.dtype.is_floating_point else torch.float32

        def cast(value: Any) -> Any:
            return value.to(precise) if isinstance(value, Tensor) else value

        made = compute(cast(self), *map(cast, rest), **{name: cast(value) for name, value in named.items()})
        return made.to(_result_dtype(self, rest, named))

    return operator


def _result_dtype(self: Tensor, rest: tuple[Any, ...], named: dict[str, Any]) -> torch.dtype:
    """What torch's own operator returns: numbers do not widen it, tensors do."""
    tensors = [value for value in tree_flatten(((self, *rest), named))[0] if isinstance(value, Tensor) and value.dim()]
    found = self.dtype
    for tensor in tensors:
        found = torch.promote_types(found, tensor.dtype)
    return found if found.is_floating_point else torch.get_default_dtype()


def _in_place(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda self, *rest, **named: self.copy_(operator(self, *rest, **named))


@_with_numbers
def _add(self: Tensor, other: Any, alpha: Any = 1) -> Tensor:
    return self + (other if _is_plain(alpha, 1) else alpha * other)


@_with_numbers
def _sub(self: Tensor, other: Any, alpha: Any = 1) -> Tensor:
    return self - (other if _is_plain(alpha, 1) else alpha * other)


@_with_numbers
def _mul(self: Tensor, other: Any) -> Tensor:
    return self * other


@_with_numbers
def _div(self: Tensor, other: Any) -> Tensor:
    return self / other


@_with_numbers
def _pow(self: Tensor, exponent: Any) -> Tensor:
    return self**exponent


@_with_numbers
def _lerp(self: Tensor, end: Tensor, weight: Any) -> Tensor:
    return torch.where(torch.as_tensor(weight).abs() < 0.5, self + weight * (end - self), _from_end(self, end, weight))


def _from_end(self: Tensor, end: Tensor, weight: Any) -> Tensor:
    return end - (end - self) * (1 - weight)


@_with_numbers
def _addcmul(self: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: Any = 1) -> Tensor:
    return self + value * tensor1 * tensor2


@_with_numbers
def _addcdiv(self: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: Any = 1) -> Tensor:
    return self + value * (tensor1 / tensor2)


def _is_plain(value: Any, number: float) -> bool:
    return not isinstance(value, Tensor) and value == number


OPERATORS: dict[Any, Callable[..., Tensor]] = {
    _aten.add.Tensor: _add,
    _aten.sub.Tensor: _sub,
    _aten.mul.Tensor: _mul,
    _aten.div.Tensor: _div,
    _aten.pow.Tensor_Scalar: _pow,
    _aten.lerp.Scalar: _lerp,
    _aten.addcmul.default: _addcmul,
    _aten.addcdiv.default: _addcdiv,
    _aten.add_.Tensor: _in_place(_add),
    _aten.sub_.Tensor: _in_place(_sub),
    _aten.mul_.Tensor: _in_place(_mul),
    _aten.div_.Tensor: _in_place(_div),
    _aten.pow_.Scalar: _in_place(_pow),
    _aten.lerp_.Scalar: _in_place(_lerp),
    _aten.addcmul_.default: _in_place(_addcmul),
    _aten.addcdiv_.default: _in_place(_addcdiv),
}
"""What computes the same as an operator when the numbers that it takes are tensors."""
