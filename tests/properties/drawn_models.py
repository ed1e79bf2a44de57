"""Random small models of layers, layouts and draws, and a job that trains several of them on ranks."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import crossfade as cf

STEPS = 2
CHANNELS = 4
"""Of every layer, so that any follows any; the other two sizes are 4 and 5."""


def _by_position(x: Tensor) -> Tensor:
    rows = x.transpose(0, 2).reshape(-1, x.shape[3])
    return F.dropout(rows, 0.3).view(x.shape[2], x.shape[1], x.shape[0], x.shape[3]).permute(2, 1, 0, 3)


def _drawn(fill: Callable[[Tensor], object]) -> Callable[[Tensor], Tensor]:
    def then(x: Tensor) -> Tensor:
        noise = torch.empty_like(x.detach())
        fill(noise)
        return x * (1 + noise.clamp(-1, 1))

    return then


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose(1, 2)": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "transpose(2, 3)": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "transpose(0, 1)": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "samples last": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "contiguous": lambda x: x.contiguous(),
    "swap": lambda x: x.transpose(1, 2),
    "half": lambda x: torch.cat([x, x], 3)[..., ::2],
    "joined": lambda x: (lambda both: both[0] + both[1])(F.dropout(torch.cat([x, x.neg()]), 0.3).chunk(2)),
    "gelu": F.gelu,
    "softmax": lambda x: x.softmax(1),
    "pool": lambda x: F.max_pool2d(x, 3, 1, 1),
    "add": lambda x: x + x.transpose(1, 2),
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout2d": lambda x: F.dropout2d(x, 0.3),
    "alpha": lambda x: F.alpha_dropout(x, 0.3, True),
    "feature alpha": lambda x: F.feature_alpha_dropout(x, 0.3, True),
    "by position": _by_position,
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn_like": lambda x: x + 0.1 * torch.randn_like(x),
    "rand": lambda x: x * torch.rand(x.shape[0], 1, x.shape[2], 1),
    "bernoulli_": _drawn(lambda noise: noise.bernoulli_(0.5)),
    "exponential_": _drawn(Tensor.exponential_),
    "normal_": _drawn(Tensor.normal_),
    "bernoulli": lambda x: x * torch.bernoulli(x.detach().sigmoid()),
    "gumbel": lambda x: x + F.gumbel_softmax(x, dim=2),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
    "conv 1x1": lambda: nn.Conv2d(CHANNELS, CHANNELS, 1),
    "linear": lambda: nn.Linear(5, 5),
    "batch norm": lambda: nn.BatchNorm2d(CHANNELS),
    "layer norm": lambda: nn.LayerNorm(5),
    "group norm": lambda: nn.GroupNorm(2, CHANNELS),
}


class Drawn(nn.Module):
    """A few layers and functions in the order that a seed gives; at least one draws."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        chosen = random.Random(seed)
        self.names = [chosen.choice([*FUNCTIONS, *LAYERS]) for _ in range(chosen.randint(2, 7))] + ["dropout"]
        self.head = nn.Linear(5, 5)
        self.layers = nn.ModuleDict({str(i): LAYERS[name]() for i, name in enumerate(self.names) if name in LAYERS})
        if chosen.random() < 0.3:
            self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        for index, name in enumerate(self.names):
            x = self.layers[str(index)](x) if name in LAYERS else FUNCTIONS[name](x)
        weights = torch.arange(x[0].numel(), dtype=x.dtype).reshape(x.shape[1:]).sin()
        return (x * (weights + 1.5)).square().mean()


def batch_of(seed: int, step: int, size: int) -> Tensor:
    x = torch.randn(size, CHANNELS, 4, 5, generator=torch.Generator().manual_seed(1000 * seed + step))
    return x.contiguous(memory_format=torch.channels_last) if seed % 4 == 0 else x


def start(seed: int) -> tuple[Drawn, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Drawn(seed)
    torch.manual_seed(seed + 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def train_eager(seed: int, ranks: int) -> list[Tensor]:
    model, optimizer = start(seed)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch_of(seed, step, 2 * ranks))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters())]


def train_on_ranks(seeds: list[int], ranks: int) -> list[list[Tensor] | str]:
    """Each model's losses and parameters; an error as its text."""
    found: list[list[Tensor] | str] = []
    for seed in seeds:
        model, optimizer = start(seed)
        try:
            step = cf.compile_step(model, None, optimizer, {"dp": ranks}, timeout=60)
            losses = [step(batch_of(seed, index, 2 * ranks)).detach() for index in range(STEPS)]
            found.append([*losses, *(p.detach().clone() for p in model.parameters())])
        except cf.CrossfadeError as error:
            found.append(str(error))
    return found
