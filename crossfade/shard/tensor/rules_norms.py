"""Sharding rules of norms: what is normalized over may be split, since ranks need of each other only the statistics."""

from __future__ import annotations

import math
from typing import Any

import torch

from crossfade.shard.tensor import conjugate
from crossfade.shard.tensor.factors import Decision, Factors
from crossfade.shard.tensor.placements import REPLICATE, Shard, divides
from crossfade.shard.tensor.rules import PlacedCall, rule

aten = torch.ops.aten


@rule("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm")
def norm(call: PlacedCall) -> Decision:
    """Leading dims pass; over a split dim ranks add up one number (a layer norm two) for each that is normalized."""
    normalized = len(call.args["normalized_shape"])
    rank = len(call.shapes[0])
    split = call.placements[0]
    if isinstance(split, Shard) and split.dim >= rank - normalized and len(call.results) == 1:
        size = call.shapes[0][split.dim]
        if isinstance(size, int) and divides(split, size, call.ranks):
            own = split.on(split.dim - rank + normalized)  # of weight and bias
            wants = (split, *((own,) * (len(call.operands) - 1)))
            return Decision(wants, (split,), emit=_emit_norm(split, range(rank - normalized, rank)))
    names = tuple(f"d{dim}" for dim in range(rank))
    inner = names[rank - normalized :]
    inputs = (names, *((inner,) * (len(call.operands) - 1)))
    statistics = (*names[: rank - normalized], *((None,) * normalized))
    outputs = (names, *((statistics,) * (len(call.results) - 1)))
    return call.decide(Factors(inputs, outputs, frozenset(inner)))


def _emit_norm(split: Shard, dims: range) -> Any:
    """Computed in float32 where the value is of less, as torch does."""

    def emit(builder: Any, node: Any, args: dict[str, Any]) -> Any:
        value = node.args[0].meta["val"]
        centred = "bias" in args
        x, dtype = args["input"], value.dtype
        if dtype.itemsize < 4:
            x = builder.call(aten.to.dtype, x, torch.float32)
        count = math.prod(value.shape[dim] for dim in dims)

        def mean(each: Any) -> Any:
            if split.units:
                each = builder.blanked(each, split, value.shape[split.dim])
            own = builder.call(aten.sum.dim_IntList, each, list(dims), True)
            whole = builder.call(conjugate.reduce, own, "sum", builder.group)
            return builder.call(aten.div.Tensor, builder.call(conjugate.enter, whole, builder.group), count)

        if centred:
            x = builder.call(aten.sub.Tensor, x, mean(x))
        eps = args["eps"] if args["eps"] is not None else torch.finfo(dtype).eps
        spread = builder.call(aten.add.Scalar, mean(builder.call(aten.mul.Tensor, x, x)), eps)
        x = builder.call(aten.mul.Tensor, x, builder.call(aten.rsqrt.default, spread))
        if dtype.itemsize < 4:
            x = builder.call(aten.to.dtype, x, dtype)
        if args.get("weight") is not None:
            x = builder.call(aten.mul.Tensor, x, args["weight"])
        return builder.call(aten.add.Tensor, x, args["bias"]) if args.get("bias") is not None else x

    return emit


@rule("_weight_norm", "_weight_norm_interface")
def weight_norm(call: PlacedCall) -> Decision:
    """Each step along the dim that keeps its norm is normalized by itself; over a split dim ranks add up squares."""
    rank, kept = len(call.shapes[0]), int(call.args["dim"])
    kept = kept if kept == _OVER_ALL else kept % rank
    names = tuple(f"d{dim}" for dim in range(rank))
    others = [dim for dim in range(rank) if dim != kept]
    split = call.placements[0]
    if isinstance(split, Shard) and len(call.results) == 1 and (split.dim != kept or split.units):
        norms = split if split.dim == kept else REPLICATE
        return Decision((split, norms), (split,), emit=_emit_weight_norm(split, others))
    norms_dims = tuple(name if dim == kept else None for dim, name in enumerate(names))[: len(call.shapes[1])]
    outputs = (names, norms_dims)[: len(call.results)]
    return call.decide(Factors((names, norms_dims), outputs, frozenset(names[dim] for dim in others)))


_OVER_ALL = -1
"""The dim that says that a weight has one norm for all of it."""


def _emit_weight_norm(split: Shard, others: list[int]) -> Any:
    """Computed in float32 where the value is of less, as torch does. Padding is divided by one, not by its norm."""

    def emit(builder: Any, node: Any, args: dict[str, Any]) -> Any:
        value = node.args[0].meta["val"]
        v, g, dtype = args["v"], args["g"], value.dtype
        if dtype.itemsize < 4:
            v, g = (builder.call(aten.to.dtype, each, torch.float32) for each in (v, g))
        squares = builder.call(aten.mul.Tensor, v, v)
        squares = builder.call(aten.sum.dim_IntList, squares, others, True) if others else squares
        if split.dim in others:
            squares = builder.call(conjugate.reduce, squares, "sum", builder.group)
            squares = builder.call(conjugate.enter, squares, builder.group)
        else:
            squares = builder.blanked(squares, split, value.shape[split.dim], fill=1.0)
        scale = builder.call(aten.div.Tensor, g, builder.call(aten.sqrt.default, squares))
        w = builder.call(aten.mul.Tensor, v, scale)
        return builder.call(aten.to.dtype, w, dtype) if dtype.itemsize < 4 else w

    return emit
