"""Small models that draw random numbers on values of every layout in memory, and ways to train them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import crossfade as cf
from tests.ranks.cases import whole

STEPS = 3


class Then(nn.Module):
    """A layer, what is done to its results, and a mean that tells every element from every other."""

    def __init__(self, layer: nn.Module, what: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.what = layer, what

    def forward(self, x: Tensor) -> Tensor:
        y = self.what(self.layer(x)).float()
        weights = torch.arange(y[0].numel(), dtype=y.dtype).reshape(y.shape[1:]).sin()
        return (y * (weights + 1.5)).square().mean()


class Attention(nn.Module):
    """Self-attention with dropout on its weights."""

    def __init__(self, *, batch_first: bool, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=batch_first)
        self.batch_first, self.need_weights = batch_first, need_weights

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        y, _ = self.attention(x, x, x, need_weights=self.need_weights)
        y = y if self.batch_first else y.transpose(0, 1)
        return (y * (x if self.batch_first else x.transpose(0, 1))).square().mean()


class Recurrent(nn.Module):
    """Two recurrent layers with dropout between them."""

    def __init__(self, kind: type[nn.RNNBase], *, batch_first: bool) -> None:
        super().__init__()
        self.layers, self.batch_first = kind(8, 6, 2, dropout=0.4, batch_first=batch_first), batch_first

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.layers(x if self.batch_first else x.transpose(0, 1))
        y = y if self.batch_first else y.transpose(0, 1)
        return (y * torch.arange(1.0, 7.0)).square().mean()


class Encoder(nn.Module):
    """A transformer's layer as torch has it, samples along the second dim."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x.transpose(0, 1)).transpose(0, 1)
        return (y * x).square().mean()


class Checkpointed(nn.Module):
    """Parts with dropout, and attention with dropout, that are run again in the backward."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layers, self.options = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), options

    def part(self, layer: nn.Module, x: Tensor) -> Tensor:
        y = F.dropout(layer(x), 0.3).unflatten(-1, (2, 4)).transpose(1, 2)
        return x + F.scaled_dot_product_attention(y, y, y, dropout_p=0.4).transpose(1, 2).flatten(2)

    def outer(self, x: Tensor) -> Tensor:
        return checkpoint(self.part, self.layers[2], swapped(drop(swapped(x))), use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](x)
        y = checkpoint(self.part, self.layers[1], y, **self.options)
        return (checkpoint(self.outer, y, use_reentrant=False) * x).square().mean()


class TwoViews(nn.Module):
    """Two noisy views of each sample, one below the other, as in contrastive learning."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        first, second = F.dropout(self.layer(torch.cat([x, x * 2])), 0.4).chunk(2)
        return ((first - second) * x).square().mean()


def drop(x: Tensor) -> Tensor:
    return F.dropout(x, 0.4)


