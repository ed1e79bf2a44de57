"""The table of sharding rules, one line an operator where it can be; views and lists are in `rules_views`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from crossfade.shard.tensor.equations import read_equation
from crossfade.shard.tensor.factors import Decision, Factors
from crossfade.shard.tensor.placements import PARTIAL, REPLICATE, Placement, Shard, divides, local_size
from crossfade.shard.tensor.rules import PlacedCall, pointwise, rule
from crossfade.shard.tensor.rules_draws import attention_with_dropout

_aten = torch.ops.aten

_FIRST, _SECOND, _BOTH = frozenset({0}), frozenset({1}), frozenset({0, 1})

TABLE = {
    "mm": "m k, k n -> m n",
    "bmm": "b m k, b k n -> b m n",
    "mv": "m k, k -> m",
    "dot": "k, k -> ",
    "outer": "m, n -> m n",
    "linear": "... i, o i, o -> ... o",
    "addmm": "m n, m k, k n -> m n",
    "baddbmm": "b m n, b m k, b k n -> b m n",
}
"""Products, whose dims are always the same: what each is called, and which are the same thing."""

_ADDED = {"linear": frozenset({2}), "addmm": _FIRST, "baddbmm": _FIRST}


def _from_table(text: str, added: frozenset[int]) -> Any:
    linear = () if added else (_FIRST, _SECOND)
    return lambda call: call.by_text(text, added=added, linear=linear)


for _name, _text in TABLE.items():
    rule(_name)(_from_table(_text, _ADDED.get(_name, frozenset())))


@rule("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu",
      "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
      "_scaled_dot_product_cudnn_attention")  # fmt: skip
def attention(call: PlacedCall) -> Decision:
    """Batch and heads may be split, the mask's with them, and queries, unless what they see depends on their position.

    Of a kernel, which has several results, the second has each head's statistics, some padded; seeds are whole.
    """
    drops = call.args.get("dropout_p", 0.0) != 0.0
    rank = len(call.shapes[0])
    if rank < 3 or any(len(shape) != rank for shape in call.shapes[1:3]) or len(call.shapes[-1]) > rank:
        return call.replicated("its operands' numbers of dims differ")
    batch = " ".join([*(f"b{index}" for index in range(rank - 3)), "h"])
    kernel = len(call.results) > 1
    if drops and kernel:
        return call.replicated("what its kernel draws cannot be taken apart")
    queries, width = "!q" if kernel or call.args.get("is_causal") else "q", "!e" if kernel else "e"
    text = f"{batch} {queries} !d, {batch} !k !d, {batch} !k {width}, {batch} {queries} !k -> {batch} {queries} {width}"
    split, keys = call.placements[0], call.shapes[1][rank - 3]
    by_head = isinstance(split, Shard) and split.dim == rank - 3 and split.outer == 1 and not split.sizes
    if by_head and isinstance(split, Shard) and not kernel and not divides(split, keys, call.ranks):
        return call.replicated("ranks must draw alike") if drops else _with_own_keys(call, text, rank - 3)
    decision = call.by_text(text)
    if drops:
        return attention_with_dropout(call, decision)
    rest = (*decision.results, *((REPLICATE,) * (len(call.results) - 2))) if kernel else ()
    return replace(decision, results=(*decision.results, *rest))


def _with_own_keys(call: PlacedCall, text: str, dim: int) -> Decision:
    """Split heads of queries, and fewer of keys that cannot be split: each rank takes those that its queries see."""
    operands = list(call.operands)
    for index in (1, 2):
        shape = list(operands[index].shape)
        shape[dim] = call.shapes[0][dim]
        operands[index] = replace(operands[index], placement=REPLICATE, shape=tuple(shape))
    decision = PlacedCall(call.node, operands, call.sources, call.ranks).by_text(text)
    wants = (decision.wants[0], REPLICATE, REPLICATE, *decision.wants[3:])

    def emit(builder: Any, node: Any, args: dict[str, Any]) -> Any:
        each = args["query"].meta["val"].shape[dim]
        head = builder.call(_aten.arange.default, each, device=args["query"].meta["val"].device, pin_memory=False)
        head = builder.call(_aten.add.Tensor, head, builder.call(_aten.mul.Tensor, builder.rank(), each))
        head = builder.call(_aten.clamp.default, head, None, call.shapes[0][dim] - 1)  # what is padding sees the last
        own = builder.call(_aten.floor_divide.default, head, call.shapes[0][dim] // call.shapes[1][dim])
        for name in ("key", "value"):
            args[name] = builder.call(_aten.index_select.default, args[name], dim, own)
        return builder.call(node.target, **{**args, "enable_gqa": False})

    return replace(decision, wants=wants, emit=emit)


@rule("matmul")
def matmul(call: PlacedCall) -> Decision:
    """Vectors, matrices and broadcast batches of them."""
    left, right = (len(shape) for shape in call.shapes)
    batch = max(left, right) - 2
    names = tuple(f"b{index}" for index in range(max(batch, 0)))
    first = (*names[len(names) - max(left - 2, 0) :], "m", "k")[-left:] if left > 1 else ("k",)
    second = (*names[len(names) - max(right - 2, 0) :], "k", "n")[-right:] if right > 1 else ("k",)
    result = (*names, *(("m",) if left > 1 else ()), *(("n",) if right > 1 else ()))
    return call.decide(Factors((first, second), (result,), linear=(_FIRST, _SECOND)))


@rule("einsum")
def einsum(call: PlacedCall) -> Decision:
    """As its own equation says."""
    parts, result = read_equation(str(call.args["equation"]), [len(shape) for shape in call.shapes])
    diagonal = frozenset(name for part in parts for name in part if name is not None and part.count(name) > 1)
    linear = tuple(frozenset({index}) for index in range(len(parts)))
    return call.decide(Factors(parts, (result,), diagonal, linear=linear))


@rule("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def convolution(call: PlacedCall) -> Decision:
    """Channels may be split, in whole groups where they come in groups; positions may not."""
    transposed = call.args.get("transposed") or "transpose" in call.name
    value, weight = call.shapes[:2]
    batch = "b" if len(value) == len(weight) else ""
    space = range(len(weight) - 2)
    places, window, result = (" ".join(f"!{letter}{index}" for index in space) for letter in "xwy")
    groups = call.args["groups"]
    if groups == 1:
        channels = "i o" if transposed else "o i"
        return call.by_text(f"{batch} i {places}, {channels} {window}, o -> {batch} o {result}", added=frozenset({2}))
    alone = groups == value[len(batch)] == weight[0] and not transposed
    splits = [split for split in call.placements if isinstance(split, Shard)]
    plain = all(split.outer == 1 and not split.sizes and not split.units for split in splits)
    channel = "c" if alone or (plain and groups % call.ranks == 0) else "!c"
    decision = call.by_text(f"{batch} {channel} {places}, c !each {window}, c -> {batch} c {result}")
    split = decision.results[0]
    by_channel = isinstance(split, Shard) and split.dim == len(batch)
    return replace(decision, divide=(("groups", None),) if by_channel else ())


@rule("softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum", "cumprod", "topk", "sort", "argsort", "flip",
      "roll")  # fmt: skip
def along_one_dim(call: PlacedCall) -> Decision:
    """All dims pass but the one it works along."""
    rank = len(call.shapes[0])
    named = (call.args["dims"] or range(rank)) if "dims" in call.args else [call.args.get("dim", -1)]
    fixed = frozenset(f"d{int(dim) % max(rank, 1)}" for dim in named)
    names = tuple(f"d{dim}" for dim in range(rank))
    return call.decide(Factors((names,), (names,) * len(call.results), fixed))


@rule("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all", "prod", "var", "std", "logsumexp",
      "norm", "linalg_vector_norm", "var_mean", "median", "nansum")  # fmt: skip
def reduction(call: PlacedCall) -> Decision:
    """Dims that are not reduced pass; over a split dim a sum is a partial sum, and a mean is one of the parts' means.

    Other reductions need that dim whole.
    """
    if len(call.operands) > 1:  # max(x, y)
        return pointwise(call)
    rank = len(call.shapes[0])
    given = call.args.get("dim")
    if given == []:
        return call.replicated("whether no dims are all or none differs by operator")
    listed = list(range(rank)) if given is None else [given] if isinstance(given, int) else list(given)
    reduced = {int(dim) % max(rank, 1) for dim in listed}
    keep = bool(call.args.get("keepdim", False))
    names = tuple(f"d{dim}" for dim in range(rank))
    result = tuple(None if dim in reduced else names[dim] for dim in range(rank) if keep or dim not in reduced)
    dtype = call.results[0].dtype
    mean = call.name == "aten::mean"
    summed = mean or (call.name == "aten::sum" and dtype is not torch.bool)
    keeps_dtype = dtype is call.sources[0].meta["val"].dtype  # whole numbers that are cut off do not add up
    linear = (_FIRST,) if call.name in ("aten::sum", "aten::mean") and keeps_dtype else ()
    decision = call.decide(Factors((names,), (result,) * len(call.results), summed=summed, linear=linear))
    split = decision.wants[0]
    of_parts = mean and isinstance(split, Shard) and decision.results == (PARTIAL,)
    return replace(decision, emit=_emit_share_of_mean(split)) if of_parts and isinstance(split, Shard) else decision


def _emit_share_of_mean(shard: Shard) -> Any:
    """What a rank adds to a mean: that of its part, which is as large as every other's, by the number of ranks."""

    def emit(builder: Any, node: Any, args: dict[str, Any]) -> Any:
        given = [args[name] for name in ("self", "dim", "keepdim") if name in args]
        own = builder.call(node.target, *given, **({"dtype": args["dtype"]} if args["dtype"] is not None else {}))
        if not shard.units:
            return builder.call(torch.ops.aten.div.Tensor, own, builder.ranks)
        size = node.args[0].meta["val"].shape[shard.dim]
        return builder.call(torch.ops.aten.mul.Tensor, own, local_size(shard, size, builder.ranks) / size)

    return emit


