"""A decoder whose sizes and heads do not divide by two or three ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, CHANNELS, INSIDE = 51, 4, 27


class Decoder(nn.Module):
    """A layer of so many heads of queries and of keys, between an embedding and a head."""

    def __init__(self, heads: int, keys: int, fused: bool = False, grouped: bool = False) -> None:
        super().__init__()
        self.heads, self.keys, self.fused, self.grouped = heads, keys, fused, grouped
        width = heads * CHANNELS
        self.sizes = [width, keys * CHANNELS, keys * CHANNELS]
        self.words = nn.Embedding(WORDS, width)
        if fused:
            self.qkv = nn.Linear(width, sum(self.sizes))
        else:
            self.q, self.k, self.v = (nn.Linear(width, size) for size in self.sizes)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, INSIDE), nn.Linear(INSIDE, width)
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        batch, length, width = x.shape
        parts = self.qkv(x).split(self.sizes, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.view(batch, length, -1, CHANNELS).transpose(1, 2) for part in parts)
        if not self.grouped:
            k, v = (part.repeat_interleave(self.heads // self.keys, 1) for part in (k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return self.head(x + self.down(torch.sigmoid(self.up(x))))


PLAN: dict[str, Any] = {
    "words": "embedding_rowwise",
    "out": "rowwise",
    "up": "colwise",
    "down": "rowwise",
    "head": "colwise_gather_output",
}
APART = {"q": "colwise", "k": "colwise", "v": "colwise"}
