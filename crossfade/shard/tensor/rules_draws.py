"""Sharding rules of dropout: every rank draws for the whole value, as one device does, and keeps its part.

Nothing is communicated for it. What is drawn is drawn in the order in which one device's value lies in memory.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from crossfade.shard.tensor import conjugate
from crossfade.shard.tensor.factors import Decision
from crossfade.shard.tensor.placements import Shard
from crossfade.shard.tensor.rules import PlacedCall, pointwise, rule

aten = torch.ops.aten


@rule("dropout", "native_dropout")
def dropout(call: PlacedCall) -> Decision:
    """Without training the value itself; with it, a split value by its part of what is drawn for the whole."""
    linear = (frozenset({0}),) if len(call.results) == 1 else ()
    if call.args["train"] is False or call.args["p"] == 0.0:
        return pointwise(call, linear)
    decision = pointwise(call)
    split = decision.results[0]
    if not isinstance(split, Shard):
        return call.replicated("ranks must draw alike")
    if len(call.results) > 1 or not _can_be_cut(call.sources[0].meta["val"], split):
        return call.replicated("what is drawn for it cannot be taken apart")
    return replace(decision, emit=_emit_dropout(split))


def _can_be_cut(value: Tensor, split: Shard) -> bool:
    return isinstance(split.outer, int) and all(step != 0 for step in value.stride())


def _emit_dropout(split: Shard) -> Any:
    def emit(builder: Any, node: Any, args: dict[str, Any]) -> Any:
        value = node.args[0].meta["val"]
        return builder.call(aten.mul.Tensor, args["input"], own_draw(builder, args["input"], value, split, args["p"]))

    return emit


def own_draw(builder: Any, local: Any, value: Tensor, split: Shard, chance: float) -> Any:
    """This rank's part of what dropout multiplies a whole value by, which is split like this; `local` is the part."""
    order = sorted(range(value.dim()), key=lambda dim: value.stride(dim), reverse=True)
    sizes = [builder.whole_size(local, value, split, dim) for dim in order]
    with_type = dict.fromkeys(("dtype", "layout", "device"))
    ones = builder.call(aten.new_ones.default, local, sizes, **with_type, pin_memory=False)
    if order != list(range(value.dim())):
        ones = builder.call(aten.permute.default, ones, [order.index(dim) for dim in range(value.dim())])
    drawn = builder.call(aten.dropout.default, ones, chance, True)
    return builder.moved(conjugate.split, drawn, split, value)


def attention_with_dropout(call: PlacedCall, decision: Decision) -> Decision:
    """Attention whose batch or heads are split, written out by torch with this rank's part of the drawn mask."""
    split = decision.results[0]
    query, key = (source.meta["val"] for source in call.sources[:2])
    if not isinstance(split, Shard):
        return call.replicated("ranks must draw alike")
    if query.device.type != "cpu" or split.dim >= query.dim() - 2 or not isinstance(split.outer, int):
        return call.replicated("what its kernel draws cannot be taken apart")
    weights = query.new_empty([*query.shape[:-1], key.shape[-2]])  # as they lie when they are drawn for

    def emit(builder: Any, node: Any, args: dict[str, Any]) -> Any:
        scores = _scores(builder, args)
        seen = args["attn_mask"] is not None or args["is_causal"]
        soft = aten._safe_softmax.default if seen else aten.softmax.int
        drawn = own_draw(builder, scores, weights, split, args["dropout_p"])
        chosen = builder.call(aten.mul.Tensor, builder.call(soft, scores, -1), drawn)
        return builder.call(aten.matmul.default, chosen, _for_queries(builder, args, "value"))

    return replace(decision, emit=emit)


def _scores(builder: Any, args: dict[str, Any]) -> Any:
    """What attention's softmax is of, scaled as torch does where it has no kernel for it."""
    query, key = args["query"], _for_queries(builder, args, "key")
    length, positions, width = *(value.meta["val"].shape[-2] for value in (query, key)), query.meta["val"].shape[-1]
    scale = math.sqrt(args["scale"] if args["scale"] is not None else 1 / math.sqrt(width))
    key = builder.call(aten.mul.Tensor, builder.call(aten.mT.default, key), scale)
    scores = builder.call(aten.matmul.default, builder.call(aten.mul.Tensor, query, scale), key)
    mask = args["attn_mask"]
    if args["is_causal"]:
        sizes = [_size(builder, value, -2, size) for value, size in ((query, length), (args["key"], positions))]
        given = {"dtype": torch.bool, "device": query.meta["val"].device, "pin_memory": False}
        mask = builder.call(aten.tril.default, builder.call(aten.ones.default, sizes, **given))
    if mask is None:
        return scores
    if mask.meta["val"].dtype is torch.bool:
        return builder.call(aten.masked_fill.Scalar, scores, builder.call(aten.logical_not.default, mask), -math.inf)
    return builder.call(aten.add.Tensor, scores, mask)


def _size(builder: Any, value: Any, dim: int, size: Any) -> Any:
    return size if isinstance(size, int) else builder.call(aten.sym_size.int, value, dim)


def _for_queries(builder: Any, args: dict[str, Any], name: str) -> Any:
    """Keys or values, once for every head of queries."""
    heads, given = (args[which].meta["val"].shape[-3] for which in ("query", name))
    if not args["enable_gqa"] or heads == given:
        return args[name]
    return builder.call(aten.repeat_interleave.self_int, args[name], heads // given, -3)
