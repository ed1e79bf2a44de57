"""Batches of many lengths: a few programs run all of them, as one process of eager torch would."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import crossfade as cf

WORDS, LONGEST = 13, 40


class Reader(nn.Module):
    """Attention over words with learned positions; what a sequence's length decides besides is `extra`."""

    def __init__(self, dropout: float = 0.0, extra: str = "") -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 8), nn.Embedding(LONGEST, 8)
        self.mix, self.head, self.dropout, self.extra = nn.Linear(8, 24), nn.Linear(8, WORDS), dropout, extra

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.words(tokens) + self.places.weight[:length]
        if self.extra == "branch" and length > 10:
            x = x * 2
        if self.extra == "loop":
            for place in range(length):
                x = x + 0.01 * place
        q, k, v = self.mix(F.dropout(x, self.dropout)).chunk(3, -1)
        return self.head(F.scaled_dot_product_attention(q, k, v, is_causal=True) / length)


def loss_of(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def batches(sizes: list[tuple[int, int]]) -> list[tuple[Tensor, Tensor]]:
    """Words and labels of these sizes; the first samples have few labels."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for size in sizes:
        tokens, labels = (torch.randint(0, WORDS, size, generator=generator) for _ in range(2))
        labels[0, : size[1] // 2] = -100
        found.append((tokens, labels))
    return found


def train(
    sizes: list[tuple[int, int]], mesh: Any = None, reader: tuple[Any, ...] = (), **options: Any
) -> tuple[list[float], dict[str, Tensor], cf.Step]:
    torch.manual_seed(0)
    model = Reader(*reader)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = cf.compile_step(model, loss_of, optimizer, mesh, **options)
    losses = [float(step(*batch)) for batch in batches(sizes)]
    return losses, model.state_dict(), step


def train_eagerly(sizes: list[tuple[int, int]], reader: tuple[Any, ...] = ()) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Reader(*reader)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for tokens, labels in batches(sizes):
        optimizer.zero_grad()
        loss = loss_of(model(tokens), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def assert_as_eager(sizes: list[tuple[int, int]], found: tuple[list[float], Any, Any], reader: Any = ()) -> None:
    losses, state = train_eagerly(sizes, reader)
    assert found[0] == pytest.approx(losses, rel=1e-5, abs=1e-6)
    for name, value in state.items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-6)


LENGTHS = [(4, length) for length in range(5, 25)]


@pytest.mark.parametrize(("dynamic", "captures"), [(None, 2), (True, 1), (False, 20)])
def test_L4_many_lengths_take_few_programs(dynamic: bool | None, captures: int) -> None:
    found = train(LENGTHS, dynamic=dynamic)
    assert found[2].captures == captures
    assert_as_eager(LENGTHS, found)


def test_lengths_and_numbers_of_samples_take_three_programs() -> None:
    sizes = [(4, 6), (4, 9), (6, 9), (2, 31), (8, 5), (4, 40), (3, 3), (9, 9)]
    found = train(sizes, reader=(0.2,))
    assert found[2].captures == 3
    assert_as_eager(sizes, found, (0.2,))


def test_micro_batches_have_symbolic_sizes_too() -> None:
    sizes = [(4, 6), (4, 9), (8, 7), (12, 5)]
    found = train(sizes, accumulate=2)
    assert found[2].captures == 2
    assert_as_eager(sizes, found)


def test_a_branch_on_the_length_is_captured_again_and_named(caplog: pytest.LogCaptureFixture) -> None:
    sizes = [(4, 5), (4, 6), (4, 7), (4, 20), (4, 8), (4, 30)]
    with caplog.at_level(logging.INFO, "crossfade"):
        found = train(sizes, reader=(0.0, "branch"))
    assert found[2].captures == 3
    assert any(" <= 10, assumed at " in said and "test_lengths.py" in said for said in caplog.messages), caplog.text
    assert_as_eager(sizes, found, (0.0, "branch"))


def test_a_model_that_fixes_a_length_is_captured_for_each_and_its_line_named(caplog: pytest.LogCaptureFixture) -> None:
    sizes = [(4, 5), (4, 6), (4, 7)]
    with caplog.at_level(logging.INFO, "crossfade"):
        found = train(sizes, reader=(0.0, "loop"))
    assert found[2].captures == 3
    said = next(said for said in caplog.messages if "captured by itself" in said)
    assert "a size of 6 at " in said and "for place in range(length)" in said
    assert_as_eager(sizes, found, (0.0, "loop"))


def test_a_size_that_the_position_table_does_not_have_is_an_error_as_in_torch() -> None:
    *_, step = train([(4, 6), (4, 7)])
    with pytest.raises(cf.CrossfadeError, match="40"):
        step(*batches([(4, LONGEST + 1)])[0])


def test_other_settings_are_captured_again() -> None:
    *_, step = train([(4, 6), (4, 7)], reader=(0.2,))
    step.model.dropout = 0.4
    step(*batches([(4, 9)])[0])
    assert step.captures == 3


def on_ranks(sizes: list[tuple[int, int]], reader: Any, options: dict[str, Any]) -> Any:
    losses, state, step = train(sizes, {"dp": 2}, reader, timeout=60.0, **options)
    whole = {name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in state.items()}
    return losses, whole, step.captures


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("sizes", "options"),
    [([(4, 6), (8, 9), (6, 11)], {"dynamic": True}), ([(4, 6), (4, 9), (6, 7)], {"data_parallel": "zero1"})],
    ids=["replicate", "zero1"],
)
def test_ranks_share_programs_of_symbolic_sizes(
    ranks: Any, sizes: list[tuple[int, int]], options: dict[str, Any]
) -> None:
    reader = (0.2,)
    for found in ranks(2).run(on_ranks, sizes, reader, options):
        assert found[2] == 2 - ("dynamic" in options)
        assert_as_eager(sizes, found, reader)


def with_parts_of_other_lengths() -> str:
    torch.manual_seed(0)
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = cf.compile_step(model, loss_of, optimizer, {"dp": 2}, batch="local", timeout=20.0)
    try:
        for length in (6, 7, 8 + dist.get_rank()):
            step(*batches([(4, length)])[0])
    except cf.CrossfadeError as error:
        return str(error)
    return ""


@pytest.mark.ranks
def test_parts_of_other_sizes_on_other_ranks_are_noticed(ranks: Any) -> None:
    for said in ranks(2).run(with_parts_of_other_lengths):
        assert "the size of a part of the batch" in said and 'pass batch="uneven"' in said


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


def normalised() -> tuple[int, list[float], list[str]]:
    """Captures, losses and what was logged, of a model that has no symbolic sizes on ranks yet."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("crossfade").addHandler(handler)
    torch.manual_seed(0)
    model = Normalised()
    step = cf.compile_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), {"dp": 2})
    losses = [float(step(torch.arange(3.0 * n).view(n, 3).sin(), torch.ones(n, 1))) for n in (4, 6, 8)]
    logging.getLogger("crossfade").removeHandler(handler)
    return step.captures, losses, said


@pytest.mark.ranks
def test_what_cannot_be_symbolic_yet_is_captured_for_each_size_and_said(ranks: Any) -> None:
    torch.manual_seed(0)
    model = Normalised()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for n in (4, 6, 8):
        optimizer.zero_grad()
        loss = F.mse_loss(model(torch.arange(3.0 * n).view(n, 3).sin()), torch.ones(n, 1))
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    for captures, losses, said in ranks(2).run(normalised):
        assert captures == 3
        assert losses == pytest.approx(expected, rel=1e-5)
        assert any("captured by itself" in line and "batch statistics" in line for line in said)
