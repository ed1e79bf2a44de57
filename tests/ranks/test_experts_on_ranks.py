"""Models whose experts are spread over ranks: trained equal to one device, saved, loaded elsewhere, or refused."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

import crossfade as cf
from crossfade.communicate.collective_matmul import IN_PIECES
from crossfade.communicate.exchange_regions import NO_PRODUCT
from crossfade.communicate.pipeline_all_to_alls import SLOWER, PipelineAllToAlls
from crossfade.compile.training_phases import TRAINING
from crossfade.errors import CrossfadeError
from crossfade.graph.in_pieces import ROWS
from tests.ranks.expert_cases import language_loss, language_model, routed, word_loss, words

CLIP = 0.5
OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
}


def started(name: str) -> tuple[nn.Module, Any, list[Any]]:
    """A model, its loss, and batches."""
    if name == "routed":
        model, batches = routed()
        return model, nn.functional.mse_loss, batches
    if name == "words":
        return words()[0], word_loss, words()[1]
    return language_model(name)[0], language_loss, language_model(name)[1]


def called(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def farthest(step: cf.Step, alone: nn.Module) -> float:
    """How far any parameter is from that of a model on one device."""
    with step.gathered() as whole:
        pairs = [(found, alone.get_parameter(name)) for name, found in whole.named_parameters()]
        return max(float((found - expected).detach().abs().max()) for found, expected in pairs)


def train(name: str, mesh: dict[str, int], optimizer: str, options: dict[str, Any]) -> dict[str, Any]:
    """Losses and norms of three steps, how far parameters are from one device's then, and what this rank holds."""
    model, loss_fn, batches = started(name)
    alone, _, _ = started(name)
    mine, theirs = OPTIMIZERS[optimizer](model), OPTIMIZERS[optimizer](alone)
    step = cf.compile_step(model, loss_fn, mine, mesh, clip_grad_norm=CLIP, timeout=60, **options)
    losses, expected = [], []
    for inputs, labels in batches:
        loss = step(inputs, labels)
        losses += [float(loss), float(step.outputs["grad_norm"])]
        loss = loss_fn(called(alone, inputs), labels)
        loss.backward()
        expected += [float(loss.detach()), float(clip_grad_norm_(alone.parameters(), CLIP))]
        theirs.step()
        theirs.zero_grad()
    split = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
    shares = {p.to_local().shape[0] / alone.get_parameter(name).shape[0] for name, p in split.items()}
    return {
        "losses": losses,
        "expected": expected,
        "worst": farthest(step, alone),
        "split": len(split),
        "shares": shares,
        "facts": step.report.facts,
        "exchanges": [
            verdict
            for record in step.report.records
            for verdict in record.verdicts
            if record.name == "pipeline-all-to-alls"
        ],
    }


def _case(name: str, mesh: dict[str, int], optimizer: str = "sgd", *, ci: bool = False, **options: Any) -> Any:
    marks = () if ci else (pytest.mark.models,)
    return pytest.param(name, mesh, optimizer, options, marks=marks, id=f"{name} {mesh} {optimizer} {options}")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "mesh", "optimizer", "options"),
    [
        _case("mixtral", {"ep": 2}),
        _case("routed", {"dp": 2, "ep": 2}, machine="ethernet-1gbit", ci=True),
        _case("routed", {"dp": 2, "ep": 2}, loss_is="mean", semantics="per-rank"),
        _case("routed", {"ep": 2}, accumulate=2),
        _case("routed", {"ep": 2}, machine="ethernet-1gbit"),
        _case("routed", {"ep": 2}, recompute={"first": "full"}),
        _case("mixtral", {"ep": 4}),
        _case("mixtral", {"dp": 2, "ep": 2}, "adamw"),
        _case("qwen2_moe", {"ep": 2}, "adamw"),
        _case("qwen2_moe", {"dp": 2, "ep": 2}),
        _case("olmoe", {"ep": 2}),
        _case("olmoe", {"ep": 4}, "adamw"),
        _case("deepseek_v3", {"ep": 2}),
        _case("deepseek_v3", {"dp": 2, "ep": 2}),
    ],
)
def test_spread_experts_equal_one_device(
    ranks: Any, name: str, mesh: dict[str, int], optimizer: str, options: dict[str, Any]
) -> None:
    for trained in ranks(math.prod(mesh.values())).run(train, name, mesh, optimizer, options):
        in_parts = "dp" in mesh or "accumulate" in options
        rounded = name == "routed" and in_parts  # gradients of parts of the batch, each rounded to bfloat16
        assert trained["losses"] == pytest.approx(trained["expected"], rel=2e-4 if rounded else 1e-5)
        assert trained["worst"] < (1e-3 if rounded else 1e-6 if optimizer == "sgd" else 1e-5)
        assert trained["split"] == (2 if name == "deepseek_v3" else 4)  # whose first layer has no experts
        assert trained["shares"] == {1 / mesh["ep"]}
        assert trained["facts"]["experts"] == f"{trained['split']} parameters over ep={mesh['ep']}"


