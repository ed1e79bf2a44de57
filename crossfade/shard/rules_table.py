"""The table of sharding rules, one line an operator where it can be; views and lists are in `rules_views`."""

from __future__ import annotations

from typing import Any

from crossfade.shard.factors import Decision, Factors
from crossfade.shard.placements import REPLICATE, Shard
from crossfade.shard.rules import Call, pointwise, rule

_FIRST, _SECOND = frozenset({0}), frozenset({1})

TABLE = {
    "mm": "m k, k n -> m n",
    "bmm": "b m k, b k n -> b m n",
    "mv": "m k, k -> m",
    "dot": "k, k -> ",
    "outer": "m, n -> m n",
    "linear": "... i, o i, o -> ... o",
    "addmm": "m n, m k, k n -> m n",
    "baddbmm": "b m n, b m k, b k n -> b m n",
    "diagonal": "... !a !b -> ... !c",
    "masked_scatter": "... !a, ... !a, ... !a -> ... !a",
}
"""Operators whose dims are always the same: what each is called, and which are the same thing."""

_ADDED = {"linear": frozenset({2}), "addmm": _FIRST, "baddbmm": _FIRST}
_LINEAR = {
    "mm": (_FIRST, _SECOND),
    "bmm": (_FIRST, _SECOND),
    "mv": (_FIRST, _SECOND),
    "outer": (_FIRST, _SECOND),
}


def _from_table(text: str, added: frozenset[int], linear: tuple[frozenset[int], ...]) -> Any:
    return lambda call: call.by_text(_ranked(text, call), added=added, linear=linear)


def _ranked(text: str, call: Call) -> str:
    """The text with a bias of fewer dims aligned from the right."""
    parts = text.partition("->")[0].split(",")
    fitted = []
    for part, shape in zip(parts, call.shapes, strict=False):
        names = part.split()
        fitted.append(" ".join(names if "..." in names else names[len(names) - len(shape) :]))
    return ", ".join(fitted) + " ->" + text.partition("->")[2]


for _name, _text in TABLE.items():
    rule(_name)(_from_table(_text, _ADDED.get(_name, frozenset()), _LINEAR.get(_name, ())))


@rule("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu",
      "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
      "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable")  # fmt: skip
def attention(call: Call) -> Decision:
    """Batch and heads may be split, the mask's with them; seeds and the like, behind the second result, are whole."""
    text = "b h q !d, b h !k !d, b h !k e, b h q !k -> b h q e"
    if len(call.shapes[0]) == 3:
        text = "h q !d, h !k !d, h !k e, h q !k -> h q e"
    decision = call.by_text(_ranked(text, call))
    if len(call.results) == 1:
        return decision
    split = decision.results[0]
    statistics = split if not isinstance(split, Shard) or split.dim < 3 else REPLICATE
    rest = (REPLICATE,) * (len(call.results) - 2)
    return Decision(decision.wants, (split, statistics, *rest), why=decision.why)


@rule("matmul")
def matmul(call: Call) -> Decision:
    """Vectors, matrices and broadcast batches of them."""
    left, right = (len(shape) for shape in call.shapes)
    batch = max(left, right) - 2
    names = tuple(f"b{index}" for index in range(max(batch, 0)))
    first = (*names[len(names) - max(left - 2, 0) :], "m", "k")[-left:] if left > 1 else ("k",)
    second = (*names[len(names) - max(right - 2, 0) :], "k", "n")[-right:] if right > 1 else ("k",)
    result = (*names, *(("m",) if left > 1 else ()), *(("n",) if right > 1 else ()))
    return call.decide(Factors((first, second), (result,), linear=(_FIRST, _SECOND)))


@rule("einsum")
def einsum(call: Call) -> Decision:
    """As its own equation says."""
    equation = str(call.args["equation"]).replace(" ", "")
    if "." in equation or "->" not in equation:
        return call.replicated("its equation leaves dims unnamed")
    left, _, right = equation.partition("->")
    linear = tuple(frozenset({index}) for index in range(len(call.operands)))
    return call.decide(Factors(tuple(tuple(part) for part in left.split(",")), (tuple(right),), linear=linear))


@rule("conv1d", "conv2d", "conv3d", "convolution")
def convolution(call: Call) -> Decision:
    """Channels may be split; each group's, if there are as many groups as channels; positions may not."""
    groups = int(call.args.get("groups", 1))
    space = [f"!x{index}" for index in range(len(call.shapes[0]) - 2)]
    window = " ".join(f"!w{index}" for index in range(len(space)))
    result = " ".join(f"!y{index}" for index in range(len(space)))
    places = " ".join(space)
    if groups == 1:
        return call.by_text(f"b i {places}, o i {window}, o -> b o {result}", added=frozenset({2}))
    if groups == call.shapes[0][1] and groups == call.shapes[1][0]:
        decision = call.by_text(f"b c {places}, c !one {window}, c -> b c {result}")
        split = getattr(decision.results[0], "dim", None) == 1
        return Decision(decision.wants, decision.results, (("groups", None),) if split else (), why=decision.why)
    return call.replicated("its groups have several channels each")


