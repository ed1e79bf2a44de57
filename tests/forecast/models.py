"""Small models whose layers repeat."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tower(nn.Module):
    """An embedding, equal blocks, a head over the same vocabulary, and the loss."""

    def __init__(self, layers: int, width: int = 16, words: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def tokens(samples: int = 4, length: int = 8) -> tuple[Tensor, Tensor]:
    return tuple(torch.zeros(samples, length, dtype=torch.int64) for _ in range(2))  # type: ignore[return-value]


def tower(layers: int, width: int = 16) -> Tower:
    with torch.device("meta"):
        return Tower(layers, width)
