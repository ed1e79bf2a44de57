"""Placements of inputs and outputs, by name and position: read, and refused where they do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import tensor
from torch.export import ExportedProgram

from crossfade.errors import PlanError
from crossfade.shard.tensor.borders import input_placements, output_placements, read_placement
from crossfade.shard.tensor.placements import PARTIAL, REPLICATE, Shard


class Model(torch.nn.Module):
    def forward(self, x: torch.Tensor, times: int) -> tuple[torch.Tensor, torch.Tensor]:
        return x * times, x.sum()


@pytest.fixture(scope="module")
def exported() -> ExportedProgram:
    return torch.export.export(Model(), (torch.ones(4, 6), 3))


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (tensor.Shard(-1), Shard(1)),
        (Shard(0, outer=2), Shard(0, outer=2)),
        (Shard(-2, sizes=(2, 2)), Shard(0, sizes=(2, 2))),
        (tensor.Replicate(), REPLICATE),
        (tensor.Partial(), PARTIAL),
    ],
)
def test_placements_of_torch_and_ours(given: Any, found: Any):
    assert read_placement(given, 2) == found


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (tensor.Shard(2), "does not fit a value of 2 dims: expected a dim it has"),
        (tensor.Partial("avg"), r"is no placement: expected Shard\(dim\) or Replicate\(\)"),
        ("rows", "'rows' is no placement"),
    ],
)
def test_others_are_refused(given: Any, message: str):
    with pytest.raises(PlanError, match=message):
        read_placement(given, 2)


def test_inputs_by_name_and_outputs_by_position(exported: ExportedProgram):
    assert input_placements(exported, {"x": Shard(1)}, 3) == {"x": Shard(1)}
    assert output_placements(exported, {-2: Shard(0), 1: REPLICATE}, 2) == {0: Shard(0), 1: REPLICATE}


@pytest.mark.parametrize(
    ("given", "ranks", "message"),
    [
        ({"y": Shard(0)}, 2, "no input is named 'y': expected one of x, times"),
        ({"x": PARTIAL}, 2, "the input x cannot be partial sums"),
        ({"times": Shard(0)}, 2, "the input times is no tensor and cannot be split on dim 0"),
        ({"x": Shard(0)}, 3, r"the input x of shape \(4, 6\) cannot be split on dim 0 over 3 ranks"),
    ],
)
def test_inputs_that_cannot_lie_so(exported: ExportedProgram, given: Any, ranks: int, message: str):
    with pytest.raises(PlanError, match=message):
        input_placements(exported, given, ranks)


@pytest.mark.parametrize("position", [2, -3, "0"])
def test_positions_that_no_output_has(exported: ExportedProgram, position: Any):
    with pytest.raises(PlanError, match=f"no output {position!r} exists: expected a position from 0 to 1"):
        output_placements(exported, {position: REPLICATE}, 2)
