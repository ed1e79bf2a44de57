"""Models as the published measurements trained them: a GPT as Megatron has it, and Llama 3."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def dropout(x: Tensor) -> Tensor:
    """What dropout reads and writes, but for its mask of a byte an element; nothing is drawn."""
    return x * 1.1


def softmax(scores: Tensor, matrices: int) -> Tensor:
    """Causal shares of one rank's matrices of scores.

    Megatron's kernel scales, masks and computes in float32 inside, four matrices at a time. For other numbers of them
    it falls back to torch's operators, one after another.
    """
    if matrices % 4 == 0:
        return torch.softmax(scores, -1)
    length = scores.shape[-1]
    later = torch.empty(length, length, dtype=torch.bool, device=scores.device)
    return torch.softmax((scores.float() * 1.1).masked_fill(later, -10000.0), -1).half()


class Attention(nn.Module):
    """Scores as one product, softmax and dropout over them, as before attention was fused."""

    def __init__(self, hidden: int, heads: int, ranks: int) -> None:
        super().__init__()
        self.size, self.local_heads = hidden // heads, heads // ranks
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            part(x).view(batch, length, -1, self.size).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        scores = torch.matmul(query, key.transpose(-1, -2))
        shares = dropout(softmax(scores, batch * self.local_heads))
        mixed = torch.matmul(shares, value).transpose(1, 2)
        return self.out(mixed.reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, ranks: int) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, ranks)
        self.before_products = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + dropout(self.attention(self.before_attention(x)))
        return x + dropout(self.down(F.gelu(self.up(self.before_products(x)))))


class GPT(nn.Module):
    """Tokens in, loss of the next ones out; the vocabulary padded if it is split, the head tied to it.

    On one rank its 50,257 tokens are not padded: the measured head takes as long as products of such rows do.
    """

    def __init__(self, hidden: int, heads: int, layers: int, length: int, ranks: int) -> None:
        super().__init__()
        size = 128 * ranks * math.ceil(50257 / (128 * ranks)) if ranks > 1 else 50257
        self.tokens = nn.Embedding(size, hidden)
        self.places = nn.Embedding(length, hidden)
        self.layers = nn.ModuleList(Block(hidden, heads, ranks) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, size, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


GPT_PLAN = {
    **{f"layers.*.attention.{name}": "colwise" for name in ("query", "key", "value")},
    "layers.*.attention.out": "rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "tokens": "rowwise",
    "head": "colwise",
}


def gpt(hidden: int, heads: int, layers: int, length: int, ranks: int) -> GPT:
    """A GPT without numbers, in half precision."""
    with torch.device("meta"):
        return GPT(hidden, heads, layers, length, ranks).to(torch.float16)


def tokens(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets without numbers."""
    return tuple(torch.empty(batch, length, dtype=torch.int64, device="meta") for _ in range(2))  # type: ignore[return-value]
