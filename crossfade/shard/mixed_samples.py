"""Operators through which the samples of one part of a batch see each other, and none of the other parts."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx

from crossfade.graph.operators import arguments, remembered

# fmt: off
_ALONG_DIM = frozenset({
    "softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin",
    "flip", "roll", "sort", "argsort", "topk", "glu",
})
# fmt: on
"""Operators that keep a dim and let its elements see each other."""

_ATTENTION = {
    **dict.fromkeys(("_flash_attention_forward", "_efficient_attention_forward"), -3),
    **dict.fromkeys(("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"), -2),
    **dict.fromkeys(("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"), -2),
    **dict.fromkeys(("_scaled_dot_product_attention_math", "_scaled_dot_product_attention_math_for_mps"), -2),
    **dict.fromkeys(("_scaled_dot_product_fused_attention_overrideable", "scaled_dot_product_attention"), -2),
    "flex_attention": -2,
}
"""Operators by which each query sees all keys and values, their second and third argument, and along which dim."""


_SAME_NUMBERS = frozenset({"_to_copy", "detach", "alias", "clone", "clamp"})
_NO_USES = frozenset({"histc", "_assert_tensor_metadata"})
"""Operators that count values, or that exporting adds to hold them to a dtype."""
_LOOK_UP = frozenset({"index", "index_select", "embedding", "index_add", "embedding_dense_backward"})

_ORDERING = frozenset(
    {"max", "min", "aminmax", "topk", "sort", "cummax", "cummin", "kthvalue", "median", "nanmedian", "mode"}
)


def mixes_samples(node: fx.Node, grown: Mapping[fx.Node, tuple[int, ...]]) -> bool:
    """Whether an operator that keeps samples computes each from several; `grown` says where they lie in values."""
    name = operator_name(node.target)
    if (along := _ATTENTION.get(name)) is not None:
        seen = [value for value in node.args[1:3] if isinstance(value, fx.Node)]
        return any(value.meta["val"].dim() + along in grown[value] for value in seen)
    source: Any = node.args[0] if node.args else None
    samples = grown[source] if isinstance(source, fx.Node) else ()
    if not samples:
        return False
    rank = source.meta["val"].dim()
    if name == "native_layer_norm":
        return max(samples) >= rank - len(arguments(node)["normalized_shape"])
    if name == "native_group_norm":
        return max(samples) > 0
    if name == "renorm":
        return any(dim != arguments(node)["dim"] % rank for dim in samples)
    if (last := _last_dims(node, name)) is not None:
        return max(samples) >= rank - last
    if name not in _ALONG_DIM or (name == "sort" and not _values_are_used(node)):
        return False
    given = arguments(node)
    dims = given.get("dim", given.get("dims"))
    listed = dims if isinstance(dims, (list, tuple)) else [dims]
    return not listed or any(isinstance(dim, int) and dim % rank in samples for dim in listed)


def _last_dims(node: fx.Node, name: str) -> int | None:
    """Along how many last dims an operator slides a window, resizes, or sees matrices; None if it does not."""
    if name == "convolution":
        shape = arguments(node)["weight"].meta["val"].shape[2:]
        return len(shape) if any(size > 1 for size in shape) else 0
    if "pool" in name or name.startswith("upsample"):
        return next((count for count in (1, 2, 3) if f"{count}d" in name), None)
    return 2 if name in ("triu", "tril") or (name.lstrip("_").startswith("linalg_") and "vector" not in name) else None


def _values_are_used(sort: fx.Node) -> bool:
    """Whether sorted values are used but to count them, or to look up what belongs to each: by their order alone, each
    sample is put somewhere else."""
    queue = [result for result in sort.users if result.args[1] == 0]
    for value in queue:
        for user in value.users:
            if operator_name(user.target) in _SAME_NUMBERS:
                queue.append(user)
            elif operator_name(user.target) not in _NO_USES and not _looks_up(user, value):
                return True
    return False


def _looks_up(node: fx.Node, value: fx.Node) -> bool:
    """Whether a node takes rows by their numbers, or adds to rows, as the gradient of that does."""
    adds = operator_name(node.target) == "index_put" and bool(arguments(node)["accumulate"])
    return (adds or operator_name(node.target) in _LOOK_UP) and node.args[0] is not value


def orders(node: fx.Node) -> bool:
    """Whether an operator finds values, and their places, by comparing them: values times as large give as large ones.

    Its results after the first are places, but for both of `aminmax`.
    """
    return operator_name(node.target) in _ORDERING


def is_mean(node: fx.Node) -> bool:
    """Whether a node is the mean that an operator gives beside a variance."""
    source: Any = node.args[0] if node.target is operator.getitem else None
    return source is not None and operator_name(source.target) in ("var_mean", "std_mean") and bool(node.args[1])


def is_place(node: fx.Node) -> bool:
    """Whether a node is a result that tells where values lie, which does not depend on how large all of them are."""
    source: Any = node.args[0] if node.target is operator.getitem else None
    return source is not None and orders(source) and bool(node.args[1]) and operator_name(source.target) != "aminmax"


@remembered
def operator_name(target: Any) -> str:
    """An operator's name without its overload."""
    packet = getattr(target, "overloadpacket", target)
    return getattr(packet, "__name__", str(packet))