def save_and_load(folder: str) -> dict[str, Any]:
    """Trained for a step with spread experts, saved, and from there on elsewhere; losses as one device has them."""
    batches, loss_fn = routed()[1], nn.functional.mse_loss
    alone = cf.compile_step(model := routed()[0], loss_fn, OPTIMIZERS["adamw"](model))
    expected = [float(alone(*batch)) for batch in batches]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    spread = cf.compile_step(model := routed()[0], loss_fn, OPTIMIZERS["adamw"](model), mesh)
    losses = [float(spread(*batches[0]))]
    spread.save(folder)
    whole = {name: tuple(value.shape) for name, value in spread.state_dict()["model"].items()}
    parts = {name for name, value in spread.state_dict()["model"].items() if isinstance(value, DTensor)}
    elsewhere = []
    for other in (None, {"dp": 2}, {"ep": 2}):
        step = cf.compile_step(model := routed(seed=1)[0], loss_fn, OPTIMIZERS["adamw"](model), other)
        if other == {"ep": 2}:
            step.prepare(*batches[0])  # so that it is loaded into parts
        step.load(folder)
        elsewhere.append([float(step(*batch)) for batch in batches[1:]])
        step.close()
    losses += [float(spread(*batch)) for batch in batches[1:]]
    shapes = {name: tuple(value.shape) for name, value in routed()[0].state_dict().items()}
    return {
        "losses": losses,
        "expected": expected,
        "elsewhere": elsewhere,
        "is whole": whole == shapes,
        "parts": sorted(parts),
    }


@pytest.mark.ranks
def test_checkpoints_load_elsewhere(ranks: Any, tmp_path: Path) -> None:
    for found in ranks(2).run(save_and_load, str(tmp_path / "checkpoint")):
        assert found["losses"] == pytest.approx(found["expected"], rel=1e-5)
        for losses in found["elsewhere"]:  # with dp, gradients of halves of the batch are rounded to bfloat16
            assert losses == pytest.approx(found["expected"][1:], rel=1e-4)
        assert found["is whole"]
        assert found["parts"] == ["first.down", "first.up", "second.down", "second.up"]


def gradients() -> tuple[list[float], list[float]]:
    """How far gradients that are handed over are from one device's, and how large those are."""
    (model, ((x, y), *_)), (alone, _) = routed(), routed()
    compiled = cf.compile_gradients(model, nn.functional.mse_loss, {"ep": 2}, timeout=60)
    compiled(x, y).backward()
    nn.functional.mse_loss(alone(x), y).backward()
    found = {name: p.grad.full_tensor() if isinstance(p, DTensor) else p.grad for name, p in model.named_parameters()}
    expected = {name: parameter.grad for name, parameter in alone.named_parameters()}
    return [float((found[name] - grad).abs().max()) for name, grad in expected.items()], [
        float(grad.abs().max()) for grad in expected.values()
    ]


@pytest.mark.ranks
def test_gradients_are_handed_over(ranks: Any) -> None:
    for apart, sizes in ranks(2).run(gradients):
        assert len(sizes) == 8
        assert all(distance < 1e-5 * size for distance, size in zip(apart, sizes, strict=True))


def refused() -> list[str]:
    """What each of several wishes is answered."""
    messages = []
    for model, mesh, options in (
        (nn.Linear(16, 16), {"ep": 2}, {}),
        (routed()[0], {"ep": 2}, {"data_parallel": "zero2"}),
        (routed()[0], {"ep": 2, "tp": 1, "dp_shard": 2}, {}),
        (routed(experts=3)[0], {"ep": 2}, {}),
        (Penalized(), {"ep": 2}, {}),
    ):
        optimizer = OPTIMIZERS["sgd"](model)
        try:
            cf.compile_step(model, nn.functional.mse_loss, optimizer, mesh, timeout=60, **options)(*routed()[1][0])
            messages.append("")
        except CrossfadeError as error:
            messages.append(str(error))
    return messages


class Penalized(nn.Module):
    """Uses the matrices of all experts at once, beside what experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = routed()[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.layers.first.up.square().mean()


@pytest.mark.ranks
def test_what_cannot_be_spread_says_so(ranks: Any) -> None:
    for none, rows, axes, three, penalized in ranks(2).run(refused):
        assert "a Linear in which no experts are found" in none
        assert "grouped_mm" in none.partition("Remedy")[2]
        assert "data_parallel='zero2' together with a mesh axis ep" in rows
        assert "beside ep only dp" in axes
        assert "3 experts (first.up) over 2 ranks" in three
        assert "uses the matrices of all experts at once" in penalized


def train_in_pieces() -> dict[str, Any]:
    """As `train`, with what comes back from experts in pieces: for a model so small, not by itself."""
    options = {"machine": "ethernet-1gbit"}
    weighed = train("routed", {"ep": 2}, "sgd", options)
    known = [verdict for verdict in weighed["exchanges"] if verdict.reason == SLOWER]
    chosen = tuple((verdict.subject, "before", ROWS_HERE, 2) for verdict in known)
    phases = TRAINING.replace_pass("pipeline-all-to-alls", PipelineAllToAlls(chosen=chosen))
    trained = train("routed", {"ep": 2}, "sgd", {**options, "phases": phases})
    return {**trained, "weighed": weighed["exchanges"]}


ROWS_HERE = 16
"""A rank's half of 16 samples, each to two experts."""


@pytest.mark.ranks
def test_what_comes_back_from_experts_travels_in_pieces(ranks: Any) -> None:
    for trained in ranks(2).run(train_in_pieces):
        assert trained["losses"] == pytest.approx(trained["expected"], rel=1e-5)
        assert trained["worst"] < 1e-6
        assert Counter(verdict.reason for verdict in trained["weighed"]) == {SLOWER: 5, NO_PRODUCT: 2, ROWS: 2}
        assert sum(verdict.reason == IN_PIECES for verdict in trained["exchanges"]) == 3
