"""The matmul operators as one: two operands, a name for each of their dims and of the result's, a bias, scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph.layouts import Unreadable, same
from crossfade.graph.operators import arguments, remembered
from crossfade.graph.text import render_type

Dims = tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """A matmul: dims of one name are multiplied or summed with one another; None is a dim of size 1 that is repeated.

    Names beginning with m are the left operand's own, with n the right one's, with k those summed over, with b batches.
    A bias is broadcast against the result from the last dim on; scales are those of the left and the right operand.
    """

    left: fx.Node
    right: fx.Node
    left_dims: Dims
    right_dims: Dims
    result_dims: tuple[str, ...]
    bias: fx.Node | None = None
    scales: tuple[fx.Node, fx.Node] | None = None
    fast_accumulation: bool = False


def form_of(node: fx.Node) -> Form | None:
    """The form of a matmul; None for any other node. Raises Unreadable for one that no product of ours does.

    >>> graph = fx.Graph()
    >>> x, w = graph.placeholder("x"), graph.placeholder("w")
    >>> x.meta["val"], w.meta["val"] = torch.empty(2, 3, 4), torch.empty(5, 4)
    >>> linear = graph.call_function(torch.ops.aten.linear.default, (x, w))
    >>> linear.meta["val"] = torch.empty(2, 3, 5)
    >>> form = form_of(linear)
    >>> form.left_dims, form.right_dims, form.result_dims
    (('m0', 'm1', 'k'), ('n', 'k'), ('m0', 'm1', 'n'))
    """
    reading = _reading(node.target) if node.op == "call_function" else None
    if reading is None:
        return None
    form = reading(arguments(node))
    _check_dtypes(node, form)
    return form


_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _check_dtypes(node: fx.Node, form: Form) -> None:
    left, right, made = (operand.meta["val"].dtype for operand in (form.left, form.right, node))
    if form.scales is None and left not in _FLOATS:
        raise Unreadable("the matmul is not of floating-point numbers", f"{node.name} of {left}")
    if form.scales is None and not left == right == made:
        raise Unreadable("the matmul mixes dtypes", f"{node.name}: {left} by {right} gives {made}")


def _mm(given: dict[str, Any]) -> Form:
    return Form(given["self"], given["mat2"], ("m", "k"), ("k", "n"), ("m", "n"))


def _addmm(given: dict[str, Any]) -> Form:
    _check_weights(given)
    return Form(given["mat1"], given["mat2"], ("m", "k"), ("k", "n"), ("m", "n"), bias=given["self"])


def _bmm(given: dict[str, Any]) -> Form:
    return Form(given["self"], given["mat2"], ("b", "m", "k"), ("b", "k", "n"), ("b", "m", "n"))


def _baddbmm(given: dict[str, Any]) -> Form:
    _check_weights(given)
    dims = ("b", "m", "k"), ("b", "k", "n"), ("b", "m", "n")
    return Form(given["batch1"], given["batch2"], *dims, bias=given["self"])


def _linear(given: dict[str, Any]) -> Form:
    left, right = given["input"], given["weight"]
    rows = _rank(left) - 1
    if rows < 1 or _rank(right) != 2:
        raise _vector(left, right)
    own = tuple(f"m{row}" for row in range(rows)) if rows > 1 else ("m",)
    return Form(left, right, (*own, "k"), ("n", "k"), (*own, "n"), bias=given["bias"])


def _matmul(given: dict[str, Any]) -> Form:
    left, right = given["self"], given["other"]
    if min(_rank(left), _rank(right)) < 2:
        raise _vector(left, right)
    batches = max(_rank(left), _rank(right)) - 2
    names = tuple(f"b{index}" for index in range(batches))
    left_names, right_names = ([*names[batches - _rank(operand) + 2 :]] for operand in (left, right))
    left_batch: list[str | None] = list(left_names)
    right_batch: list[str | None] = list(right_names)
    for back in range(1, min(len(left_names), len(right_names)) + 1):
        left_size, right_size = left.meta["val"].shape[-2 - back], right.meta["val"].shape[-2 - back]
        if same(left_size, right_size):
            continue
        if not (same(left_size, 1) or same(right_size, 1)):
            raise Unreadable("the matmul's batches are not provably alike", f"{left_size} and {right_size}")
        (left_batch if same(left_size, 1) else right_batch)[-back] = None
    return Form(left, right, (*left_batch, "m", "k"), (*right_batch, "k", "n"), (*names, "m", "n"))


def _scaled_mm(given: dict[str, Any]) -> Form:
    if given["scale_result"] is not None:
        raise Unreadable("the matmul scales its result", f"by {given['scale_result']}")
    left, right = given["self"], given["mat2"]
    for scale, operand, along in ((given["scale_a"], left, 0), (given["scale_b"], right, 1)):
        value: Tensor = scale.meta["val"]
        wanted = [1, 1]
        wanted[along] = operand.meta["val"].shape[along]
        rows = value.dim() == 2 and all(map(same, value.shape, wanted))
        if value.dtype != torch.float32 or not (rows or same(value.numel(), 1)):
            detail = f"{scale.name} {render_type(value)} of {render_type(operand.meta['val'])}"
            raise Unreadable("a scale is neither one for all nor one for each row", detail)
    dims = ("m", "k"), ("k", "n"), ("m", "n")
    scales = given["scale_a"], given["scale_b"]
    return Form(left, right, *dims, given["bias"], scales, fast_accumulation=bool(given["use_fast_accum"]))


def _check_weights(given: dict[str, Any]) -> None:
    if given["alpha"] != 1 or given["beta"] != 1:
        detail = f"alpha={given['alpha']}, beta={given['beta']}"
        raise Unreadable("the matmul weighs its product or its bias", detail)


def _rank(node: fx.Node) -> int:
    return node.meta["val"].dim()


def _vector(left: fx.Node, right: fx.Node) -> Unreadable:
    shapes = f"{render_type(left.meta['val'])} by {render_type(right.meta['val'])}"
    return Unreadable("an operand of the matmul is a vector", shapes)


_aten = torch.ops.aten
_READINGS: dict[Any, Callable[[dict[str, Any]], Form]] = {
    _aten.mm.default: _mm,
    _aten.addmm.default: _addmm,
    _aten.bmm.default: _bmm,
    _aten.baddbmm.default: _baddbmm,
    _aten.linear.default: _linear,
    _aten.matmul.default: _matmul,
    _aten._scaled_mm.default: _scaled_mm,
}


@remembered
def _reading(target: Any) -> Callable[[dict[str, Any]], Form] | None:
    return _READINGS.get(target)
