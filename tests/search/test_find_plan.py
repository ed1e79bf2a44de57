"""Plans that are found: what is tried, what is taken, and what is said of the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import crossfade as cf
from crossfade.cost.presets import preset
from crossfade.errors import BatchError, CrossfadeError, MachineError, MemoryLimitError, MeshError
from tests.forecast.models import Tower, tokens

MESHES = [{"dp": 4}, {"dp": 2, "tp": 2}, {"tp": 4}, {"dp_replicate": 2, "dp_shard": 2}]


def model_of(width: int = 32, layers: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.device("meta"):
        model = Tower(layers, width)
    return model, torch.optim.AdamW(model.parameters())


def found(**options: object) -> cf.FoundPlan:
    model, optimizer = model_of()
    given = {"ranks": 4, "machine": "ethernet-1gbit", "told": lambda *_: None} | options
    return cf.find_plan(model, None, optimizer, tokens(8), **given)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plan() -> cf.FoundPlan:
    return found(in_full=True)


def test_every_mesh_and_mode_is_a_row_and_the_fastest_comes_first(plan: cf.FoundPlan) -> None:
    assert [mesh for mesh in MESHES if not any(row.candidate.mesh == mesh for row in plan.rows)] == []
    tried = {(str(row.candidate.mesh), row.candidate.mode) for row in plan.rows}
    assert {mode for mesh, mode in tried if mesh == str({"dp": 4})} == {"replicate", "zero1", "zero2", "zero3"}
    seconds = [row.figures.seconds for row in plan.rows if row.figures is not None]
    assert seconds == sorted(seconds)
    assert not plan.best.why_not and all(row.why_not for row in plan.rows[1:])


def test_the_call_is_python_that_compiles_the_best(plan: cf.FoundPlan) -> None:
    asked: dict[str, object] = {}
    stand_in = type("cf", (), {"compile_step": staticmethod(lambda *given, **options: asked.update(options))})
    exec(plan.call, {"cf": stand_in, "model": 0, "loss_fn": 0, "optimizer": 0})
    assert asked["mesh"] == plan.best.candidate.mesh
    assert asked["machine"] == "ethernet-1gbit"


def test_the_table_says_why_each_loser_lost(plan: cf.FoundPlan) -> None:
    lines = str(plan).splitlines()
    assert lines[0].startswith("Tower on 4 ranks of ethernet-1gbit")
    assert sum("longer: " in line for line in lines) == len([row for row in plan.rows if row.figures]) - 1
    assert lines[-1] == ")"


@pytest.mark.models  # it takes a minute
def test_less_memory_takes_another_plan(plan: cf.FoundPlan) -> None:
    needed = [row.figures.memory for row in plan.rows if row.figures is not None]
    limit = (min(needed) + plan.rows[0].figures.memory) // 2  # type: ignore[union-attr]
    lean = found(memory=limit)
    assert lean.best.figures is not None and lean.best.figures.memory <= limit
    lost = next(row for row in lean.rows if row.candidate == plan.best.candidate)
    assert lost.why_not.startswith("lacks ")


def test_nothing_fits_tells_the_least_memory_that_would() -> None:
    with pytest.raises(MemoryLimitError, match=r"none of .* fits 1,000 bytes: expected at least .*Remedy") as caught:
        found(memory=1000, ranks=2)
    assert found(memory=caught.value.least, ranks=2).best.figures.memory <= caught.value.least  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"memory": -1}, CrossfadeError, "memory=-1: expected bytes"),
        ({"memory": "80 gigs"}, CrossfadeError, "memory='80 gigs'"),
        ({"memory": True}, CrossfadeError, "memory=True"),
        ({"ranks": 0}, MeshError, "ranks=0"),
        ({"machine": "h10"}, MachineError, "no machine named 'h10'"),
        ({"accumulate": (0,)}, BatchError, "accumulate"),
    ],
)
def test_what_cannot_be_searched_for_is_refused(options: dict[str, object], kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        found(**options)


def test_ranks_that_divide_neither_the_batch_nor_the_heads_split_the_model() -> None:
    assert found(ranks=5).best.candidate.mesh == {"tp": 5}


def test_a_batch_that_is_no_tuple_is_refused() -> None:
    model, optimizer = model_of()
    with pytest.raises(BatchError, match="a batch of type Tensor: expected a tuple"):
        cf.find_plan(model, None, optimizer, torch.zeros(8), ranks=2)  # type: ignore[arg-type]


def test_a_machine_of_ones_own_is_the_readers_variable() -> None:
    import dataclasses

    mine = dataclasses.replace(preset("ethernet-1gbit"), overhead=2e-6)
    model, optimizer = model_of()
    assert "machine=machine," in cf.find_plan(model, None, optimizer, tokens(2), ranks=1, machine=mine).call
