"""Models with routed experts, for tests that compare ranks with one device."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from tests.models import zoo

WIDTH, HIDDEN, CHOSEN = 16, 32, 2


class Routed(nn.Module):
    """A layer of routed experts by torch's grouped matmul, whose kernel takes bfloat16; all else is float32."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.router = nn.Linear(WIDTH, experts)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(experts, HIDDEN, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(CHOSEN)
        groups, order = chosen.flatten().sort(stable=True)
        counts = torch.histc(groups.float(), self.experts, 0, self.experts - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        hidden = nn.functional.grouped_mm(x[order // CHOSEN].bfloat16(), self.up.bfloat16(), offs=ends)
        made = nn.functional.grouped_mm(hidden.relu(), self.down.bfloat16(), offs=ends)
        weighted = made.float() * weights.flatten()[order].unsqueeze(-1)
        return x + torch.zeros_like(x).index_add(0, order // CHOSEN, weighted)


class TwoLayers(nn.Module):
    """Two layers of routed experts."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.first, self.second = Routed(experts), Routed(experts)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def routed(seed: int = 0, experts: int = 4) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """Two layers, the same at every call, and three batches."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = TwoLayers(experts)
        return model, [(torch.randn(16, WIDTH), torch.randn(16, WIDTH)) for _ in range(3)]


def language_loss(output: Any, labels: Tensor) -> Tensor:
    """The loss of a language model of the library."""
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())


def language_model(name: str) -> tuple[nn.Module, list[tuple[dict[str, Tensor], Tensor]]]:
    """A tiny one of the library, its experts computed by the library's default, and three batches."""
    model = zoo.architecture(name).build()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    ids = torch.randint(0, zoo.VOCABULARY, (3, 8, 7), generator=torch.Generator().manual_seed(3))
    return model, [({"input_ids": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()) for tokens in ids]


def in_groups(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Groups of rows, each times its matrix, in float32: the library's operator, since torch's kernel takes no such."""
    importlib.import_module("transformers.integrations.moe")
    return torch.ops.transformers.grouped_mm_fallback(rows, matrices, ends)


class Shared(nn.Module):
    """One layer with a shared expert beside routed ones, which are chosen one at a time, and weighed by a sigmoid."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, experts, bias=False)
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.expert_gate_up = nn.Parameter(torch.randn(experts, 2 * HIDDEN, WIDTH) / 4)
        self.expert_down = nn.Parameter(torch.randn(experts, WIDTH, HIDDEN) / 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        gate, up = self.gate_up(tokens).chunk(2, -1)
        shared = self.down(nn.functional.silu(gate) * up)
        score, chosen = self.router(tokens).sigmoid().max(-1)
        order = chosen.argsort(stable=True)
        ends = nn.functional.one_hot(chosen, self.experts).sum(0).cumsum(0).to(torch.int32)
        gate, up = in_groups(tokens[order], self.expert_gate_up.mT, ends).chunk(2, -1)
        made = in_groups(nn.functional.gelu(gate) * up, self.expert_down.mT, ends)
        found = torch.empty_like(made).index_copy(0, order, made)
        return x + (shared + found * score.unsqueeze(-1)).view_as(x)


class Words(nn.Module):
    """A model of words with dense and routed layers."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(24, WIDTH), nn.Linear(WIDTH, 24, bias=False)
        self.mix, self.layers = nn.Linear(WIDTH, WIDTH), nn.Sequential(Shared(experts), Shared(experts))

    def forward(self, words: Tensor) -> Tensor:
        x = self.token(words)
        return self.head(self.layers(x + self.mix(x.cumsum(1)).tanh()))


def words(seed: int = 0, experts: int = 4) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """The same at every call, and three batches of sentences with the words to find."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Words(experts)
        return model, [(torch.randint(24, (8, 5)), torch.randint(24, (8, 5))) for _ in range(3)]


def word_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Of each word."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