def swapped(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def _linear() -> nn.Module:
    return nn.Linear(8, 6)


def _conv() -> nn.Module:
    return nn.Conv2d(3, 6, 3, padding=1, bias=False)


def _flat_by_position(x: Tensor) -> Tensor:
    """Rows of all samples at the first position, then of all samples at the second."""
    rows = x.transpose(0, 1).reshape(-1, x.shape[2])
    return drop(rows * 2).reshape(x.shape[1], x.shape[0], -1).transpose(0, 1)


def _drawn_into(draw: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """Noise drawn in place into memory laid out as the value's."""

    def then(x: Tensor) -> Tensor:
        noise = torch.empty_like(x.detach())
        draw(noise)
        return x * noise.clamp(-3, 3)

    return then


def _picked(x: Tensor) -> Tensor:
    index = torch.multinomial(x.detach().flatten(1).exp(), 3)
    return x.flatten(1).gather(1, index)


def _picked_of_columns(x: Tensor) -> Tensor:
    """Probabilities whose samples lie next to each other in memory."""
    index = torch.multinomial(x.detach().flatten(1).exp().t().contiguous().t(), 2, replacement=True)
    return x.flatten(1).gather(1, index)


def _as_permuted(*order: int) -> Callable[[Tensor], Tensor]:
    return lambda x: drop(x.permute(*order))


SEQUENCES: dict[str, Callable[[], nn.Module]] = {
    "dropout after a transpose": lambda: Then(_linear(), lambda x: drop(swapped(x))),
    "dropout between transposes": lambda: Then(_linear(), lambda x: swapped(drop(swapped(x)))),
    "samples last": lambda: Then(_linear(), lambda x: drop(x.permute(1, 2, 0)).permute(2, 0, 1)),
    "samples in the middle": lambda: Then(_linear(), lambda x: drop(x.transpose(0, 1)).transpose(0, 1)),
    "samples in the middle of memory": lambda: Then(
        _linear(), lambda x: drop(x.transpose(0, 1).contiguous().transpose(0, 1))
    ),
    "alpha dropout": lambda: Then(_linear(), lambda x: F.alpha_dropout(swapped(x), 0.4, True)),
    "feature alpha dropout": lambda: Then(_linear(), lambda x: F.feature_alpha_dropout(swapped(x), 0.4, True)),
    "dropout1d": lambda: Then(_linear(), lambda x: F.dropout1d(swapped(x), 0.4)),
    "noise after a norm": lambda: Then(nn.LayerNorm(8), lambda x: swapped(x) * (1 + torch.randn_like(swapped(x)))),
    "noise after batch norm": lambda: Then(
        nn.Sequential(_linear(), nn.BatchNorm1d(5)), lambda x: swapped(x) + torch.rand_like(swapped(x))
    ),
    "dropout after batch norm of a transpose": lambda: Then(
        _linear(), lambda x: drop(F.batch_norm(swapped(x), None, None, training=True)) * 1
    ),
    "noise after batch norm of a transpose": lambda: Then(
        _linear(), lambda x: (y := F.batch_norm(swapped(x), None, None, training=True)) * torch.randn_like(y)
    ),
    "noise like a copy": lambda: Then(_linear(), lambda x: swapped(x) * torch.randn_like(swapped(x).contiguous())),
    "a strided slice": lambda: Then(_linear(), lambda x: drop(x[:, :, ::2])),
    "an expanded value": lambda: Then(_linear(), lambda x: drop(x[:, :1].expand(-1, 4, -1))),
    "flattened by position": lambda: Then(_linear(), _flat_by_position),
    "bernoulli_": lambda: Then(_linear(), lambda x: _drawn_into(lambda n: n.bernoulli_(0.4))(swapped(x))),
    "exponential_": lambda: Then(_linear(), lambda x: _drawn_into(Tensor.exponential_)(swapped(x))),
    "uniform_": lambda: Then(_linear(), lambda x: _drawn_into(Tensor.uniform_)(swapped(x))),
    "normal_": lambda: Then(_linear(), lambda x: _drawn_into(Tensor.normal_)(swapped(x))),
    "cauchy_": lambda: Then(_linear(), lambda x: _drawn_into(Tensor.cauchy_)(swapped(x))),
    "log_normal_": lambda: Then(_linear(), lambda x: _drawn_into(Tensor.log_normal_)(swapped(x))),
    "geometric_": lambda: Then(_linear(), lambda x: _drawn_into(lambda n: n.geometric_(0.4))(swapped(x))),
    "random_": lambda: Then(_linear(), lambda x: _drawn_into(lambda n: n.random_(4))(swapped(x))),
    "randint_like": lambda: Then(_linear(), lambda x: x * torch.randint_like(x, 1, 5)),
    "torch.bernoulli": lambda: Then(_linear(), lambda x: x * torch.bernoulli(swapped(x).sigmoid()).transpose(1, 2)),
    "bernoulli_ of a tensor": lambda: Then(
        _linear(), lambda x: _drawn_into(lambda n: n.bernoulli_(swapped(x).detach().sigmoid()))(swapped(x))
    ),
    "torch.normal": lambda: Then(_linear(), lambda x: torch.normal(swapped(x).detach(), 0.5) * swapped(x)),
    "torch.normal of two": lambda: Then(
        _linear(), lambda x: torch.normal(swapped(x).detach(), swapped(x).detach().exp()) * swapped(x)
    ),
    "multinomial": lambda: Then(_linear(), _picked),
    "multinomial of columns": lambda: Then(_linear(), _picked_of_columns),
    "gumbel_softmax": lambda: Then(_linear(), lambda x: F.gumbel_softmax(swapped(x), dim=1)),
    "gumbel_softmax, hard": lambda: Then(_linear(), lambda x: F.gumbel_softmax(swapped(x), hard=True)),
    "torch.rand of the batch": lambda: Then(
        _linear(), lambda x: x * torch.rand(x.shape[0], 1, 1) + torch.randn(x.shape[1], x.shape[0], 1).transpose(0, 1)
    ),
    "torch.randn of merged sizes": lambda: Then(
        _linear(), lambda x: (x.reshape(-1, 6) + torch.randn(x.shape[0] * x.shape[1], 6)).view_as(x)
    ),
    "torch.normal of the batch": lambda: Then(_linear(), lambda x: x * torch.normal(1.0, 2.0, (x.shape[0], 5, 6))),
    "attention": lambda: Then(_linear(), lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.4)),
    "attention of heads": lambda: Then(
        _linear(),
        lambda x: F.scaled_dot_product_attention(*[x.unflatten(2, (2, 3)).transpose(1, 2)] * 3, dropout_p=0.4),
    ),
    "MultiheadAttention": lambda: Attention(batch_first=True, need_weights=False),
    "MultiheadAttention, weights": lambda: Attention(batch_first=True, need_weights=True),
    "MultiheadAttention, batch second": lambda: Attention(batch_first=False, need_weights=False),
    "MultiheadAttention, batch second, weights": lambda: Attention(batch_first=False, need_weights=True),
    "encoder, batch second": Encoder,
    "two views": TwoViews,
    "checkpoints": lambda: Checkpointed(use_reentrant=False),
    "checkpoints, reentrant": lambda: Checkpointed(use_reentrant=True),
    "checkpoints, other numbers": lambda: Checkpointed(use_reentrant=False, preserve_rng_state=False),
    "LSTM": lambda: Recurrent(nn.LSTM, batch_first=True),
    "LSTM, batch second": lambda: Recurrent(nn.LSTM, batch_first=False),
    "GRU": lambda: Recurrent(nn.GRU, batch_first=True),
}


IMAGES: dict[str, Callable[[], nn.Module]] = {
    "conv and transpose": lambda: Then(_conv(), lambda x: drop(x.flatten(2).transpose(1, 2))),
    "conv, channels last": lambda: Then(_conv(), lambda x: drop(x.contiguous(memory_format=torch.channels_last))),
    "model in channels last": lambda: Then(_conv(), drop).to(memory_format=torch.channels_last),
    "model in channels last, batch norm": lambda: Then(
        nn.Sequential(_conv(), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 1)), drop
    ).to(memory_format=torch.channels_last),
    "batch norm of a transpose": lambda: Then(_conv(), lambda x: drop(F.batch_norm(x.mT, None, None, training=True))),
    "batch norm behind batch norm": lambda: Then(nn.Sequential(_conv(), nn.BatchNorm2d(6), nn.BatchNorm2d(6)), drop),
    "permuted": lambda: Then(_conv(), _as_permuted(0, 2, 3, 1)),
    "dropout2d": lambda: Then(_conv(), lambda x: F.dropout2d(x.mT, 0.4)),
    "dropout3d": lambda: Then(_conv(), lambda x: F.dropout3d(x.unsqueeze(2).mT, 0.4)),
    "channel shuffle": lambda: Then(
        _conv(), lambda x: drop(F.channel_shuffle(x.contiguous(memory_format=torch.channels_last), 2))
    ),
    "pooled and permuted": lambda: Then(
        _conv(),
        lambda x: (
            _as_permuted(0, 3, 1, 2)(F.max_pool2d(x, 2)) * torch.rand_like(F.avg_pool2d(x, 2).permute(0, 3, 1, 2))
        ),
    ),
    "frames": lambda: Then(
        _conv(),
        lambda x: drop(x.unflatten(1, (2, 3)).transpose(0, 1).flatten(0, 1)).view(2, -1, 3, 6, 6).transpose(0, 1),
    ),
}

