"""The same on two ranks: DDP, FSDP2, DTensor and SimpleFSDP, equal to a plain model trained on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from crossfade import Ranks
from tests.integrations import compiled
from tests.integrations.compiled import EAGERLY, needs_compiler

pytestmark = pytest.mark.ranks

NONE: dict[str, int] = {}
PARTS = [("forward", {"all_gather": 29}, {"all_gather": 1}), ("backward", {"reduce_scatter": 29}, {"all_to_all": 1})]
SUMS = [(phase, {"all_reduce": 2}, {"all_reduce": 2}) for phase in ("forward", "backward")]


def check(ranks: Callable[[int], Ranks], *given: Any, **dynamo: Any) -> list[Any]:
    """Train on two ranks, compare with one device, and return what became of collectives on the first rank."""
    wrapper, kind, how, width, sizes = given
    model, batches = compiled.built(kind, width, sizes)
    compiled.train(model, model, batches)
    found = ranks(2).run(compiled.trained_on_ranks, wrapper, kind, how, width, sizes, **dynamo)
    for state, _ in found:
        torch.testing.assert_close(state, compiled.weights(model), rtol=1e-3, atol=1e-4)
    return found[0][1]


@pytest.mark.parametrize(
    ("wrapper", "width", "expected"),
    [
        ("ddp", 128, [(phase, NONE, NONE) for phase in ("forward", "forward", "backward", "backward")]),
        ("fsdp", 16, [(phase, NONE, NONE) for phase in ("forward", "backward")]),
        ("tensor-parallel", 16, SUMS),
        ("simple-fsdp", 16, PARTS),
    ],
)
def test_C5_a_transformer(ranks: Callable[[int], Ranks], wrapper: str, width: int, expected: list[Any]) -> None:
    assert check(ranks, wrapper, "transformer", EAGERLY, width, (4, 4, 4)) == expected


@needs_compiler
def test_by_inductor(ranks: Callable[[int], Ranks]) -> None:
    found = check(ranks, "simple-fsdp", "perceptron", {}, 16, (4, 4, 4))
    assert found == [
        ("forward", {"all_gather": 6}, {"all_gather": 1}),
        ("backward", {"reduce_scatter": 6}, {"all_to_all": 1}),
    ]


def test_gathers_stay_bucketed_for_any_size_of_batch(ranks: Callable[[int], Ranks]) -> None:
    found = check(ranks, "simple-fsdp", "perceptron", EAGERLY, 16, (4, 8, 12))
    assert [after for _, _, after in found] == [{"all_gather": 1}, {"all_to_all": 1}] * 2


def test_a_graph_that_is_no_program_is_left_to_torch(ranks: Callable[[int], Ranks]) -> None:
    for total, verdicts in ranks(2).run(compiled.not_waited_for):
        torch.testing.assert_close(total, torch.full((2,), 4.0))
        assert len(verdicts) == 1
        assert verdicts[0].startswith("graph: left alone: compiled without our passes: in the graph given: all_reduce")


def test_nothing_is_packed_by_sizes_that_are_symbols(ranks: Callable[[int], Ranks]) -> None:
    for found in ranks(2).run(compiled.with_symbolic_sizes):
        ((after, reasons),) = found
        assert after == {"all_reduce": 2}
        assert "sizes in its graph are symbols, and ranks may have compiled it at different ones" in reasons
