"""Trained by Crossfade equals trained by eager torch: on one device bitwise, on ranks within stated tolerance."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models.choice import some
from tests.ranks.cases import (
    CASES,
    OPTIMIZERS,
    Trained,
    train_crossfade,
    train_crossfade_on_ranks,
    train_ddp,
    train_eager,
)

# Sums over ranks add the same float32 numbers in another order: relative differences near 1e-7 a step, which training
# carries on. bfloat16 gradients are rounded to 8 bits before they are summed, in parts that differ by rank.
TOLERANCE = {"default": (2e-5, 2e-6), "bf16 autocast": (5e-2, 3e-2)}


def differences(a: Trained, b: Trained, rtol: float, atol: float) -> list[str]:
    """Names of everything that differs by more than the tolerance (0 for bitwise)."""
    pairs: dict[str, tuple[Any, Any]] = {f"model {k}": (a.model[k], b.model[k]) for k in a.model}
    states = a.optimizer["state"], b.optimizer["state"]
    assert states[0].keys() == states[1].keys()
    for index in states[0]:
        assert {k for k, v in states[0][index].items() if v is not None} == states[1][index].keys()
        pairs |= {f"state {index} {k}": (states[0][index][k], v) for k, v in states[1][index].items()}
    pairs["losses"] = torch.tensor(a.losses), torch.tensor(b.losses)
    return [k for k, (x, y) in pairs.items() if not torch.allclose(x, y, rtol=rtol, atol=atol)]


@pytest.mark.parametrize("name", CASES)
def test_one_device_is_bitwise_eager(name: str) -> None:
    """But for recurrent layers, where eager torch uses oneDNN's fused kernel and the captured step ATen's own."""
    tolerance = TOLERANCE["default"] if "lstm" in name else (0, 0)
    assert differences(train_eager(name), train_crossfade(name), *tolerance) == []


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_is_bitwise_eager(optimizer: str) -> None:
    assert differences(train_eager("mlp", optimizer=optimizer), train_crossfade("mlp", optimizer=optimizer), 0, 0) == []


def test_clipping_is_bitwise_eager() -> None:
    eager = train_eager("mlp", clip=0.1)
    assert differences(eager, train_crossfade("mlp", clip_grad_norm=0.1), 0, 0) == []
    assert differences(eager, train_eager("mlp"), 0, 0) != []


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "count"),
    [(name, 2) for name in CASES]
    + some(((name, 4) for name in CASES), often=("mlp", "tied weights", "cnn with batch norm", "bf16 autocast")),
)
def test_ranks_equal_one_device(ranks: Any, name: str, count: int) -> None:
    rtol, atol = TOLERANCE.get(name, TOLERANCE["default"])
    eager = train_eager(name)
    options = {"loss_is": "sum"} if name == "summed loss" else {}
    everywhere = ranks(count).run(train_crossfade_on_ranks, name, count, options)
    for trained in everywhere:
        assert differences(eager, trained, rtol, atol) == []
        assert differences(everywhere[0], trained, 0, 0) == []
        assert trained.extra["captures"] == 1


@pytest.mark.ranks
@pytest.mark.parametrize(
    "options",
    [{"clip_grad_norm": 0.1, "batch": "local"}, {"accumulate": 2, "optimizer": "foreach adamw"}],
    ids=lambda options: " and ".join(options),
)
def test_ranks_equal_one_device_with(ranks: Any, options: dict[str, Any]) -> None:
    reference = {"clip": options.get("clip_grad_norm"), "accumulate": options.get("accumulate", 1)}
    eager = train_eager("mlp", optimizer=options.get("optimizer", ""), **reference)
    for trained in ranks(2).run(train_crossfade_on_ranks, "mlp", 2, options):
        assert differences(eager, trained, 2e-5, 2e-6) == []


@pytest.mark.ranks
def test_accumulation_with_dropout_and_batch_norm_means_the_same_on_ranks(ranks: Any) -> None:
    for name in ("gpt with dropout", "cnn with batch norm"):
        eager = train_eager(name, accumulate=2)
        for trained in ranks(2).run(train_crossfade_on_ranks, name, 2, {"accumulate": 2}):
            assert differences(eager, trained, 2e-5, 2e-6) == []


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["mlp", "tied weights", "gpt with dropout", "cnn with batch norm", "bf16 autocast"])
def test_two_ranks_with_per_rank_semantics_are_bitwise_ddp(ranks: Any, name: str) -> None:
    """Two addends have one sum, and halving is exact: nothing is left to differ from DDP."""
    ddp, _ = ranks(2).run(train_ddp, name, 2)  # DDP's other rank has buffers of its own until the next forward
    options = {"semantics": "per-rank", "batch": "local"}
    for trained in ranks(2).run(train_crossfade_on_ranks, name, 2, options):
        ddp.losses = trained.losses  # DDP's are each rank's own
        assert differences(ddp, trained, 0, 0) == []
