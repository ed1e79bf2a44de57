"""An epoch whose last batch does not divide: all its samples are trained on, as one process would."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import crossfade as cf

WORDS, LENGTH = 11, 5


class Words(nn.Module):
    """Words and what follows them, with dropout or batch statistics between."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.embedding, self.between, self.head = nn.Embedding(WORDS, 6), between, nn.Linear(6, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.between(self.embedding(tokens).transpose(1, 2)).transpose(1, 2))


def token_mean(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def sample_mean(output: Tensor, labels: Tensor) -> Tensor:
    return F.mse_loss(output[..., 0], labels.float())


def total(output: Tensor, labels: Tensor) -> Tensor:
    return 0.01 * F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "a mean of samples": (nn.Tanh, sample_mean),
    "a mean of tokens": (nn.Tanh, token_mean),
    "a sum": (nn.Tanh, total),
    "dropout": (lambda: nn.Dropout(0.3), token_mean),
    "batch statistics": (lambda: nn.BatchNorm1d(6), token_mean),
}


def epoch(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Batches of these sizes; few labels count in the first samples of each."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for size in sizes:
        tokens, labels = (torch.randint(0, WORDS, (size, LENGTH), generator=generator) for _ in range(2))
        counted = torch.arange(LENGTH)[None] <= torch.arange(size)[:, None]
        batches.append((tokens, labels.masked_fill(~counted, -100)))
    return batches


def train(
    name: str, sizes: list[int], mesh: Any, options: dict[str, Any], part: Callable[..., Any] = tuple
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and state of a loop over two epochs; by eager torch unless there is a mesh, or options."""
    torch.manual_seed(0)
    between, loss_fn = MODELS[name]
    model = Words(between())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    step = None
    if mesh is not None or options:
        step = cf.compile_step(model, loss_fn, optimizer, mesh, timeout=60.0, **options)
    for tokens, labels in 2 * epoch(sizes):
        if step is not None:
            losses.append(float(step(*part((tokens, labels)))))
            continue
        optimizer.zero_grad()
        loss = loss_fn(model(tokens), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    state = {key: getattr(value, "full_tensor", lambda v=value: v)() for key, value in model.state_dict().items()}
    return losses, state


def on_ranks(name: str, sizes: list[int], options: dict[str, Any]) -> Any:
    return train(name, sizes, {"dp": 2}, options)


def assert_as_one_process(name: str, sizes: list[int], everywhere: list[Any]) -> None:
    losses, state = train(name, sizes, None, {})
    for found, whole in everywhere:
        assert found == pytest.approx(losses, rel=1e-5, abs=1e-6)
        for key, value in state.items():
            torch.testing.assert_close(whole[key], value, rtol=1e-5, atol=1e-5)


CASES: list[tuple[str, list[int], dict[str, Any]]] = [
    ("a mean of samples", [4, 3, 1], {}),
    ("a mean of tokens", [4, 3], {"data_parallel": "zero1", "accumulate": 2}),
    ("a sum", [4, 5], {"data_parallel": "zero3", "loss_is": "sum"}),
    ("dropout", [4, 1], {"data_parallel": "zero2"}),
    ("batch statistics", [4, 3], {}),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "sizes", "options"), CASES, ids=[f"{name} {options}" for name, _, options in CASES])
def test_L4_the_last_batch_of_an_epoch_counts_with_all_its_samples(
    ranks: Any, name: str, sizes: list[int], options: dict[str, Any]
) -> None:
    assert_as_one_process(name, sizes, ranks(2).run(on_ranks, name, sizes, options))


def own_parts(name: str, sizes: list[int], options: dict[str, Any]) -> Any:
    return train(name, sizes, {"dp": 2}, {"batch": "uneven", **options}, part=uneven_part)


def uneven_part(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The first rank's part is larger by two samples, or all; as large as the other's in batches of six."""
    size = batch[0].shape[0]
    first = size // 2 if size == 6 else min(size, size // 2 + 2)
    return tuple(tensor[first:] if dist.get_rank() else tensor[:first] for tensor in batch)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "options"),
    [("a mean of tokens", {"data_parallel": "zero2"}), ("dropout", {}), ("batch statistics", {"accumulate": 2})],
    ids=str,
)
def test_ranks_may_bring_different_numbers_of_samples(ranks: Any, name: str, options: dict[str, Any]) -> None:
    sizes = [5, 2, 7] if "accumulate" in options else [6, 5, 8, 2]  # whole, or in equal parts after all
    assert_as_one_process(name, sizes, ranks(2).run(own_parts, name, sizes, options))


def refused(what: str) -> str:
    rank = dist.get_rank()
    batches = {
        "local": (torch.ones(2 + rank, 3), torch.ones(2 + rank, 1)),
        "lengths": (torch.ones(2, 3 + rank), torch.ones(2, 1)),
        "rows": (torch.ones(2, 3), torch.ones(2 + rank, 1)),
        "nothing": (torch.ones(0, 3), torch.ones(0, 1)),
    }
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = "local" if what == "local" else "uneven"
    step = cf.compile_step(model, F.mse_loss, optimizer, {"dp": 2}, batch=given, timeout=20.0)
    try:
        step(*batches[what])
    except cf.CrossfadeError as error:
        return str(error)
    return ""


REFUSED = {
    "local": 'different sizes of batches, .*rank 1 has `batch.0.: .3, 3.`.* Remedy: pass batch="uneven"',
    "lengths": "parts of the batch that differ in more than their number of samples",
    "rows": "part 1 of the batch, whose tensors have different numbers of rows",
    "nothing": "a batch of 0 samples",
}


@pytest.mark.ranks
@pytest.mark.parametrize("what", REFUSED)
def test_parts_that_cannot_be_put_together_are_refused_on_every_rank(ranks: Any, what: str) -> None:
    for said in ranks(2).run(refused, what):
        assert re.search(REFUSED[what], said), said


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_that_does_not_divide_by_micro_batches_is_computed_at_once(name: str) -> None:
    assert_as_one_process(name, [3, 2, 1], [train(name, [3, 2, 1], None, {"accumulate": 4})])


def test_the_report_and_the_log_say_that_a_batch_is_computed_at_once(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(3, 1)
    step = cf.compile_step(model, F.mse_loss, torch.optim.SGD(model.parameters()), accumulate=2)
    with caplog.at_level(logging.INFO, "crossfade"):
        step.prepare(torch.ones(5, 3), torch.ones(5, 1))
    why = "5 samples do not divide by 2 (1 data-parallel ranks times 2 micro-batches)"
    assert step.report.facts["batch"] == f"5 samples (global), all 5 at once on every rank: {why}"
    assert f"every rank computes all of this batch at once: {why}" in caplog.messages
