"""Parameters of any dtype, in parts or whole: trained on ranks equals trained by eager torch in one process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import crossfade as cf
from tests.ranks.cases import OPTIMIZERS, whole

STEPS = 3


class Complex(nn.Module):
    """Complex matrices, vectors and a single number beside real ones; rows that do not divide."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.mixing = nn.Parameter(torch.randn(5, 8, dtype=dtype))
        self.shift = nn.Parameter(torch.randn(5, dtype=dtype))
        self.turn = nn.Parameter(torch.randn((), dtype=dtype))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        mixed = x.to(self.mixing.dtype) @ self.mixing.t() * self.turn + self.shift
        return self.head(mixed.abs().float())


class Mixed(nn.Module):
    """Layers of three precisions, the longest last."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Linear(8, 7, dtype=torch.bfloat16)
        self.plain, self.long = nn.Linear(7, 6), nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.long(F.gelu(self.plain(self.short(x.bfloat16()).float())).double()).float()


class Long(nn.Module):
    """Everything in float64, batch statistics too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 7, bias=False), nn.BatchNorm1d(7)
        self.head = nn.Linear(7, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.norm(self.first(x.double()))))


MODELS: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "float64": (Long, 1e-12),
    "complex64": (lambda: Complex(torch.complex64), 2e-5),
    "complex128": (lambda: Complex(torch.complex128), 2e-5),
    "three precisions": (Mixed, 3e-2),
}
"""Each with how much sums in another order may differ, in its shortest dtype."""


def loss(y: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(y, targets.to(y.dtype))


def batch(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(8, 8, generator=g), torch.randn(8, 3, generator=g)


def start(name: str, optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = MODELS[name][0]()
    return model, OPTIMIZERS[optimizer](model.parameters())


def train_eager(name: str, optimizer: str, clip: float | None, accumulate: int) -> list[Tensor]:
    """Losses, norms, parameters and buffers after some steps in one process."""
    model, opt = start(name, optimizer)
    found: list[Tensor] = []
    for step in range(STEPS):
        opt.zero_grad()
        parts = [
            loss(model(x), t) / accumulate for x, t in zip(*(b.chunk(accumulate) for b in batch(step)), strict=True)
        ]
        sum(parts).backward()
        found += [nn.utils.clip_grad_norm_(model.parameters(), clip)] if clip is not None else []
        opt.step()
        found.append(sum(part.detach() for part in parts))
    return [*found, *(p.detach() for p in model.parameters()), *model.buffers()]


def train(name: str, optimizer: str, options: dict[str, Any], folder: str) -> list[Tensor]:
    """The same on the ranks of this world; with a folder, saved before the last step and loaded by another one."""
    model, opt = start(name, optimizer)
    step = cf.compile_step(model, loss, opt, {"dp": 2}, timeout=60, **options)
    found: list[Tensor] = []
    for index in range(STEPS):
        if folder and index == STEPS - 1:
            step.save(folder)
            model, opt = start(name, optimizer)
            step = cf.compile_step(model, loss, opt, {"dp": 2}, timeout=60, **options)
            step.load(folder)
        value = step(*batch(index))
        found += [step.outputs["grad_norm"]] if "clip_grad_norm" in options else []
        found.append(value)
    return [*found, *(whole(p) for p in model.parameters()), *model.buffers()]


WITH: dict[str, tuple[str, dict[str, Any]]] = {
    "clipped": ("momentum", {"clip_grad_norm": 0.1}),
    "adamw, clipped, saved": ("adamw", {"clip_grad_norm": 0.1}),
    "accumulated": ("adam, amsgrad", {"accumulate": 2}),
    "planned": ("adamw", {"machine": "ethernet-1gbit", "clip_grad_norm": 0.1}),
    "some kept whole": ("momentum", {"keep_whole": ["*.weight", "mixing*"], "clip_grad_norm": 0.1}),
}
CASES = [
    (name, mode, how)
    for name in MODELS
    for mode in ("replicate", "zero1", "zero2", "zero3")
    for how in WITH
    if how != "some kept whole" or (mode in ("zero2", "zero3") and name.startswith("complex"))
]
OFTEN = {
    *((name, mode, "clipped") for name in ("float64", "complex64", "three precisions") for mode in ("zero1", "zero3")),
    ("complex64", "zero2", "some kept whole"),
    ("complex64", "zero3", "adamw, clipped, saved"),
    ("complex128", "zero2", "planned"),
    ("three precisions", "zero2", "accumulated"),
    ("float64", "replicate", "clipped"),
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "mode", "how"),
    [pytest.param(*case, marks=() if case in OFTEN else (pytest.mark.models,)) for case in CASES],
)
def test_ranks_equal_one_process(ranks: Any, name: str, mode: str, how: str) -> None:
    optimizer, options = WITH[how]
    expected = train_eager(name, optimizer, options.get("clip_grad_norm"), options.get("accumulate", 1))
    tolerance = MODELS[name][1]
    with tempfile.TemporaryDirectory() as folder:
        saved = folder if "saved" in how else ""
        for found in ranks(2).run(train, name, optimizer, {**options, "data_parallel": mode}, saved):
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance / 10)
