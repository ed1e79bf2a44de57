"""Floating-point operations of the operators that are made of matrix products; every other one counts as none.

A multiplication and an addition are two. Causal attention counts half of its scores: kernels skip the masked blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from crossfade.cost.keys import Keys, TensorDescription
from crossfade.graph.collective_matmul import Equation, read_product
from crossfade.graph.operators import arguments, remembered
from crossfade.graph.private import schema_of

Sizes = tuple[int, ...]
Formula = Callable[[Mapping[str, Any], tuple[TensorDescription, ...]], float]


def flops_of(node: fx.Node, keys: Keys | None = None) -> float:
    """Floating-point operations of one call, from metadata alone; `keys` remembers what tensors are like.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4, 8] = input("x")
    ... w: f32[8, 5] = input("w")
    ... y: f32[4, 5] = aten.mm(x, w)
    ... return output("y", y)
    ... ''')
    >>> flops_of(list(program.graph.nodes)[2])
    320.0
    """
    formula = formula_of(node.target)
    if formula is None:
        return 0.0
    keys = keys or Keys()
    given = {str(name): _sizes(value, keys) for name, value in arguments(node).items()}
    return float(formula(given, keys.tensors(node)))


@remembered
def is_convolution(target: Any) -> bool:
    """Whether an operator is a convolution or its gradient, which libraries compute in ways of their own.

    >>> import torch
    >>> is_convolution(torch.ops.aten.convolution_backward.default), is_convolution(torch.ops.aten.mm.default)
    (True, False)
    """
    return formula_of(target) in (_convolution, _transposed_convolution, _convolution_backward)


@remembered
def formula_of(target: Any) -> Formula | None:
    """How to count an operator's operations; None if it has no matrix product."""
    schema = schema_of(target)
    namespace, name = schema.name.split("::") if schema is not None else ("higher_order", str(target))
    if namespace == "crossfade":
        return _IN_PIECES.get(name)
    return _FORMULAS.get(name) if namespace in ("aten", "higher_order") else None


def equation_flops(equation: Equation, first: Sizes, second: Sizes) -> float:
    """Floating-point operations of a product of two tensors of such sizes.

    >>> equation_flops(read_product("bsk,kn->bsn"), (2, 4, 8), (8, 5))
    640.0
    """
    sizes = dict(zip(equation.first, first, strict=True)) | dict(zip(equation.second, second, strict=True))
    return 2.0 * math.prod(sizes.values())


def _sizes(value: Any, keys: Keys) -> Any:
    """The sizes of a tensor in its place, also in a list; every other argument as it is."""
    if isinstance(value, (list, tuple)):
        return [_sizes(item, keys) for item in value]
    tensors = keys.tensors(value) if isinstance(value, fx.Node) else ()
    return tensors[0].sizes if tensors else value


def _product(left: str) -> Formula:
    """Each result is a sum over the last dim of the left matrix."""
    return lambda given, results: 2 * _elements(results) * given[left][-1]


def _grouped_product(given: Mapping[str, Any], _: tuple[TensorDescription, ...]) -> float:
    """Every row meets the matrix of its group only: of a stack on the left, each meets its share of the columns."""
    left, right = given["self"], given["mat2"]
    return 2 * math.prod(left) * right[-1] / (left[0] if len(left) > len(right) else 1)


def _elements(results: tuple[TensorDescription, ...]) -> int:
    return math.prod(results[0].sizes) if results else 0


def _linear_backward(given: Mapping[str, Any], _: tuple[TensorDescription, ...]) -> float:
    both = 2 * math.prod(given["grad_output"]) * given["weight"][-1]
    return both * sum(given["output_mask"][:2])


def _convolution(given: Mapping[str, Any], results: tuple[TensorDescription, ...]) -> float:
    """Each result is a sum over the channels and places that a filter covers; transposed, each input feeds as many."""
    places = math.prod(given["input"]) if given.get("transposed") else _elements(results)
    return 2 * places * math.prod(given["weight"][1:])


def _transposed_convolution(given: Mapping[str, Any], _: tuple[TensorDescription, ...]) -> float:
    return 2 * math.prod(given["input"]) * math.prod(given["weight"][1:])


def _convolution_backward(given: Mapping[str, Any], _: tuple[TensorDescription, ...]) -> float:
    """Each gradient asked for is as much work as the convolution itself."""
    places = math.prod(given["input"] if given["transposed"] else given["grad_output"])
    return 2 * places * math.prod(given["weight"][1:]) * sum(given["output_mask"][:2])


def _attention(given: Mapping[str, Any], _: tuple[TensorDescription, ...]) -> float:
    """Scores, and the values mixed by them."""
    query, key, value = (_of(given, name, position) for position, name in enumerate(("query", "key", "value")))
    return _scores(given, query, key) * (query[-1] + value[-1])


def _attention_backward(given: Mapping[str, Any], _: tuple[TensorDescription, ...]) -> float:
    """The scores again, then the gradients of scores, values, queries and keys."""
    query, key, value = given["query"], given["key"], given["value"]
    return _scores(given, query, key) * (3 * query[-1] + 2 * value[-1])


def _scores(given: Mapping[str, Any], query: Sizes, key: Sizes) -> float:
    """Twice the number of scores: each is a multiplication and an addition for every element of a row."""
    return 2 * math.prod(query[:-1]) * key[-2] * (0.5 if given.get("is_causal") is True else 1)


def _of(given: Mapping[str, Any], name: str, position: int) -> Any:
    """An argument by name; by position where the operator has no schema, as flex attention."""
    return given[name] if name in given else given[str(position)]


def _gathered_products(given: Mapping[str, Any], _: tuple[TensorDescription, ...]) -> float:
    """Every product of what is gathered, which has the part of each rank."""
    gathered = list(given["part"])
    gathered[given["dim"]] *= given["ranks"]
    pairs = zip(given["products"], given["others"], strict=True)
    return sum(equation_flops(read_product(product), tuple(gathered), other) for product, other in pairs)


def _scattered_product(given: Mapping[str, Any], _: tuple[TensorDescription, ...]) -> float:
    others = given.get("meanwhile", ())
    matrices = read_product("mk,kn->mn")
    pairs = zip(others[::2], others[1::2], strict=True)
    meanwhile = sum(equation_flops(matrices, left, right) for left, right in pairs)
    return equation_flops(read_product(given["product"]), given["left"], given["right"]) + meanwhile


_PLAIN = ("mm", "bmm", "mv", "dot", "matmul", "_scaled_mm")
_ATTENTIONS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention",
               "fused_attention_overrideable")  # fmt: skip

_FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(_PLAIN, _product("self")),
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm"), _grouped_product),
    **dict.fromkeys(("addmm", "addmm_", "_addmm_activation"), _product("mat1")),
    **dict.fromkeys(("baddbmm", "baddbmm_"), _product("batch1")),
    "addmv": _product("mat"),
    "linear": _product("input"),
    "linear_backward": _linear_backward,
    **dict.fromkeys(("convolution", "_convolution", "conv1d", "conv2d", "conv3d"), _convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _transposed_convolution),
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(("scaled_dot_product_attention", "flex_attention"), _attention),
    **{f"_scaled_dot_product_{kind}": _attention for kind in _ATTENTIONS},
    **{f"_scaled_dot_product_{kind}_backward": _attention_backward for kind in _ATTENTIONS},
}

_IN_PIECES: dict[str, Formula] = {
    "gather_matmul": _gathered_products,
    **dict.fromkeys(("matmul_scatter", "matmul_scatter_meanwhile"), _scattered_product),
}
"""Our own operators, whose collective is not counted."""
