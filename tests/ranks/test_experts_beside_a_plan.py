"""Experts spread over ranks beside a plan that splits what is in them: trained equal to one device, saved, loaded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import DTensor

import crossfade as cf
from tests.ranks.expert_cases import language_model, word_loss, words
from tests.ranks.test_experts_on_ranks import OPTIMIZERS, train

PLAN: dict[str, Any] = {
    "token": "rowwise",
    "layers.*.gate_up": cf.Fused("colwise", blocks=2),
    "layers.*.down": "rowwise",
    "layers.*.expert_gate_up": cf.Fused("colwise", blocks=2),
    "layers.*.expert_down": "rowwise",
}
ROUTED = {name: style for name, style in PLAN.items() if "expert" in name}
DENSE = {name: style for name, style in PLAN.items() if "expert" not in name}

WORST = {"sgd": 2e-6, "adamw": 1e-4}
"""How far parameters may be apart: AdamW makes updates of 1e-3 of gradients as small as what sums round off."""


def train_beside(name: str, mesh: dict[str, int], plan: Any, optimizer: str, options: dict[str, Any]) -> dict[str, Any]:
    """As `train`, split by a plan, or by that of the library."""
    chosen = plan or cf.Plan.from_model(language_model(name)[0])
    return train(name, mesh, optimizer, {"tensor_parallel": chosen, **options})


def _case(name: str, mesh: dict[str, int], plan: Any = None, *, ci: bool = False, **options: Any) -> Any:
    optimizer = options.pop("optimizer", "adamw")
    marks = () if ci else (pytest.mark.models,)
    size = len(plan or ())
    return pytest.param(
        name, mesh, plan, optimizer, options, marks=marks, id=f"{name} {mesh} {size} {optimizer} {options}"
    )


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "mesh", "plan", "optimizer", "options"),
    [
        _case("words", {"ep": 2, "tp": 2}, PLAN, ci=True),
        _case("words", {"tp": 2, "ep": 2}, DENSE, optimizer="sgd"),
        _case("words", {"ep": 2, "tp": 2}, ROUTED, optimizer="sgd", accumulate=2),
        _case("words", {"ep": 2, "tp": 2}, PLAN, optimizer="sgd", machine="ethernet-1gbit"),
        _case("words", {"dp": 2, "ep": 2, "tp": 2}, PLAN),
        *(
            _case(name, {"ep": 2, "tp": 2}, optimizer=optimizer)
            for name in ("mixtral", "qwen2_moe", "olmoe", "deepseek_v3")
            for optimizer in ("adamw", "sgd")
        ),
    ],
)
def test_experts_beside_a_plan_equal_one_device(
    ranks: Any, name: str, mesh: dict[str, int], plan: Any, optimizer: str, options: dict[str, Any]
) -> None:
    for trained in ranks(math.prod(mesh.values())).run(train_beside, name, mesh, plan, optimizer, options, timeout=400):
        assert trained["losses"] == pytest.approx(trained["expected"], rel=1e-5)
        assert trained["worst"] < WORST[optimizer]
        assert trained["split"] == (2 if name == "deepseek_v3" else 4)  # whose first layer has no experts
        assert trained["shares"] == {1 / mesh["ep"]}
        assert trained["facts"]["experts"] == f"{trained['split']} parameters over ep={mesh['ep']}"
        assert " parameters over tp" in trained["facts"]["split by the plan"]


def begun(mesh: dict[str, int] | None, seed: int = 0) -> cf.Step:
    """A step of the model of words; with an axis `tp`, by the plan."""
    model = words(seed)[0]
    by_plan = {"tensor_parallel": PLAN} if mesh and "tp" in mesh else {}
    return cf.compile_step(model, word_loss, OPTIMIZERS["adamw"](model), mesh, timeout=60, **by_plan)


def save_and_load(folder: str, meshes: list[dict[str, int] | None]) -> dict[str, Any]:
    """Trained for a step, saved, and from there on elsewhere: losses as one device has them."""
    alone, batches = words()
    expected, optimizer = [], OPTIMIZERS["adamw"](alone)
    for tokens, labels in batches:
        (loss := word_loss(alone(tokens), labels)).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    spread = begun({"ep": 2, "tp": 2})
    spread(*batches[0])
    spread.save(folder)
    state = spread.state_dict()["model"]
    elsewhere = []
    for mesh in meshes:
        step = begun(mesh, seed=1)
        if mesh == {"ep": 2, "tp": 2}:
            step.prepare(*batches[0])  # so that it is loaded into parts
        step.load(folder)
        elsewhere.append([float(step(*batch)) for batch in batches[1:]])
        step.close()
    return {
        "expected": expected[1:],
        "elsewhere": [*elsewhere, [float(spread(*batch)) for batch in batches[1:]]],
        "is whole": {name: value.shape for name, value in state.items()}
        == {name: value.shape for name, value in words()[0].state_dict().items()},
        "expert": str(state["layers.0.expert_down"].placements),
        "parts": sorted(
            name for name, value in state.items() if isinstance(value, DTensor) and value.device_mesh.ndim == 2
        ),
    }


@pytest.mark.ranks
@pytest.mark.parametrize(
    "meshes",
    [
        pytest.param([{"ep": 2, "tp": 2}], id="there"),
        pytest.param([None, {"ep": 4}, {"dp": 2, "tp": 2}, {"dp": 4}], marks=pytest.mark.models, id="elsewhere"),
    ],
)
def test_checkpoints_load_here_and_elsewhere(ranks: Any, tmp_path: Path, meshes: list[dict[str, int] | None]) -> None:
    for found in ranks(4).run(save_and_load, str(tmp_path / "checkpoint"), meshes, timeout=400):
        assert len(found["elsewhere"]) == len(meshes) + 1
        for losses in found["elsewhere"]:
            assert losses == pytest.approx(found["expected"], rel=1e-5)
        assert found["is whole"]
        assert found["expert"] == "(Shard(dim=0), Shard(dim=2))"
        both = ["expert_down", "expert_gate_up"]
        assert found["parts"] == [f"layers.{layer}.{name}" for layer in range(2) for name in both]
