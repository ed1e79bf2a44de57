"""Models, data and ways to train them, for tests that compare ranks with one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import crossfade as cf
from crossfade.demo.model import GPT, Size, next_token_loss
from crossfade.graph.private import tree_map_only

Batch = tuple[Any, ...]

PLANNED = (1e-4, 2e-5)
"""Relative and absolute tolerance of planned steps: how long operators take decides the order of sums, and whether gelu
is computed by its parts; AdamW divides by roots of squares as small as 1e-9, and makes more of the last bits."""


class Convolutional(nn.Module):
    """A CNN with batch normalisation and an in-place activation; no bias before the norm, whose gradient is noise."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 36, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu_(self.norm(self.conv(x))).flatten(1))


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.middle = nn.Linear(16, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(tokens))))


class ManyWords(nn.Module):
    """A large embedding of which few rows are used, one of them never trained; its rows divide by no power of two."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4099, 65, padding_idx=3)
        self.head = nn.Linear(65, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(tokens)))


class PartlyUnused(nn.Module):
    """One parameter gets no gradient, one does not require any."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 4), nn.Linear(6, 4)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) * self.frozen


class Autocast(nn.Module):
    """Linear layers under bfloat16 autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.second(F.relu(self.first(x))).float()


class NamedInputs(nn.Module):
    """Several inputs in a nested container, called by name."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(2, 3)

    def forward(self, pair: dict[str, Tensor], *, scale: float) -> Tensor:
        return self.left(pair["a"]) * scale + self.right(pair["b"])


class MovingAverage(nn.Module):
    """A buffer follows the mean of the batch, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        self.calls += 1
        return y


class Recurrent(nn.Module):
    """An LSTM and noise drawn for every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(x.unsqueeze(1).expand(-1, 3, -1) + torch.randn(x.shape[0], 3, 6))
        return self.head(states[:, -1])


def _sum_of_squares(output: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(output, targets, reduction="sum") * 0.01


def _regression(width: int, outputs: int) -> Callable[[torch.Generator], Batch]:
    return lambda g: (torch.randn(16, width, generator=g), torch.randn(16, outputs, generator=g))


def _images(g: torch.Generator) -> Batch:
    return torch.randn(16, 3, 8, 8, generator=g), torch.randint(0, 5, (16,), generator=g)


def _tokens(vocabulary: int, length: int) -> Callable[[torch.Generator], Batch]:
    return lambda g: tuple(torch.randint(0, vocabulary, (16, length), generator=g) for _ in range(2))


def _words(g: torch.Generator) -> Batch:
    """Those of each half of the table, among them the one that is padding, and some more than once."""
    tokens = torch.randint(0, 4099, (16, 6), generator=g)
    tokens[:, 0], tokens[::2, 1], tokens[::3, 2] = 3, 4098, 7
    return tokens, torch.randint(0, 5, (16, 6), generator=g)


def _named(g: torch.Generator) -> Batch:
    inputs = {"pair": {"a": torch.randn(16, 4, generator=g), "b": torch.randn(16, 2, generator=g)}, "scale": 0.5}
    return inputs, torch.randn(16, 3, generator=g)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


@dataclass(frozen=True)
class Case:
    """One model, its data, its loss and its optimizer."""

    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[..., Tensor] = F.mse_loss
    optimizer: Callable[[Any], torch.optim.Optimizer] = _sgd


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))


def _wide() -> nn.Module:
    """Wider than a rank has samples: the factors of its gradients are smaller than these."""
    return nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 510), nn.GELU(), nn.Linear(510, 4))


_GPT = Size(width=32, heads=4, layers=2, vocabulary=64, length=16, batch=1, dropout=0.1)

