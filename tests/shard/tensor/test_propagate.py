"""What the walk over a program says: once for each value and reason, however much lies between."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from crossfade.shard.tensor.localize import Request, localize
from crossfade.shard.tensor.plan import Plan


class Net(nn.Module):
    """One split value that many operators need whole, with others in between."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        others = [(y * index).softmax(-1) for index in range(2, 14)]
        return torch.stack([y.softmax(-1), *others, y.softmax(-1)])


def test_a_value_that_is_gathered_for_many_is_told_once() -> None:
    exported = torch.export.export(Net(), (torch.ones(2, 4),))
    verdicts = localize(exported, Plan({"up": "colwise"}).resolve(exported, 2), 2, "tp", Request()).verdicts
    gathered = [verdict.subject for verdict in verdicts if verdict.reason == "gathered"]
    assert len(gathered) == 13 and len(set(gathered)) == 13


class Shared(nn.Module):
    """A split table whose rows three projections read through views of their own, and a residual as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4)
        self.up = nn.Linear(4, 4)

    def forward(self, words: Tensor) -> Tensor:
        rows = self.words(words)
        return rows + sum(self.up(rows.view(-1, 4)).relu().view(2, 3, 4) for _ in range(3))


def test_a_partial_sum_that_many_need_whole_is_reduced_once_where_it_arises() -> None:
    exported = torch.export.export(Shared(), (torch.zeros(2, 3, dtype=torch.int64),))
    local = localize(exported, Plan({"words": "rowwise"}).resolve(exported, 2), 2, "tp", Request())
    assert [verdict.subject for verdict in local.verdicts if verdict.reason == "reduced"] == ["embedding"]


class Normed(nn.Module):
    """A residual that is one of several results of an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(x)
        y = x + self.down(self.up(x).relu())
        return y, y.relu()


def test_one_of_several_results_is_no_constant() -> None:
    """Else what is added to it stays a partial sum, to be reduced by everyone who reads the sum."""
    exported = torch.export.export(Normed(), (torch.ones(2, 4),)).run_decompositions()
    plan = Plan({"up": "colwise", "down": "rowwise"}).resolve(exported, 2)
    local = localize(exported, plan, 2, "tp", Request())
    assert [verdict.subject for verdict in local.verdicts if verdict.reason == "reduced"] == ["addmm_1"]


class Cast(nn.Module):
    """Two projections whose sums meet after one has been converted."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return (self.one(x).to(self.dtype) + self.other(x)).relu()


@pytest.mark.parametrize(("dtype", "reduced"), [(torch.float32, ["add"]), (torch.bfloat16, ["linear", "linear_1"])])
def test_a_conversion_that_rounds_nothing_lets_partial_sums_pass(dtype: torch.dtype, reduced: list[str]) -> None:
    exported = torch.export.export(Cast(dtype), (torch.ones(2, 8),))
    local = localize(exported, Plan({"*o*": "rowwise"}).resolve(exported, 2), 2, "tp", Request())
    assert [verdict.subject for verdict in local.verdicts if verdict.reason == "reduced"] == reduced
