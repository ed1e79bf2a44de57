"""Optimizers beyond Adam on two ranks: as one device trains with them, where that can be; refused where it cannot."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import crossfade as cf
from crossfade.errors import CrossfadeError
from tests.capture.test_any_optimizer import OF_TORCH
from tests.capture.written_optimizers import Counting, Lamb, Lion, Rooted, SkipsFirst, Slow

STEPS = 6


class Scaled(nn.Module):
    """Rows that two ranks do not share evenly, and a single number."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, width), nn.Linear(width, 3)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) * self.scale)


MAKE: dict[str, Callable[[nn.Module], Optimizer]] = {
    "rmsprop": OF_TORCH["rmsprop-centered"],
    "adagrad": OF_TORCH["adagrad"],
    "nadam": OF_TORCH["nadam"],
    "radam": OF_TORCH["radam"],
    "asgd": OF_TORCH["asgd"],
    "rprop": OF_TORCH["rprop"],
    "dampened": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.5),
    "lion": lambda m: Lion(m.parameters(), lr=0.01, decay=0.1),
    "counting": lambda m: Counting(m.parameters()),
    "slow": lambda m: Slow(m.parameters()),
    "skips first": lambda m: SkipsFirst(m.parameters()),
    "adafactor": OF_TORCH["adafactor"],
    "lamb": lambda m: Lamb(m.parameters()),
    "rooted": lambda m: Rooted(m.parameters()),
}
NEEDS_WHOLE = ("adafactor", "lamb", "rooted")


def begin(name: str, seed: int = 0, width: int = 7) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(seed)
    model = Scaled(width)
    return model, MAKE[name](model)


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(5)
    return [(torch.randn(8, 5), torch.randn(8, 3)) for _ in range(STEPS)]


def whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, Tensor) else value


def everything(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    found = {name: whole(parameter) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found |= {f"{name}:{key}": whole(value) for key, value in optimizer.state.get(parameter, {}).items()}
    return found


def on_one_device(name: str, width: int = 7) -> dict[str, Any]:
    model, optimizer = begin(name, width=width)
    for inputs, target in batches():
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), target).backward()
        optimizer.step()
    return everything(model, optimizer)


def compiled(name: str, options: dict[str, Any], seed: int = 0) -> cf.Step:
    model, optimizer = begin(name, seed)
    return cf.compile_step(model, nn.functional.mse_loss, optimizer, {"dp": 2}, timeout=60.0, **options)


def train(names: list[str], options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = {}
    for name in names:
        step = compiled(name, options)
        for batch in batches():
            step(*batch)
        found[name] = everything(step.model, step.optimizer)
        step.close()
    return found


def refusals(names: list[str], options: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name in names:
        step = compiled(name, options)
        try:
            step(*batches()[0])
        except CrossfadeError as error:
            found[name] = str(error)
        step.close()
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any], name: str) -> None:
    assert found.keys() == expected.keys(), name
    for key, value in expected.items():
        torch.testing.assert_close(
            found[key], value, rtol=1e-4, atol=2e-6, msg=lambda text, key=key: f"{name}, {key}: {text}"
        )


OFTEN = {
    "replicate": ("dampened", "counting", *NEEDS_WHOLE),
    "zero1": ("radam", "rprop", "lion", "slow"),
    "zero3": ("adagrad", "asgd", "dampened", "counting", "slow", "skips first"),
}
CHOSEN = [
    pytest.param(mode, name, marks=() if name in OFTEN[mode] else (pytest.mark.models,))
    for mode, name in itertools.product(OFTEN, MAKE)
    if mode == "replicate" or name not in NEEDS_WHOLE
]


@pytest.mark.ranks
@pytest.mark.parametrize(("mode", "name"), CHOSEN)
def test_ranks_train_as_one_device(ranks: Any, mode: str, name: str) -> None:
    for trained in ranks(2).run(train, [name], {"data_parallel": mode}):
        assert_same(trained[name], on_one_device(name), name)


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["zero1", "zero3"])
def test_what_needs_whole_parameters_is_refused_on_parts(ranks: Any, mode: str) -> None:
    for refused in ranks(2).run(refusals, list(NEEDS_WHOLE), {"data_parallel": mode}):
        assert list(refused) == list(NEEDS_WHOLE)
        for message in refused.values():
            assert "cannot update a part of" in message and 'data_parallel="replicate"' in message


def save_after_three(name: str, mode: str, folder: str) -> None:
    step = compiled(name, {"data_parallel": mode})
    for batch in batches()[:3]:
        step(*batch)
    step.save(folder)


def load_and_go_on(name: str, mode: str, folder: str) -> dict[str, Any]:
    step = compiled(name, {"data_parallel": mode}, seed=9)
    step.load(folder)
    for batch in batches()[3:]:
        step(*batch)
    return everything(step.model, step.optimizer)


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "before", "after"), [("rprop", "zero3", "zero1"), ("counting", "replicate", "zero3")])
def test_unusual_state_goes_from_mode_to_mode(ranks: Any, tmp_path: Path, name: str, before: str, after: str) -> None:
    folder = str(tmp_path / "saved")
    ranks(2).run(save_after_three, name, before, folder)
    for resumed in ranks(2).run(load_and_go_on, name, after, folder):
        assert_same(resumed, on_one_device(name), name)


def with_other_betas(at: int) -> str:
    torch.manual_seed(0)
    model = Scaled()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = cf.compile_step(model, nn.functional.mse_loss, optimizer, {"dp": 2}, timeout=60.0)
    try:
        for number, batch in enumerate(batches()):
            if number == at and torch.distributed.get_rank() == 1:
                optimizer.param_groups[0]["betas"] = (0.8, 0.99)
            step(*batch)
    except CrossfadeError as error:
        return str(error)
    return ""


@pytest.mark.ranks
@pytest.mark.parametrize(("at", "said"), [(0, "betas[0].0"), (3, "another number of the optimizer")])
def test_numbers_are_compared_among_ranks(ranks: Any, at: int, said: str) -> None:
    messages = ranks(2).run(with_other_betas, at)
    assert any(said in message for message in messages), messages


def by_plan(name: str) -> Any:
    model, optimizer = begin(name, width=6)
    plan = {"first": "colwise", "second": "rowwise"}
    step = cf.compile_step(model, nn.functional.mse_loss, optimizer, {"tp": 2}, tensor_parallel=plan, timeout=60.0)
    try:
        for batch in batches():
            step(*batch)
    except CrossfadeError as error:
        return str(error)
    with step.gathered() as gathered:
        return {name: whole(parameter) for name, parameter in gathered.named_parameters()}


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["adagrad", "slow"])
def test_what_a_plan_splits_is_trained_as_on_one_device(ranks: Any, name: str) -> None:
    expected = on_one_device(name, width=6)
    for trained in ranks(2).run(by_plan, name):
        assert_same(trained, {key: value for key, value in expected.items() if ":" not in key}, name)


@pytest.mark.ranks
def test_what_a_plan_splits_is_refused_where_the_whole_is_needed(ranks: Any) -> None:
    for message in ranks(2).run(by_plan, "lamb"):
        assert "Lamb cannot update a part of" in message
