"""What stands beyond the model and the loss (globals, classes, settings of torch) is seen to have changed as well."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crossfade.capture.baked_in import ambient
from crossfade.graph.private import global_module_hooks
from tests.capture.changed_models import Case, compiled, eager

SCALE = 1.0
TABLE = {"scale": {"now": 1.0}}


def helper(x: Tensor) -> Tensor:
    return x * SCALE


class Global(nn.Module):
    """Reads a global, one inside of a container, and one by way of a function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return helper(self.linear(x)) * TABLE["scale"]["now"] * settings.scale


settings = types.ModuleType("settings_of_a_user")
settings.scale = 1.0  # type: ignore[attr-defined]
STANDING: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "a global that a function reads": lambda patch: patch.setitem(globals(), "SCALE", 3.0),
    "a function": lambda patch: patch.setitem(globals(), "helper", torch.tanh),
    "a value in a global container": lambda patch: patch.setitem(TABLE["scale"], "now", 3.0),
    "a global of another module": lambda patch: patch.setattr(settings, "scale", 3.0),
    "a method": lambda patch: patch.setattr(Global, "forward", lambda self, x: 3 * self.linear(x)),
    "a method of torch's": lambda patch: patch.setattr(nn.Linear, "forward", lambda self, x: x @ self.weight.T),
    "a hook on all modules": lambda patch: patch.setitem(
        global_module_hooks()["forward_hooks"], 0, lambda module, args, out: 2 * out
    ),  # not by torch's own function: a test must not leave it behind
}


@pytest.mark.parametrize("change", STANDING.values(), ids=STANDING)
def test_a_change_beyond_the_model_is_seen(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Case:
        return Global(), F.mse_loss, lambda: change(monkeypatch)

    torch.manual_seed(0)
    step, found = compiled(make())
    monkeypatch.undo()
    torch.manual_seed(0)
    torch.testing.assert_close(found, eager(make()))
    assert step.captures == 2


def test_torch_settings_are_seen() -> None:
    before = ambient()
    with torch.device("meta"):
        assert ambient() != before
    torch.use_deterministic_algorithms(True)
    try:
        assert ambient() != before
    finally:
        torch.use_deterministic_algorithms(False)
    assert ambient() == before
