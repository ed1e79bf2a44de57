"""Losses that divide by what a batch holds: parts with more or fewer tokens add up to the whole batch's loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import crossfade as cf
from crossfade.graph.private import tree_map_only

VOCABULARY, SAMPLES, LENGTH = 11, 8, 5


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 6), nn.Linear(6, VOCABULARY)
        self.register_buffer("weight", torch.linspace(0.5, 2, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(tokens)))


def batch_of(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, labels of which the first samples have few, their mask, and the number of labels."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=generator) for _ in range(2))
    lengths = torch.tensor([0, 1, 1, 2, 5, 5, 4, 5])
    mask = torch.arange(LENGTH)[None] < lengths[:, None]
    return tokens, labels.masked_fill(~mask, -100), mask.float(), mask.sum()


def each(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="none")


LOSSES: dict[str, Callable[..., Tensor]] = {
    "ignored labels": lambda o, y, m, n: F.cross_entropy(o.flatten(0, 1), y.flatten()),
    "images of labels": lambda o, y, m, n: F.cross_entropy(o.permute(0, 2, 1)[..., None], y[..., None]),
    "smoothed labels": lambda o, y, m, n: F.cross_entropy(o.flatten(0, 1), y.flatten(), label_smoothing=0.1),
    "weighted classes": lambda o, y, m, n: F.cross_entropy(
        o.flatten(0, 1), y.flatten(), weight=torch.linspace(0.5, 2, VOCABULARY)
    ),
    "weighted and smoothed": lambda o, y, m, n: F.cross_entropy(
        o.flatten(0, 1), y.flatten(), weight=torch.linspace(0.5, 2, VOCABULARY), label_smoothing=0.2
    ),
    "a mask's mean": lambda o, y, m, n: (each(o, y) * m.flatten()).sum() / m.sum().clamp(min=1),
    "a mask's mean, by its inverse": lambda o, y, m, n: (each(o, y) * m.flatten()).sum() * (1 / m.sum()),
    "normalised weights": lambda o, y, m, n: (each(o, y) * (m / m.sum()).flatten()).sum(),
    "guarded": lambda o, y, m, n: torch.where(m.sum() > 0, (each(o, y) * m.flatten()).sum() / m.sum(), 0.0),
    "a mean of each sample, and of these": lambda o, y, m, n: (
        (each(o, y).view_as(m) * m).sum(1) / m.sum(1).clamp(min=1)
    ).mean(),
    "the number of items": lambda o, y, m, n: F.cross_entropy(o.flatten(0, 1), y.flatten(), reduction="sum") / n,
    "items, and a mean": lambda o, y, m, n: (
        F.cross_entropy(o.flatten(0, 1), y.flatten(), reduction="sum") / n + 0.1 * o.square().mean()
    ),
    "a mask's mean, and a mean": lambda o, y, m, n: (
        (each(o, y) * m.flatten()).sum() / m.sum() + 0.1 * o.square().mean() - 0.2
    ),
    "normalised weights, and ignored labels": lambda o, y, m, n: (
        (o.square().mean(-1) * (m / m.sum())).sum() + F.cross_entropy(o.flatten(0, 1), y.flatten())
    ),
    "divided by the batch": lambda o, y, m, n: each(o, y).sum() / o.shape[0],
    "times a part of the batch": lambda o, y, m, n: (each(o, y) * (1 / o.numel())).sum(),
    "halves, divided by the batch": lambda o, y, m, n: sum(h.sum() for h in (o / len(o)).split(6, -1)),
    "the largest, divided by the batch": lambda o, y, m, n: (o / len(o)).max(-1).values.sum(),
    "a sum": lambda o, y, m, n: each(o, y).sum() * 0.01,
    "what labels pick": lambda o, y, m, n: (
        -o.log_softmax(-1)[torch.arange(len(o))[:, None], torch.arange(LENGTH), y.clamp(min=0)].mean()
    ),
    "what labels pick, flattened": lambda o, y, m, n: (
        -o.log_softmax(-1).flatten()[torch.arange(y.numel()) * VOCABULARY + y.flatten().clamp(min=0)].mean()
    ),
    "a list of losses": lambda o, y, m, n: torch.stack(
        [F.cross_entropy(o.flatten(0, 1), y.flatten()), F.mse_loss(o, torch.ones_like(o))]
    ).sum(),
    "of each class": lambda o, y, m, n: (
        ((o.softmax(-1) * m[..., None]).sum((0, 1)) / m.sum()) * torch.linspace(0, 1, VOCABULARY)
    ).sum(),
}


def train(name: str, options: dict[str, Any], ranks: int) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """Losses, parameters and warnings; with one rank by eager torch, on the whole batch."""
    torch.manual_seed(0)
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    found = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if ranks > 1 or options:
            step = cf.compile_step(model, LOSSES[name], optimizer, {"dp": ranks}, timeout=30.0, **options)
        for seed in range(3):
            tokens, *rest = batch_of(seed)
            if ranks > 1 or options:
                given = _own((tokens, *rest), ranks) if options.get("batch") == "local" else (tokens, *rest)
                found.append(float(step(*given)))
                continue
            optimizer.zero_grad()
            loss = LOSSES[name](model(tokens), *rest)
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()))
    whole = {
        key: getattr(value, "full_tensor", lambda value=value: value)() for key, value in model.state_dict().items()
    }
    return found, whole, [str(warning.message) for warning in said if "loss" in str(warning.message)]


def train_on_ranks(name: str, options: dict[str, Any], ranks: int) -> Any:
    return train(name, options, ranks)


def _own(batch: Any, ranks: int) -> Any:
    return tree_map_only(Tensor, lambda t: t.chunk(ranks)[dist.get_rank()] if t.dim() else t, batch)


def assert_as_one_device(name: str, everywhere: list[Any]) -> None:
    losses, parameters, _ = train(name, {}, 1)
    for found, whole, said in everywhere:
        assert said == []
        assert found == pytest.approx(losses, rel=1e-5, abs=1e-6)
        for key, value in parameters.items():
            torch.testing.assert_close(whole[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks
@pytest.mark.parametrize("name", LOSSES)
def test_parts_of_any_number_of_tokens_add_up(ranks: Any, name: str) -> None:
    assert_as_one_device(name, ranks(2).run(train_on_ranks, name, {}, 2))


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["ignored labels", "a mask's mean", "the number of items"])
@pytest.mark.parametrize(
    "options", [{"batch": "local", "data_parallel": "zero1"}, {"data_parallel": "zero3", "accumulate": 2}], ids=str
)
def test_parts_add_up_with(ranks: Any, name: str, options: dict[str, Any]) -> None:
    assert_as_one_device(name, ranks(2).run(train_on_ranks, name, options, 2))


@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_add_up_on_one_device(name: str) -> None:
    assert_as_one_device(name, [train(name, {"accumulate": 4}, 1)])


def test_a_loss_of_parts_that_do_not_add_up_is_warned_of() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def root_mean_square(output: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(output, targets).sqrt()

    step = cf.compile_step(model, root_mean_square, optimizer, accumulate=2)
    with pytest.warns(UserWarning, match=r"may not make up the loss of the whole batch: sqrt"):
        step(torch.randn(4, 3), torch.randn(4, 1))
    assert any("may not make up" in verdict.reason for _, verdict in step.report.verdicts)


BY_PLACES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "weights by place": (lambda o: (o[:, 0] * torch.arange(len(o))).mean(), "numbers the samples"),
    "later samples count more": (lambda o: (o[:, 0] * torch.linspace(0, 1, len(o))).mean(), "numbers the samples"),
    "the first of two halves": (lambda o: o.view(2, -1, 2)[0].square().mean(), "takes samples"),
}


@pytest.mark.parametrize("name", BY_PLACES)
def test_samples_named_by_their_places_are_warned_of(name: str) -> None:
    loss, reason = BY_PLACES[name]
    model = nn.Linear(3, 2)
    step = cf.compile_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=2)
    with pytest.warns(UserWarning, match=rf"may not make up the loss of the whole batch: .* {reason} of one part"):
        step(torch.randn(8, 3))


def test_samples_that_the_batch_names_are_warned_of() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def to_partners(output: Tensor, partners: Tensor) -> Tensor:
        return F.mse_loss(output, output[partners])

    step = cf.compile_step(model, to_partners, optimizer, accumulate=2)
    with pytest.warns(UserWarning, match="takes samples of one part by their places"):
        step(torch.randn(8, 3), torch.tensor([1, 0, 3, 2, 1, 0, 3, 2]))


def highest_half(output: Tensor) -> Tensor:
    return output.square().sum(1).topk(len(output) // 2).values.mean()


def warnings_of(loss: Callable[[Tensor], Tensor], ranks: int) -> list[str]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    step = cf.compile_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), {"dp": ranks}, timeout=30.0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step(torch.randn(8, 3))
    return [str(warning.message) for warning in said]


@pytest.mark.ranks
def test_ranks_warn_of_a_choice_among_their_own_samples(ranks: Any) -> None:
    said = ranks(2).run(warnings_of, highest_half, 2)[0]
    assert any("topk.default" in message and "compares samples of one part" in message for message in said), said


def test_a_sum_that_is_called_a_mean_is_summed_with_a_warning() -> None:
    with pytest.warns(UserWarning, match='loss_is="mean", but the captured loss is a sum'):
        found, _, _ = train_warned("the number of items", {"accumulate": 2, "loss_is": "mean"})
    assert found == pytest.approx(train("the number of items", {}, 1)[0], rel=1e-5)


def train_warned(name: str, options: dict[str, Any]) -> Any:
    """Train on one device; what it warns of is warned of here."""
    found, whole, said = train(name, options, 1)
    for message in said:
        warnings.warn(message, stacklevel=1)
    return found, whole, said


class Counts(nn.Module):
    """Buffers that follow from samples as a sum, a number, a maximum and a function of means."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        for name in ("total", "largest", "spread"):
            self.register_buffer(name, torch.zeros(4))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.total.mul_(0.9).add_(x.sum(0), alpha=0.1)
            self.largest.copy_(torch.maximum(self.largest, x.amax(0)))
            self.spread.lerp_((x * x).mean(0) - x.mean(0).square(), 0.1)
            self.seen += len(x)
        return self.layer(x).square().mean()


def count_on_ranks(ranks: int, accumulate: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Counts()
    batches = [torch.randn(8, 4) for _ in range(2)]
    if ranks > 1:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = cf.compile_step(model, None, optimizer, {"dp": ranks}, timeout=30.0, accumulate=accumulate)
    for batch in batches:
        step(batch) if ranks > 1 else [model(part) for part in batch.chunk(accumulate)]
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.ranks
def test_buffers_become_what_they_would_on_the_whole_batch(ranks: Any) -> None:
    expected = count_on_ranks(1, 2)
    for found in ranks(2).run(count_on_ranks, 2, 2):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)