@rule("softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum", "cumprod", "topk", "sort", "argsort", "flip")
def along_one_dim(call: Call) -> Decision:
    """All dims pass but the one it works along."""
    rank = len(call.shapes[0])
    named = call.args["dims"] if "dims" in call.args else [call.args.get("dim", -1)]
    fixed = frozenset(f"d{int(dim) % max(rank, 1)}" for dim in named)
    names = tuple(f"d{dim}" for dim in range(rank))
    return call.decide(Factors((names,), (names,) * len(call.results), fixed))


@rule("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all", "prod", "var", "std", "logsumexp",
      "norm", "linalg_vector_norm", "var_mean", "median", "nansum")  # fmt: skip
def reduction(call: Call) -> Decision:
    """Dims that are not reduced pass; a sum over a split dim is a partial sum, another reduction needs it whole."""
    if len(call.operands) > 1:  # max(x, y)
        return pointwise(call)
    rank = len(call.shapes[0])
    given = call.args.get("dim")
    listed = list(range(rank)) if given is None or given == [] else [given] if isinstance(given, int) else list(given)
    reduced = {int(dim) % max(rank, 1) for dim in listed}
    keep = bool(call.args.get("keepdim", False))
    names = tuple(f"d{dim}" for dim in range(rank))
    result = tuple(None if dim in reduced else names[dim] for dim in range(rank) if keep or dim not in reduced)
    is_sum = call.node.target._schema.name == "aten::sum"
    is_mean = call.node.target._schema.name == "aten::mean"
    linear = (_FIRST,) if is_sum or is_mean else ()
    return call.decide(Factors((names,), (result,) * len(call.results), summed=is_sum, linear=linear))


@rule("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm")
def norm(call: Call) -> Decision:
    """Leading dims pass; the normalized ones are needed whole."""
    normalized = len(call.args["normalized_shape"])
    rank = len(call.shapes[0])
    names = tuple(f"d{dim}" for dim in range(rank))
    inner = names[rank - normalized :]
    inputs = (names, *((inner,) * (len(call.operands) - 1)))
    statistics = (*names[: rank - normalized], *((None,) * normalized))
    outputs = (names, *((statistics,) * (len(call.results) - 1)))
    return call.decide(Factors(inputs, outputs, frozenset(inner)))


@rule("group_norm", "native_group_norm", "batch_norm", "native_batch_norm", "instance_norm")
def batch_first(call: Call) -> Decision:
    """Everything whole: statistics run over batch or channels."""
    return call.replicated("its statistics need the whole value")


for _name, _linear in {
    "add": (frozenset({0, 1}),),
    "sub": (frozenset({0, 1}),),
    "mul": (_FIRST, _SECOND),
    "div": (_FIRST,),
    "neg": (_FIRST,),
    "where": (frozenset({1, 2}),),
}.items():

    def _pointwise(call: Call, linear: Any = _linear) -> Decision:
        single = len(call.operands) == 1 and call.node.target._schema.name in ("aten::add", "aten::sub")
        return pointwise(call, () if single else linear)

    rule(_name, f"{_name}_")(_pointwise)


@rule("clone", "contiguous", "detach", "alias", "lift_fresh_copy", "detach_", "view_as_real_copy")
def identity(call: Call) -> Decision:
    """The value itself, partial sums included."""
    return pointwise(call, (_FIRST,))


@rule("dropout", "native_dropout", "feature_dropout", "alpha_dropout")
def dropout(call: Call) -> Decision:
    """Without training the value itself; with it, drawn for whole values only, alike on all ranks."""
    training = call.args.get("train", call.args.get("training", True))
    if training and call.args.get("p", 0.0) != 0.0:
        return call.replicated("ranks must draw alike")
    return pointwise(call, (_FIRST,))


@rule("to", "_to_copy", "type_as", "zeros_like", "ones_like", "full_like", "empty_like", "bernoulli", "rand_like",
      "masked_fill", "masked_fill_", "__and__", "__or__", "__xor__", "gelu", "silu", "silu_", "relu", "relu_", "softplus",
      "sigmoid", "tanh", "hardtanh", "leaky_relu", "elu", "clamp", "clip", "bitwise_and", "bitwise_or", "bitwise_not",
      "fill", "copy", "prelu", "isin_scalar", "nan_to_num", "mish", "hardswish", "copy_", "float_power")  # fmt: skip
def elementwise(call: Call) -> Decision:
    """Operators that torch does not mark as pointwise though they are."""
    return pointwise(call)


@rule("new_zeros", "new_ones", "new_full", "new_empty")
def from_sizes(call: Call) -> Decision:
    """Sizes are global: whole, whatever the value is that gives the dtype."""
    decision = call.replicated()
    return Decision(call.placements, decision.results)


@rule("_assert_tensor_metadata", "_assert_async", "sym_size", "sym_numel", "sym_stride")
def question(call: Call) -> Decision:
    """Asks the value, wherever it lies."""
    return Decision(call.placements, ())
