"""Sharding rules of norms: what is normalized over may be split, since ranks need of each other only the statistics."""

from __future__ import annotations

import math
from typing import Any

import torch

from crossfade.shard.tensor import conjugate
from crossfade.shard.tensor.factors import Decision, Factors
from crossfade.shard.tensor.placements import Shard, divides
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
