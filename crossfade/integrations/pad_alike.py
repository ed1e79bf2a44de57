"""Batches of tokens, padded by each rank's collator to its own longest sample, as long on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

IGNORED = -100
"""The label that losses of the transformers library leave out."""


def filling(pad: int) -> dict[str, int]:
    """What each tensor of a batch is padded with, by the library's names for them.

    >>> filling(pad=3)["input_ids"], filling(pad=3)["attention_mask"]
    (3, 0)
    """
    masks = dict.fromkeys(("attention_mask", "decoder_attention_mask", "token_type_ids", "position_ids"), 0)
    return {"input_ids": pad, "decoder_input_ids": pad, "labels": IGNORED, **masks}


def padded_alike(batch: Mapping[str, Any], pad: int, *, left: bool = False) -> dict[str, Any]:
    """A batch as long as the longest of all ranks, which call this together.

    A batch without a mask gets one where a rank pads. One with positions and no mask is left as it is: its samples
    stand in one row, and a mask would join them.

    >>> short = {"input_ids": torch.tensor([[5, 6]]), "labels": torch.tensor([[5, 6]])}
    >>> _padded(short, {"input_ids": 3, "labels": 3}, pad=0, left=False)
    {'input_ids': tensor([[5, 6, 0]]), 'labels': tensor([[   5,    6, -100]])}
    """
    own = [_length(batch.get(name)) for name in filling(pad)]
    device = next((value.device for value in batch.values() if isinstance(value, Tensor)), torch.device("cpu"))
    told = torch.tensor([*own, *(-length for length in own)], device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    longest, shortest = told[: len(own)].tolist(), (-told[len(own) :]).tolist()
    lengths = dict(zip(filling(pad), longest, strict=True))
    in_one_row = "position_ids" in batch and "attention_mask" not in batch
    if longest == shortest or in_one_row:
        return dict(batch)
    if "attention_mask" not in batch and _length(batch.get("input_ids")):
        batch = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
        lengths["attention_mask"] = lengths["input_ids"]
    return _padded(batch, lengths, pad, left)


def _length(value: Any) -> int:
    """How many tokens the samples of a tensor have; 0 if it has none for each sample."""
    return int(value.shape[1]) if isinstance(value, Tensor) and value.dim() == 2 else 0


def _padded(batch: Mapping[str, Any], lengths: Mapping[str, int], pad: int, left: bool) -> dict[str, Any]:
    found, fills = dict(batch), filling(pad)
    for name, length in lengths.items():
        missing = length - _length(batch.get(name))
        if missing > 0 and _length(batch.get(name)):
            sides = (missing, 0) if left else (0, missing)
            found[name] = torch.nn.functional.pad(batch[name], sides, value=fills[name])
    return found
