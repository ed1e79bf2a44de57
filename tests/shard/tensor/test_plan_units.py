"""Sizes and heads that do not divide by the ranks: how each is cut, and that results and gradients stay right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crossfade.shard.tensor.localize import Request, localize
from crossfade.shard.tensor.plan import Fused, Plan
from tests.shard.tensor.lockstep import run_ranks
from tests.shard.tensor.uneven import APART, CHANNELS, PLAN, WORDS, Decoder


def resolved(model: nn.Module, ranks: int, plan: dict[str, Any] | None = None) -> tuple[Any, Any, Tensor]:
    tokens = torch.randint(0, WORDS, (2, 5), generator=torch.Generator().manual_seed(1))
    exported = torch.export.export(model, (tokens,))
    return exported, Plan(plan or {**PLAN, **APART}).resolve(exported, ranks), tokens


@pytest.mark.parametrize(
    ("heads", "keys", "ranks", "queries", "key"),
    [
        (9, 9, 2, "0 9", "0 9"),
        (9, 3, 2, "0 9", "None 0"),  # five and four heads, and every rank has all keys
        (9, 3, 3, "0 0", "0 0"),
        (8, 2, 4, "0 0", "None 0"),
        (12, 3, 2, "0 0", "None 0"),
        (6, 3, 3, "0 0", "0 0"),
        (5, 5, 4, "0 0", "0 0"),  # eight would be too many for five: cut through heads
    ],
)
def test_heads_that_do_not_divide(heads: int, keys: int, ranks: int, queries: str, key: str) -> None:
    _, plan, _ = resolved(Decoder(heads, keys), ranks)
    cut = {name: f"{sharding.dim} {sharding.units}" for name, sharding in plan.parameters.items()}
    assert (cut["q.weight"], cut["q.bias"], cut["k.weight"], cut["v.bias"]) == (queries, queries, key, key)
    assert cut["out.weight"] == "1 " + queries.split()[1]


def test_what_is_padded_or_stays_whole_is_said() -> None:
    _, plan, _ = resolved(Decoder(9, 3), 2)
    assert plan.notes[0] == "k.weight stays whole: 3 heads over 2 ranks"
    assert "q.weight: 36 at dim 0 in 9 units over 2 ranks, so it is padded" in plan.notes
    assert "head.weight: 51 at dim 0 over 2 ranks, so it is padded" in plan.notes
    assert plan.parameters["q.weight"].local_shape == (5 * CHANNELS, 36)


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize(("heads", "keys", "fused", "grouped", "ranks"), [
    (9, 9, False, False, 2),
    (9, 3, False, False, 2),
    (9, 3, False, True, 2),
    (9, 3, True, False, 2),
    (9, 9, True, False, 4),
    (4, 2, False, True, 3),
])  # fmt: skip
def test_results_equal_one_device(
    heads: int, keys: int, fused: bool, grouped: bool, ranks: int, decomposed: bool
) -> None:
    torch.manual_seed(0)
    model = Decoder(heads, keys, fused, grouped)
    blocks: dict[str, Any] = {"qkv": Fused("colwise", tuple(model.sizes))} if fused else APART
    exported, plan, tokens = resolved(model, ranks, {**PLAN, **blocks})
    if decomposed:
        exported = exported.run_decompositions()
    split = localize(exported, plan, ranks, "tp", Request())
    for (found,) in run_ranks(split, exported.state_dict, [tokens]):
        torch.testing.assert_close(found, model(tokens))
    gathered = [said.detail for said in split.verdicts if said.reason == "gathered"]
    assert len(gathered) == 1, "of the logits alone"