MODELS = SEQUENCES | IMAGES

REFUSED: dict[str, Callable[[], nn.Module]] = {
    "rrelu": lambda: Then(_linear(), lambda x: F.rrelu(x, training=True)),
    "poisson": lambda: Then(_linear(), lambda x: x * torch.poisson(x.detach().exp())),
    "randperm": lambda: Then(_linear(), lambda x: x + x[torch.randperm(x.shape[0])]),
    "sizes that nothing explains": lambda: Then(
        _linear(), lambda x: x + torch.rand(x.shape[0] * 3).cumsum(0)[: x.shape[0]].view(-1, 1, 1)
    ),
}
"""Draws of which no part is a rank's."""


def batch_of(name: str, step: int, size: int = 8) -> Tensor:
    """A global batch."""
    g = torch.Generator().manual_seed(100 + step)
    return torch.randn(size, *((3, 6, 6) if name in IMAGES else (5, 8)), generator=g)


def start(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, the same everywhere, and the same random numbers to come."""
    torch.manual_seed(0)
    model = (MODELS | REFUSED)[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(1)
    return model, optimizer


def train_eager(name: str, *, size: int = 8, accumulate: int = 1, channels_last: bool = False) -> list[Tensor]:
    """Losses and parameters after some steps of plain torch in one process."""
    model, optimizer = start(name)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x = laid_out(batch_of(name, step, size), channels_last=channels_last)
        parts = [model(part) / accumulate for part in x.chunk(accumulate)]
        sum(parts).backward()
        optimizer.step()
        losses.append(sum(part.detach() for part in parts))
    return [*losses, *(p.detach() for p in model.parameters())]


def laid_out(x: Tensor, *, channels_last: bool) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x


def train_compiled(name: str, ranks: int, options: dict[str, Any]) -> list[Tensor]:
    """The same with `compile_step`, on the ranks of this world, or on one device."""
    options = dict(options)
    size, channels_last = options.pop("size", 8), options.pop("channels_last", False)
    model, optimizer = start(name)
    step = cf.compile_step(model, None, optimizer, {"dp": ranks} if ranks > 1 else None, timeout=60, **options)
    losses = []
    for index in range(STEPS):
        x = laid_out(batch_of(name, index, size), channels_last=channels_last)
        losses.append(step(own(x, ranks) if options.get("batch") == "local" else x).detach())
    return [*losses, *(whole(p) for p in model.parameters())]


def own(x: Tensor, ranks: int) -> Tensor:
    return x.chunk(ranks)[dist.get_rank()]


def train_many(names: list[str], ranks: int, options: dict[str, Any]) -> dict[str, list[Tensor] | str]:
    """Each of several models; an error as its text."""
    found: dict[str, list[Tensor] | str] = {}
    for name in names:
        try:
            found[name] = train_compiled(name, ranks, options)
        except cf.CrossfadeError as error:
            found[name] = str(error)
    return found
