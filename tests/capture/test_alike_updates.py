"""Updates traced once for all parameters that are alike: the program of a whole trace, the numbers of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

import crossfade as cf
from crossfade.capture import optimizer as capture
from crossfade.capture.alike_updates import updates_each_by_itself
from crossfade.graph.text import render

MAKE: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda model: AdamW(model.parameters(), lr=0.01),
    "groups": lambda model: Adam(groups(model), lr=0.01, amsgrad=True),
    "rmsprop": lambda model: RMSprop(model.parameters(), lr=0.01, centered=True),
    "nadam": lambda model: NAdam(model.parameters(), lr=0.01),
    "adagrad": lambda model: Adagrad(model.parameters(), lr=0.01),
}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": parameters[1::2], "weight_decay": 0.1}, {"params": parameters[::2], "lr": 0.05}]


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))


def batch_of(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 4, generator=generator), torch.randn(6, 2, generator=generator)


def count_traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The name of what is traced for an optimizer from now on, each time."""
    traced: list[str] = []
    trace = capture.trace

    def counting(mode: Any, function: Any, inputs: Any, what: str, **options: Any) -> Any:
        traced.append(what)
        return trace(mode, function, inputs, what, **options)

    monkeypatch.setattr(capture, "trace", counting)
    return traced


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("name", MAKE)
def test_the_program_is_that_of_a_whole_trace(name: str, limit: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for whole in (False, True):
        if whole:
            monkeypatch.setattr(capture, "alike", lambda *_: {})
        model = model_of()
        step = cf.compile_step(model, nn.functional.mse_loss, MAKE[name](model), clip_grad_norm=limit)
        step(*batch_of(0))
        texts.append(render(step.program))
    assert texts[0] == texts[1]


def test_parameters_that_are_alike_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = count_traces(monkeypatch)
    model = model_of()
    cf.compile_step(model, nn.functional.mse_loss, AdamW(model.parameters()))(*batch_of(0))
    assert traced == ["the step of AdamW"] * 4  # 8 parameters: [4, 4] and [4] three times each, [2, 4], [2]


@pytest.mark.parametrize("name", MAKE)
def test_each_parameter_keeps_its_own_count(name: str) -> None:
    """Adam divides by powers of a count that is a tensor of each parameter's own: they may differ."""
    compiled, eager = model_of(), model_of()
    ahead = [MAKE[name](model) for model in (compiled, eager)]
    for model, optimizer in zip((compiled, eager), ahead, strict=True):
        for several in (2, 1):  # all, then two of them once more
            for parameter in list(model.parameters())[:: 3 - several]:
                parameter.grad = torch.full_like(parameter, 0.1 * several)
            optimizer.step()
            optimizer.zero_grad()
    step = cf.compile_step(compiled, nn.functional.mse_loss, ahead[0])
    for seed in range(3):
        step(*batch_of(seed))
        nn.functional.mse_loss(eager(batch_of(seed)[0]), batch_of(seed)[1]).backward()
        ahead[1].step()
        ahead[1].zero_grad()
    for found, expected in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


class ByPosition(SGD):
    """Halves the rate from one parameter to the next."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """As SGD, by position."""
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                parameter.sub_(parameter.grad, alpha=group["lr"] * 0.5**index)


def test_code_of_users_is_traced_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = count_traces(monkeypatch)
    compiled, eager = model_of(), model_of()
    step = cf.compile_step(compiled, nn.functional.mse_loss, ByPosition(compiled.parameters(), lr=0.1))
    step(*batch_of(0))
    assert traced == ["the step of ByPosition"]
    nn.functional.mse_loss(eager(batch_of(0)[0]), batch_of(0)[1]).backward()
    with torch.no_grad():
        ByPosition(eager.parameters(), lr=0.1).step()
    for found, expected in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_step_that_was_put_into_torchs_class_is_not_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = SGD([torch.zeros(1)], lr=0.1)
    assert updates_each_by_itself(optimizer)
    monkeypatch.setattr(SGD, "step", lambda self, closure=None: None)
    assert not updates_each_by_itself(optimizer)
