"""Attention captured as one fused operator, whatever kernels there are on the machine that forecasts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_ATTENTION = (F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)


class FusedAttention(TorchFunctionMode):
    """While it is entered, `scaled_dot_product_attention` is one operator, as flash attention is on GPUs.

    A mask of a square of all positions is taken to be causal: what models build while they are traced, and a kernel is
    told in a word. Keys and values of fewer heads than queries are repeated.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ATTENTION:
            return _fused(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    groups = query.shape[-3] // key.shape[-3]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=-3) for x in (key, value))
    square = attn_mask is not None and attn_mask.shape[-2:] == (query.shape[-2], query.shape[-2])
    out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal or square, attn_mask=None if square else attn_mask, scale=scale
    )
    return out
