"""Embeddings and losses over a split vocabulary: reduced, never gathered, or declined with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crossfade.errors import PlanError
from crossfade.shard.tensor.localize import LocalProgram, Request, localize
from crossfade.shard.tensor.placements import PARTIAL, REPLICATE, Placement, Shard
from tests.shard.tensor.conjugate_jobs import plan_of
from tests.shard.tensor.lockstep import run_ranks
from tests.shard.tensor.one_operator import OneOperator

aten = torch.ops.aten
LOGITS, TARGETS = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)), torch.arange(0, 16, 2)


class Lookup(nn.Module):
    """An embedding table, whose name the plan of `conjugate_jobs` splits by rows."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8, **options)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)


def looked_up(options: dict[str, Any], tokens: Tensor, ranks: int) -> tuple[LocalProgram, list[Tensor], Tensor]:
    model = Lookup(**options)
    exported = torch.export.export(model, (tokens,))
    local = localize(exported, plan_of(model, ranks, sequence=False), ranks, "tp", Request())
    return local, [results[0] for results in run_ranks(local, exported.state_dict, [tokens])], model(tokens)


def names(local: LocalProgram) -> list[str]:
    return [str(node.target) for node in local.exported.graph.nodes if "crossfade.tp_" in str(node.target)]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("tokens", [torch.arange(16), torch.tensor(7), torch.full((2, 3), 15), torch.arange(16).int()])
def test_rows_of_other_ranks_are_zero(tokens: Tensor, ranks: int):
    local, found, right = looked_up({}, tokens, ranks)
    assert names(local) == ["crossfade.tp_reduce.default"]
    assert all(torch.equal(result, right) for result in found)


def test_padding_is_a_row_like_any_other():
    """Its gradient is none, which `test_conjugate` sees."""
    _, found, right = looked_up({"padding_idx": 3}, torch.tensor([3, 0, 3]), 2)
    assert all(torch.equal(result, right) for result in found)


@pytest.mark.parametrize("options", [{"scale_grad_by_freq": True}, {"sparse": True}])
def test_gradients_that_count_over_all_rows_are_refused(options: dict[str, bool]):
    with pytest.raises(PlanError, match=r"embedding.weight is split on dim 0, .*scaled by frequency, or sparse"):
        looked_up(options, torch.arange(16), 2)


CLASSES = Shard(1)


def loss(*args: Any, place: Placement = CLASSES, ranks: int = 2) -> OneOperator:
    tensors = [argument for argument in args if isinstance(argument, Tensor)]
    return OneOperator(aten.cross_entropy_loss.default, args, {}, [place, *([REPLICATE] * (len(tensors) - 1))], ranks)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("ranks", [2, 4])
def test_split_classes_stay_split(reduction: int, ranks: int):
    program = loss(LOGITS, TARGETS, None, reduction, ranks=ranks)
    assert program.decision().wants == (Shard(1), REPLICATE)


@pytest.mark.parametrize(
    ("args", "place", "why"),
    [
        ((LOGITS, TARGETS, torch.ones(16)), Shard(1), "class weights"),
        ((LOGITS, TARGETS, None, 1, -100, 0.1), Shard(1), "smoothing"),
        ((LOGITS, LOGITS.softmax(1)), Shard(1), "probabilities"),
        ((LOGITS, TARGETS), Shard(0), "its mean runs over that dim"),
        ((LOGITS, TARGETS), Shard(1, outer=2), "in blocks"),
        ((LOGITS, TARGETS), PARTIAL, ""),
    ],
)
def test_what_needs_all_classes_gets_them(args: Any, place: Placement, why: str):
    decision = loss(*args, place=place).decision()
    assert set(decision.wants) == {REPLICATE} and decision.results == (REPLICATE,)
    assert why in decision.why


def test_nothing_counted_is_no_number():
    program = loss(LOGITS, torch.full((8,), -100))
    assert all(results[0].isnan() for results in program.on_ranks(left_split=False))


def test_large_and_excluded_logits():
    """As stable as the whole: exponentials are taken of differences, and a class may be excluded by -inf."""
    logits = LOGITS * 300
    logits[:, 1] = -torch.inf
    program = loss(logits, TARGETS)
    for (found,) in program.on_ranks(left_split=False):
        torch.testing.assert_close(found, F.cross_entropy(logits, TARGETS))