CASES = {
    "mlp": Case(_mlp, _regression(8, 4), optimizer=_adamw),
    "gpt with dropout": Case(lambda: GPT(_GPT), _tokens(64, 16), next_token_loss),
    "cnn with batch norm": Case(Convolutional, _images, F.cross_entropy),
    "tied weights": Case(Tied, _tokens(32, 6), next_token_loss, _adamw),
    "many words": Case(ManyWords, _words, next_token_loss, _adamw),
    "wide": Case(_wide, _regression(64, 4)),
    "unused parameter": Case(PartlyUnused, _regression(6, 4), optimizer=_adamw),
    "bf16 autocast": Case(Autocast, _regression(16, 4)),
    "named inputs": Case(NamedInputs, _named),
    "moving average": Case(MovingAverage, _regression(6, 4)),
    "lstm with noise": Case(Recurrent, _regression(6, 4)),
    "summed loss": Case(_mlp, _regression(8, 4), _sum_of_squares),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "nesterov, decay": _sgd,
    "maximize": lambda p: torch.optim.SGD(p, lr=0.01, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": _adamw,
    "foreach adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "foreach momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
}


@dataclass
class Trained:
    """Everything training leaves behind."""

    losses: list[float]
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    extra: dict[str, Any]


def batches(case: Case, steps: int, device: str = "cpu") -> list[Batch]:
    """The same global batches everywhere."""
    made = [case.batch(torch.Generator().manual_seed(100 + step)) for step in range(steps)]
    return [tree_map_only(Tensor, lambda t: t.to(device), batch) for batch in made]


def train_eager(
    name: str,
    *,
    steps: int = 10,
    optimizer: str = "",
    clip: float | None = None,
    accumulate: int = 1,
    device: str = "cpu",
) -> Trained:
    """Train on one device with plain eager torch: the reference."""
    case, model, opt = start(name, optimizer, device)
    losses = []
    for inputs, *rest in batches(case, steps, device):
        opt.zero_grad()
        total = 0.0
        for part in range(accumulate):
            loss = case.loss(_call(model, _part(inputs, part, accumulate)), *_part(rest, part, accumulate)) / accumulate
            loss.backward()
            total += float(loss.detach())
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        losses.append(total)
    return trained(losses, model, opt)


def train_crossfade(
    name: str, ranks: int = 1, *, steps: int = 10, optimizer: str = "", device: str = "cpu", **options: Any
) -> Trained:
    """Train with `compile_step`, on the ranks of this world (or on one device)."""
    case, model, opt = start(name, optimizer, device)
    mesh = options.pop("mesh", {"dp": ranks})
    step = cf.compile_step(model, case.loss, opt, mesh, timeout=30.0, **options)
    local = options.get("batch") == "local"
    losses = [float(step(*(_own(batch, ranks) if local else batch))) for batch in batches(case, steps, device)]
    return trained(losses, model, opt, captures=step.captures, collectives=step.report.collectives_after)


def train_crossfade_on_ranks(name: str, ranks: int, options: dict[str, Any]) -> Trained:
    """`train_crossfade`, for `Ranks.run`."""
    return train_crossfade(name, ranks, **options)


def train_ddp(name: str, ranks: int) -> Trained:
    """Train with torch's DDP, each rank on its part."""
    case, model, opt = start(name, "")
    wrapped = DistributedDataParallel(model)
    losses = []
    for batch in batches(case, 10):
        inputs, *rest = _own(batch, ranks)
        opt.zero_grad()
        loss = case.loss(_call(wrapped, inputs), *rest)
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    return trained(losses, model, opt)


def start(name: str, optimizer: str, device: str = "cpu") -> tuple[Case, nn.Module, torch.optim.Optimizer]:
    """A case's model and optimizer, the same everywhere."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.model().to(device)
    chosen = OPTIMIZERS[optimizer] if optimizer else case.optimizer
    opt = chosen([p for p in model.parameters() if p.requires_grad])
    torch.manual_seed(1)
    return case, model, opt


def _call(model: Any, inputs: Any) -> Tensor:
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def _part(tree: Any, index: int, count: int) -> Any:
    return tree_map_only(Tensor, lambda t: t.chunk(count)[index], tree)


def _own(batch: Batch, ranks: int) -> Batch:
    return _part(batch, dist.get_rank(), ranks)


def trained(losses: list[float], model: nn.Module, opt: torch.optim.Optimizer, **extra: Any) -> Trained:
    """What training left behind, whole."""
    state = {name: whole(value) for name, value in model.state_dict().items()}
    return Trained(losses, copy.deepcopy(state), tree_map_only(Tensor, whole, opt.state_dict()), extra)


def whole(value: Tensor) -> Tensor:
    """A tensor on the CPU; of a distributed one, all of it."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu()
