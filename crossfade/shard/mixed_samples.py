"""Operators through which the samples of one part of a batch see each other, and none of the other parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from crossfade.graph.operators import arguments, remembered

# fmt: off
_ALONG_DIM = frozenset({
    "softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin",
    "flip", "roll", "sort", "argsort", "topk", "kthvalue",
})
# fmt: on
"""Operators that keep a dim's size and let its elements see each other."""

_ATTENTION = {
    **dict.fromkeys(("_flash_attention_forward", "_efficient_attention_forward"), -3),
    **dict.fromkeys(("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"), -2),
    **dict.fromkeys(("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"), -2),
    **dict.fromkeys(("_scaled_dot_product_attention_math", "_scaled_dot_product_attention_math_for_mps"), -2),
    **dict.fromkeys(("_scaled_dot_product_fused_attention_overrideable", "scaled_dot_product_attention"), -2),
    "flex_attention": -2,
}
"""Operators by which each query sees all keys and values, their second and third argument, and along which dim."""


def mixes_samples(node: fx.Node, grown: Mapping[fx.Node, tuple[int, ...]]) -> bool:
    """Whether an operator that has samples for its result computes each from several; `grown` says where they lie."""
    name = operator_name(node.target)
    if (along := _ATTENTION.get(name)) is not None:
        seen = [value for value in node.args[1:3] if isinstance(value, fx.Node)]
        return any(value.meta["val"].dim() + along in grown[value] for value in seen)
    if name not in _ALONG_DIM or not grown[node]:
        return False
    given = arguments(node)
    dims = given.get("dim", given.get("dims"))
    rank = node.meta["val"].dim()
    listed = dims if isinstance(dims, (list, tuple)) else [dims]
    return any(isinstance(dim, int) and dim % rank in grown[node] for dim in listed)


@remembered
def operator_name(target: Any) -> str:
    """An operator's name without its overload."""
    packet = getattr(target, "overloadpacket", target)
    return getattr(packet, "__name__", str(packet))