LINEAR = {
    "add": (_BOTH,),
    **dict.fromkeys(("sub", "subtract"), (_BOTH,)),
    **dict.fromkeys(("mul", "multiply"), (_FIRST, _SECOND)),
    **dict.fromkeys(("div", "divide"), (_FIRST,)),
    **dict.fromkeys(("neg", "negative"), (_FIRST,)),
    "where": (frozenset({1, 2}),),
    "clone": (_FIRST,),
    "contiguous": (_FIRST,),
    "detach": (_FIRST,),
    "alias": (_FIRST,),
    "lift_fresh_copy": (_FIRST,),
}
"""Elementwise operators through which partial sums pass, and the operands that may be such together."""


def _from_linear(linear: tuple[frozenset[int], ...]) -> Any:
    return lambda call: pointwise(call, () if call.args.get("rounding_mode") else linear)


for _name, _linear in LINEAR.items():
    rule(_name)(_from_linear(_linear))


@rule("masked_fill", "__and__", "__or__", "fill", "copy", "hardswish", "absolute", "log_sigmoid")
def elementwise(call: PlacedCall) -> Decision:
    """Operators that torch does not mark as pointwise though they are."""
    return pointwise(call)


@rule("to", "_to_copy", "type_as")
def cast(call: PlacedCall) -> Decision:
    """Partial sums are added up before they are rounded, if they are. Another operand only lends its dtype."""
    rounds = call.results[0].dtype is not call.sources[0].meta["val"].dtype
    kept = _unless_partial(call.placements[0]) if rounds else call.placements[0]
    return Decision((kept, *call.placements[1:]), (kept,))


@rule("zeros_like", "ones_like", "full_like", "empty_like")
def like(call: PlacedCall) -> Decision:
    """Only the value's sizes matter."""
    return Decision(call.placements, (_unless_partial(call.placements[0]),))


def _unless_partial(placement: Placement) -> Placement:
    return placement if isinstance(placement, Shard) else REPLICATE


@rule("new_zeros", "new_ones", "new_full", "new_empty")
def from_sizes(call: PlacedCall) -> Decision:
    """Sizes are global: whole, whatever the value is that gives the dtype."""
    return Decision(call.placements, (REPLICATE,))


@rule("_assert_tensor_metadata", "sym_size.int", "sym_numel")
def question(call: PlacedCall) -> Decision:
    """Asks the value, wherever it lies."""
    return Decision(call.placements, ())
