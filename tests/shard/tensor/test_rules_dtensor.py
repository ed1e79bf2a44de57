"""What our rules say beside what DTensor does for the same placements; where they differ is listed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import tensor as dtensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._pytree import tree_map_only

from crossfade.shard.tensor.placements import PARTIAL, REPLICATE, Partial, Placement, Shard
from tests.shard.tensor.one_operator import OneOperator, tensors_of
from tests.shard.tensor.rule_cases import Case, case, f, n

aten = torch.ops.aten
CASES = {
    "linear": case(aten.linear.default, f(8, 8, 16), f(8, 16), goes=""),
    "matmul": case(aten.matmul.default, f(8, 8), f(8, 16), goes=""),
    "bmm": case(aten.bmm.default, f(8, 8, 8), f(8, 8, 8), goes=""),
    "view": case(aten.view.default, f(8, 8, 32), [8, 8, 4, 8], goes=""),
    "permute": case(aten.permute.default, f(8, 8, 8), [2, 0, 1], goes=""),
    "softmax": case(aten.softmax.int, f(8, 8), -1, goes=""),
    "layer_norm": case(aten.layer_norm.default, f(8, 8, 8), [8], f(8), f(8), goes=""),
    "embedding": case(aten.embedding.default, f(16, 8), n(16, 8, 8), goes=""),
}
DIFFERENT = {
    "linear": {
        "a partial sum, replicated": ("communicates", "gives a partial sum"),
        "replicated, a partial sum": ("communicates", "gives a partial sum"),
    },
    "layer_norm": {
        f"split on dim 2, {weight}, {bias}": ("gives split on dim 2", "communicates")
        for weight in ("replicated", "split on dim 0")
        for bias in ("replicated", "split on dim 0")
    },
}
if torch.__version__ < "2.12":  # flattens what is split there
    DIFFERENT["linear"]["split on dim 1, replicated"] = ("gives split on dim 1", "communicates")
"""A partial sum is reduced before a linear layer: the gradient of a whole weight would be one as well, and reduced.
Of a norm over a split dim only the statistics are reduced."""


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def ways(value: Tensor) -> list[Placement]:
    sums = [PARTIAL] if value.is_floating_point() else []
    return [REPLICATE, *map(Shard, range(value.dim())), *sums]


def theirs(tried: Case, places: Any, mesh: DeviceMesh) -> tuple[Placement, int]:
    """The placement of DTensor's result, and how often it communicates."""
    given = iter(places)
    args = tree_map_only(Tensor, lambda value: _placed(value, next(given), mesh), tried.args)
    try:
        with CommDebugMode() as seen:
            result = tried.target(*args)
    except RuntimeError as error:  # torch 2.11 refuses where it would have to communicate for a view
        if "without redistribution" not in str(error):
            raise
        return REPLICATE, 1
    (place,) = result.placements
    return _ours(place), seen.get_total_counts()


def _placed(value: Tensor, place: Placement, mesh: DeviceMesh) -> Tensor:
    if isinstance(place, Shard):
        return dtensor.DTensor.from_local(value.chunk(2, place.dim)[0].contiguous(), mesh, [dtensor.Shard(place.dim)])
    kind = dtensor.Partial() if isinstance(place, Partial) else dtensor.Replicate()
    return dtensor.DTensor.from_local(value, mesh, [kind])


def _ours(place: Any) -> Placement:
    if isinstance(place, dtensor.Shard):
        return Shard(place.dim)
    return PARTIAL if place.is_partial() else REPLICATE


@pytest.mark.parametrize("name", CASES)
def test_ours_and_dtensors(mesh: DeviceMesh, name: str):
    """For every placement of the operands: who communicates, and otherwise what the result is."""
    tried, found = CASES[name], {}
    for places in product(*map(ways, tensors_of(tried.args, {}))):
        decision = OneOperator(tried.target, tried.args, {}, places, 2).decision()
        moved = any(place not in (want, REPLICATE) for place, want in zip(places, decision.wants, strict=True))
        ours, other = _said(decision.results[0], moved), _said(*theirs(tried, places, mesh))
        if ours != other:
            found[", ".join(map(str, places))] = ours, other
    assert found == DIFFERENT.get(name, {})


def _said(place: Placement, moved: int) -> str:
    return "communicates" if moved else f"gives {place}"
