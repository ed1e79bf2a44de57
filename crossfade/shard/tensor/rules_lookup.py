"""Sharding rules of operators that look up by number: embeddings and losses over a split vocabulary.

Each rank knows the numbers from `rank * size` on; what is not its own gives zero, and the ranks' results add up.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from crossfade.shard.tensor import conjugate
from crossfade.shard.tensor.factors import Decision
from crossfade.shard.tensor.placements import PARTIAL, REPLICATE, Placement, Shard
from crossfade.shard.tensor.rules import PlacedCall, rule

aten = torch.ops.aten


@rule("embedding")
def embedding(call: PlacedCall) -> Decision:
    """Split by columns, it stays so; split by rows, a partial sum in which one rank's addend is not zero."""
    weight, indices = call.placements
    if isinstance(weight, Shard) and weight.dim == 0:
        if weight.outer != 1 or weight.sizes:
            return call.replicated("its rows are split in blocks")
        if call.args["scale_grad_by_freq"] or call.args["sparse"]:
            return call.replicated("its gradient is scaled by frequency, or sparse")
        why = "rows and positions are both split" if isinstance(indices, Shard) else ""
        if weight.units not in (0, call.shapes[0][0]):
            return call.replicated("its rows are split in units of several")
        return Decision((weight, REPLICATE), (PARTIAL,), emit=_emit_embedding, why=why)
    return call.by_text("!v d, ... -> ... d")


def _emit_embedding(builder: Any, node: Any, args: dict[str, Any]) -> Any:
    weight, indices = args["weight"], args["indices"]
    own, known = _own_numbers(builder, indices, weight.meta["val"].shape[0])
    rows = builder.call(aten.embedding.default, weight, own)
    if args["padding_idx"] >= 0:  # that row gets no gradient
        padding = builder.call(aten.eq.Scalar, indices, args["padding_idx"])
        padding = builder.call(aten.unsqueeze.default, padding, -1)
        rows = builder.call(aten.where.self, padding, builder.call(aten.detach.default, rows), rows)
    outside = builder.call(aten.logical_not.default, builder.call(aten.unsqueeze.default, known, -1))
    return builder.call(aten.masked_fill.Scalar, rows, outside, 0.0)


def _own_numbers(builder: Any, numbers: Any, count: int) -> tuple[Any, Any]:
    """The numbers counted from this rank's first, those of others set to 0, and which are its own."""
    first = builder.call(aten.mul.Tensor, builder.rank(), count)
    local = builder.call(aten.sub.Tensor, numbers, first)
    above = builder.call(aten.ge.Scalar, local, 0)
    below = builder.call(aten.lt.Scalar, local, count)
    known = builder.call(aten.logical_and.default, above, below)
    zero = builder.call(aten.zeros_like.default, local)
    return builder.call(aten.where.self, known, local, zero), known


@rule("cross_entropy_loss")
def cross_entropy(call: PlacedCall) -> Decision:
    """Over split classes: the largest logit, the sum of exponentials and the target's logit are reduced."""
    logits, args = call.placements[0], call.args
    target: Any = call.sources[1].meta["val"]
    if not isinstance(logits, Shard):
        return call.replicated()
    if logits.dim != (1 if len(call.shapes[0]) > 1 else 0):
        return call.replicated("its mean runs over that dim")
    if logits.outer != 1 or logits.sizes:
        return call.replicated("its classes are split in blocks")
    if args["weight"] is not None or args["label_smoothing"] != 0.0 or target.is_floating_point():
        return call.replicated("class weights, smoothing and probabilities need all classes")
    if logits.units not in (0, call.shapes[0][logits.dim]):
        return call.replicated("its classes are split in units of several")
    wants: tuple[Placement, ...] = (logits, *((REPLICATE,) * (len(call.operands) - 1)))
    return Decision(wants, (REPLICATE,), emit=_emit_cross_entropy(logits, call.shapes[0][logits.dim]))


def _emit_cross_entropy(shard: Shard, classes: int) -> Any:
    """Classes that are padding count as impossible."""
    return lambda builder, node, args: _emitted_cross_entropy(builder, args, shard, classes)


def _emitted_cross_entropy(builder: Any, args: dict[str, Any], shard: Shard, classes: int) -> Any:
    logits, target = args["self"], args["target"]
    dim = shard.dim
    count = logits.meta["val"].shape[dim]
    if shard.units:
        logits = builder.blanked(logits, shard, classes, -math.inf)
    detached = builder.call(aten.detach.default, logits)
    highest = builder.call(aten.amax.default, detached, [dim], True)
    highest = builder.call(conjugate.reduce, highest, "max", builder.group)
    shifted = builder.call(aten.sub.Tensor, logits, highest)
    total = builder.call(aten.sum.dim_IntList, builder.call(aten.exp.default, shifted), [dim])
    total = builder.call(conjugate.reduce, total, "sum", builder.group)
    counted = builder.call(aten.ne.Scalar, target, args["ignore_index"])
    own, known = _own_numbers(builder, target, count)
    picked = builder.call(aten.gather.default, shifted, dim, builder.call(aten.unsqueeze.default, own, dim))
    picked = builder.call(aten.squeeze.dim, picked, dim)
    zero = builder.call(aten.zeros_like.default, picked)
    picked = builder.call(aten.where.self, known, picked, zero)
    picked = builder.call(conjugate.reduce, picked, "sum", builder.group)
    each = builder.call(aten.sub.Tensor, builder.call(aten.log.default, total), picked)
    each = builder.call(aten.where.self, counted, each, builder.call(aten.zeros_like.default, each))
    if args["reduction"] == 0:
        return each
    whole = builder.call(aten.sum.default, each)
    if args["reduction"] == 2:
        return whole
    number = builder.call(aten.sum.default, counted)
    return builder.call(aten.div.Tensor, whole, number)
