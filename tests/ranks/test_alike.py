"""What differs between ranks is seen before the first step and at every later one, on every rank, by its name."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import crossfade as cf
from crossfade.errors import RankMismatchError
from crossfade.ranks.alike import RankComparison, RankInvariant, digest_of
from crossfade.ranks.members import Members


def network(dropout: float = 0.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Dropout(dropout), nn.Linear(10, 3, bias=False))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def batch_of(step: int, own: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step + (1000 * dist.get_rank() if own else 0))
    return torch.randn(12, 6, generator=generator), torch.randn(12, 3, generator=generator)


def train(change: str, at: int, steps: int, options: dict[str, Any]) -> tuple[int, str, list[str], str, int]:
    """Train, with something that differs on the last rank from one step on: when and how it ended, what was warned of,
    what the report says of comparing, and how many collectives there were."""
    dropout = 0.1 if change == "random" else 0.0
    model, optimizer = network(dropout)
    step = cf.compile_step(
        model, nn.functional.mse_loss, optimizer, {"dp": dist.get_world_size()}, timeout=30, **options
    )
    error, done = "", 0
    odd = dist.get_rank() == dist.get_world_size() - 1
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for done in range(steps):
            own = change == "own batch" or (change == "batch" and done >= at)
            if odd and done == at:
                _change(change, model, optimizer)
            try:
                step(*batch_of(done, own))
            except RankMismatchError as found:
                error = str(found)
                break
    cost = step.report.facts.get("ranks compared", "") if done else ""
    messages = [str(warning.message) for warning in said if "Remedy" in str(warning.message)]
    return done, error, messages, cost, _number_of_collectives(step) if done else 0


def _number_of_collectives(step: cf.Step) -> int:
    return sum(count for count, _ in step.report.collectives_after.values())


def _change(change: str, model: Any, optimizer: Any) -> None:
    if change == "rate":
        optimizer.param_groups[0]["lr"] *= 0.9
    elif change == "weight":
        with torch.no_grad():
            model[3].weight[1, 2] += 1e-3
    elif change == "state":
        optimizer.state[model[0].bias]["exp_avg"][3] *= 1.01
    elif change == "random":
        torch.rand(1)


@pytest.mark.ranks
@pytest.mark.parametrize("count", [2, 3])
def test_a_batch_of_ones_own_is_refused_before_the_first_step(ranks: Any, count: int) -> None:
    for done, error, *_ in ranks(count).run(train, "own batch", 0, 3, {}):
        assert done == 0
        assert "different batches" in error and 'batch="local"' in error and "DistributedSampler" in error


CHANGES = [
    ("batch", "replicate", 'batch="local"', 1),
    ("batch", "zero3", 'batch="local"', 1),
    ("rate", "replicate", "lr 0.01 in step 3; ", 1),
    ("rate", "zero2", "lr 0.009 in step 3; ", 1),
    ("weight", "replicate", "3.weight sums up to", 3),
    ("state", "replicate", "0.bias sums up to", 3),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("change", "mode", "words", "within"), CHANGES)
def test_what_changes_on_one_rank_is_seen_in_later_steps(
    ranks: Any, change: str, mode: str, words: str, within: int
) -> None:
    everywhere = ranks(2).run(train, change, 3, 10, {"data_parallel": mode})
    assert everywhere[0][:2] == everywhere[1][:2], "all ranks raise the same error"
    for done, error, *_ in everywhere:
        assert 3 <= done < 3 + within, error
        assert words in error and "Remedy" in error


@pytest.mark.ranks
def test_three_ranks_see_it_too(ranks: Any) -> None:
    for done, error, *_ in ranks(3).run(train, "weight", 2, 9, {}):
        assert 2 <= done < 5 and "rank 2" in error


@pytest.mark.ranks
def test_comparing_now_and_then_or_never(ranks: Any) -> None:
    compared = ranks(2).run(train, "rate", 3, 8, {"check_every": 5})
    for done, error, _, cost, _ in compared:
        assert done == 5 and "a learning rate" in error and "every 5 steps" in cost
    never = ranks(2).run(train, "rate", 3, 8, {"check_every": 0})
    for done, error, _, cost, _ in never:
        assert done == 7 and not error and not cost
    assert compared[0][-1] == never[0][-1], "comparing adds no collective"


@pytest.mark.ranks
def test_the_same_batch_where_each_brings_its_own_is_warned_of_once(ranks: Any) -> None:
    (_, error, messages, *_), (_, _, others, *_) = ranks(2).run(train, "none", 0, 6, {"batch": "local"})
    assert not error and not others
    assert len(messages) == 1 and "the same batch on every rank" in messages[0] and "DistributedSampler" in messages[0]
    for _, error, messages, *_ in ranks(2).run(train, "own batch", 0, 6, {"batch": "local"}):
        assert not error and not messages


@pytest.mark.ranks
def test_another_random_stream_on_one_rank_is_warned_of(ranks: Any) -> None:
    (done, error, messages, *_), _ = ranks(2).run(train, "random", 2, 5, {})
    assert done == 4 and not error
    assert len(messages) == 1 and "random generator" in messages[0] and 'semantics="per-rank"' in messages[0]


def judged(ranks: int, digests: list[int], **options: Any) -> RankComparison:
    """A comparison of one number, after what came back for step 0 from so many ranks with these digests."""
    invariant = RankInvariant(
        "a number", lambda batch, step: digests[0], lambda step: "it is", "the same", "correct it", **options
    )
    mine = RankComparison("dp", Members(tuple(range(ranks)), 0, 1.0), [invariant])
    numbers = []
    for digest in digests:
        theirs = RankComparison("dp", mine.members, [replace(invariant, digest=lambda batch, step, d=digest: d)])
        numbers.append(theirs.given((), 0))
    mine.given((), 0)
    mine.reduced(torch.stack(numbers).mean(0), 0)
    return mine


@pytest.mark.parametrize("ranks", [2, 3, 64])
def test_one_rank_that_differs_by_one_is_seen_and_equal_ones_are_not(ranks: int) -> None:
    equal = [2**24 - 1] * ranks
    judged(ranks, equal)
    with pytest.warns(UserWarning, match="a number differs between ranks in step 0: expected the same"):
        judged(ranks, [*equal[:-1], equal[0] - 1], unless="warn")


def test_what_should_differ_is_warned_of_after_three_equal_steps_and_once() -> None:
    comparison = judged(2, [5, 5], unless="differ")
    means = comparison.given((), 0)
    comparison.reduced(means, 1)
    with pytest.warns(UserWarning, match="the same a number on every rank in 3 steps"):
        comparison.reduced(means, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        comparison.reduced(means, 3)


def test_steps_in_between_are_not_compared() -> None:
    invariant = RankInvariant("a number", lambda batch, step: 7, lambda step: "it is", "the same", "correct it")
    comparison = RankComparison("dp", Members((0, 1), 0, 1.0), [invariant], every=3)
    assert comparison.given((), 2).tolist() == [0.0] * comparison.numbers
    comparison.reduced(torch.tensor([float("nan")] * comparison.numbers), 2)
    assert comparison.given((), 3)[:2].tolist() == [7.0, 49.0]


def test_digests_cover_every_layout_and_sample_large_tensors_in_turn() -> None:
    large = torch.zeros(8192)
    before = [digest_of([large], step, most=4096) for step in range(2)]
    large[1] = 1.0
    assert [digest_of([large], step, most=4096) != before[step] for step in range(2)] == [False, True]
    sparse = torch.eye(3).to_sparse()
    assert digest_of([sparse], 0) != digest_of([sparse * 2], 0)
    wide = torch.zeros(4, 4).t()
    wide[2, 1] = 1.0
    assert digest_of([wide], 0) != digest_of([torch.zeros(4, 4)], 0)
