"""The plans that models of the transformers library bring along: all of their strings, on all architectures we have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from crossfade.errors import PlanError
from crossfade.shard.tensor.plan import Plan
from crossfade.shard.tensor.plan_styles import REFUSED, STRINGS
from tests.models import zoo
from tests.models.choice import some


def model_with(plan: dict[str, str] | None, base_plan: dict[str, str] | None = None) -> nn.Module:
    model = nn.Module()
    model.model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    model.tp_plan, model.base_model_prefix = plan, "model"
    model.config = SimpleNamespace(base_model_tp_plan=base_plan)
    return model


def test_the_whole_models_plan_comes_first() -> None:
    plan = Plan.from_model(model_with({"model.0": "colwise"}, base_plan={"1": "rowwise"}))
    assert plan == Plan({"model.0": "colwise"})


def test_the_configurations_plan_names_what_is_in_the_base_model() -> None:
    assert Plan.from_model(model_with(None, base_plan={"*": "colwise"})) == Plan({"model.*": "colwise"})


def test_what_names_nothing_or_cannot_be_said_is_left_out_and_noted() -> None:
    plan = Plan.from_model(model_with({"model.0": "colwise", "model.2": "colwise", "model.1": "megamoe_experts"}))
    assert plan == Plan({"model.0": "colwise"})
    assert plan.notes == (
        "model.2: colwise left out: the model has nothing of that name",
        f"model.1: megamoe_experts left out: {REFUSED['megamoe_experts']}",
    )


class TwoLayers(nn.Module):
    """Two layers of two halves, of which a plan may name some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer["down"](layer["up"](x).relu())
        return x


@pytest.mark.parametrize(
    ("own", "filled"),
    [
        ({}, {"layers.*.up": "colwise", "layers.*.down": "rowwise"}),
        (
            {"layers.0.up": "colwise", "layers.0.down": "rowwise"},
            {
                "layers.0.up": "colwise",
                "layers.0.down": "rowwise",
                "layers.1.up": "colwise",
                "layers.1.down": "rowwise",
            },
        ),
        (
            {"layers.*.up": "replicate", "layers.*.down": "rowwise"},
            {"layers.*.up": "replicate", "layers.*.down": "rowwise"},
        ),
    ],
)
def test_what_a_plan_does_not_name_is_filled_from_the_graph(own: dict[str, str], filled: dict[str, str]) -> None:
    exported = torch.export.export(TwoLayers(), (torch.ones(2, 4),))
    plan = Plan(own).filled(exported)
    assert plan == Plan(filled)
    assert all(
        sharding.dim is not None
        for name, sharding in plan.resolve(exported, 2).parameters.items()
        if name.endswith("down.weight")
    )


@pytest.mark.parametrize("name", some(["gpt_oss", "qwen2_moe", "deepseek_v3"]))
def test_plans_of_the_library_are_filled(name: str) -> None:
    architecture = zoo.architecture(name)
    exported = architecture.export()
    own = Plan.from_model(architecture.build())
    filled = own.filled(exported, vocab=True)
    counts = [
        sum(sharding.bytes for sharding in plan.resolve(exported, 2).parameters.values() if sharding.dim is not None)
        for plan in (own, filled, Plan.megatron(exported, vocab=True))
    ]
    assert counts[0] < counts[1] and counts[1] >= 0.95 * counts[2]


def test_a_model_without_a_plan_is_told_what_to_do() -> None:
    with pytest.raises(PlanError, match=r"Module has no tensor-parallel plan.*Plan\.megatron"):
        Plan.from_model(model_with(None))


def test_every_string_of_the_library_is_known() -> None:
    pytest.importorskip("transformers")
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

    assert set(ALL_PARALLEL_STYLES.keys()) - set(STRINGS) - set(REFUSED) == set()


WITH_PLAN = {
    "llama": 16,
    "mistral": 16,
    "qwen2": 22,
    "qwen3": 16,
    "gemma2": 15,
    "gemma3": 15,
    "phi3": 10,
    "phi": 23,
    "starcoder2": 21,
    "olmo2": 16,
    "granite": 16,
    "granite_swa": 17,
    "gpt_neox": 13,
    "mixtral": 14,
    "olmoe": 14,
    "qwen2_moe": 20,
    "deepseek_v3": 10,
    "gpt_oss": 1,
}
"""The architectures that have a plan, and how many parameters it splits."""


@pytest.mark.parametrize("name", some(WITH_PLAN))
def test_plans_of_real_models(name: str) -> None:
    pytest.importorskip("transformers")
    from tests.models.zoo import architecture

    chosen = architecture(name)
    model = chosen.build()
    plan = Plan.from_model(model)
    assert all("nothing of that name" in note for note in plan.notes)
    found = plan.resolve(chosen.export(), ranks=2)
    split = [entry for entry in found.parameters.values() if entry.dim is not None]
    assert len(split) == WITH_PLAN[name]
    assert not any(entry.units for entry in split)
    whole = {id(tensor): tensor.numel() for tensor in model.parameters()}
    assert sum(whole.values()) == sum(torch.Size(entry.shape).numel() for entry in found.parameters.values())


def test_architectures_without_a_plan_are_told_so() -> None:
    pytest.importorskip("transformers")
    from tests.models.zoo import ARCHITECTURES

    without = [known for known in ARCHITECTURES if known.name not in WITH_PLAN]
    for chosen in without:
        with pytest.raises(PlanError, match="has no tensor-parallel plan"):
            Plan.from_model(chosen.build())


def test_experts_of_mixtral() -> None:
    pytest.importorskip("transformers")
    from tests.models.zoo import architecture

    chosen = architecture("mixtral")
    found = Plan.from_model(chosen.build()).resolve(chosen.export(), ranks=2)
    experts = "model.layers.0.mlp.experts"
    gate_up, down = found.parameters[f"{experts}.gate_up_proj"], found.parameters[f"{experts}.down_proj"]
    assert (gate_up.dim, gate_up.blocks, down.dim, down.blocks) == (1, (128, 128), 2, ())
    assert found.boundaries[experts].output == "replicate"
