"""A small GPT in plain torch, as a user would write it: nothing in it knows of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Size:
    """The size of a GPT and of the batch one rank computes."""

    width: int
    heads: int
    layers: int
    vocabulary: int
    length: int
    batch: int
    dropout: float = 0.0


SIZES = {
    "tiny": Size(width=64, heads=4, layers=2, vocabulary=128, length=32, batch=2),
    "demo": Size(width=256, heads=4, layers=6, vocabulary=1024, length=64, batch=2),
    "wide": Size(width=384, heads=6, layers=8, vocabulary=2048, length=128, batch=1),
    "deep": Size(width=96, heads=4, layers=24, vocabulary=512, length=64, batch=1),
}
"""`wide` and `deep` are 60 MB in 85 parameters and 11 MB in 293: communication bound and latency bound at 1 Gbit/s."""


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.dropout = size.heads, size.dropout
        self.query_key_value = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend to earlier positions."""
        batch, length, width = x.shape
        split = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = split.unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each with a residual."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)
        self.drop = nn.Dropout(size.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """A decoder-only transformer that returns logits."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.length, size.width)
        self.drop = nn.Dropout(size.dropout)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token at each position."""
        x = self.drop(self.token(tokens) + self.position.weight[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over all positions."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(size: Size) -> GPT:
    """The same model on every rank and in every run."""
    torch.manual_seed(0)
    return GPT(size)


def batches(size: Size, ranks: int, number: int) -> list[tuple[Tensor, Tensor]]:
    """Global batches of a learnable toy language: each token follows from the one before, with some noise."""
    generator = torch.Generator().manual_seed(1)
    shape = (ranks * size.batch, 1)
    result = []
    for _ in range(number):
        start = torch.randint(0, size.vocabulary, shape, generator=generator)
        noise = torch.randint(0, 3, (shape[0], size.length + 1), generator=generator)
        tokens = (start + 7 * torch.arange(size.length + 1) + noise) % size.vocabulary
        result.append((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
    return result
