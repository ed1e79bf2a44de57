"""What ranks run to test collectives that know their backward: each alone, and a small transformer made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn import functional as F

from crossfade.graph.private import name_group
from crossfade.shard.tensor import conjugate
from crossfade.shard.tensor.fill import filled
from crossfade.shard.tensor.localize import LocalProgram, Request, localize
from crossfade.shard.tensor.plan_resolved import ModuleBoundary, ParameterSharding, ResolvedPlan
from crossfade.shard.tensor.sources import InMemory


def differentiate(
    name: str, settings: tuple[Any, ...], inputs: list[Tensor], grads: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """An operator's result on this rank, and the gradient of its input for this rank's gradient of the result."""
    name_group("tp", dist.group.WORLD)
    rank = dist.get_rank()
    x = inputs[rank].clone().requires_grad_()
    if name in ("gather", "gather_enter", "scatter", "split"):
        settings = (*settings, torch.tensor(rank), dist.get_world_size(), "tp")
    elif name == "share":
        settings = (torch.tensor(rank),)
    y = getattr(conjugate, name)(x, *settings)
    y.backward(grads[rank])
    assert x.grad is not None
    with torch.no_grad():
        assert torch.equal(getattr(conjugate, name)(x, *settings), y), "without gradients it is the same"
    return y.detach(), x.grad


class Attention(nn.Module):
    """Causal attention of 8 heads, of which two share a key and a value."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(width, width), nn.Linear(width, width)
        self.kv = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (8, -1)).transpose(1, 2)
        k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.kv(x).chunk(2, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and a gated feed-forward part, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.up, self.gate, self.down = nn.Linear(width, 32), nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Transformer(nn.Module):
    """Tokens and targets in, a loss out; token 3 is padding, target -100 is ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16, padding_idx=3)
        self.layers = nn.ModuleList([Layer(16), Layer(16)])
        self.norm = nn.RMSNorm(16)
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


SPLIT = {
    "embedding.weight": (0, ()),
    "head.weight": (0, ()),
    "head.bias": (0, ()),
    "q.weight": (0, ()),
    "q.bias": (0, ()),
    "kv.weight": (0, (8, 8)),
    "o.weight": (1, ()),
    "up.weight": (0, ()),
    "up.bias": (0, ()),
    "gate.weight": (0, ()),
    "gate.bias": (0, ()),
    "down.weight": (1, ()),
}
"""Which dim of a parameter is split, in which blocks, by the end of its name."""

SEQUENCE = ("embedding", "layers.0.attention.o", "layers.0.down", "layers.1.attention.o", "layers.1.down")
"""Modules whose results are split along the sequence, if anything is."""


def plan_of(model: nn.Module, ranks: int, *, sequence: bool) -> ResolvedPlan:
    """Vocabulary and projections split, with or without the sequence split in between."""
    parameters = {}
    for name, value in model.named_parameters():
        dim, blocks = next((split for end, split in SPLIT.items() if name.endswith(end)), (None, ()))
        parameters[name] = ParameterSharding(name, dim, blocks, shape=tuple(value.shape), ranks=ranks)
    boundaries = {path: ModuleBoundary(path, output="shard(1)") for path in SEQUENCE} if sequence else {}
    return ResolvedPlan(parameters, boundaries, ranks=ranks)


def batch() -> tuple[Tensor, Tensor]:
    """Tokens with padding and targets to ignore."""
    draw = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(32, (2, 8), generator=draw), torch.randint(32, (2, 8), generator=draw)
    tokens[0, :3], targets[1, 2:5] = 3, -100
    return tokens, targets


def model() -> Transformer:
    """The same parameters everywhere."""
    torch.manual_seed(0)
    return Transformer()


def fill(local: LocalProgram, exported: ExportedProgram, rank: int) -> Any:
    """The local program as a module with a rank's parts of the state."""
    return filled(local, {}, InMemory(exported.state_dict), rank).module()


def train_step(sequence: bool) -> tuple[float, Mapping[str, Tensor], list[str]]:
    """The loss, this rank's gradients, and the collectives of the forward."""
    name_group("tp", dist.group.WORLD)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole = model()
    exported = torch.export.export(whole, batch())
    local = localize(exported, plan_of(whole, ranks, sequence=sequence), ranks, "tp", Request())
    module = fill(local, exported, rank)
    loss = module(*batch())
    loss.backward()
    called = [str(node.target) for node in local.exported.graph.nodes if "crossfade.tp_" in str(node.target)]
    return loss.item(), {name: value.grad for name, value in module.named_parameters()}, called
