"""Any optimizer in a compiled step: its own eager run on one device is the reference, over several steps."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import crossfade as cf
from crossfade.errors import CrossfadeError

STEPS = 7


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def batches(count: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(7)
    return [(torch.randn(8, 5), torch.randn(8, 3)) for _ in range(count)]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def eager(
    model: nn.Module, optimizer: Optimizer, data: list[Any], after: Callable[[int], None] = lambda _: None
) -> None:
    for index, (inputs, target) in enumerate(data):
        optimizer.zero_grad()
        loss_of(model(inputs), target).backward()
        optimizer.step()
        after(index)
    optimizer.zero_grad()


def tensors_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Parameters and state, by name."""
    found: dict[str, Any] = {name: p.detach() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found |= {f"{name}:{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    return {name: value for name, value in found.items() if value is not None}


def assert_same(ours: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-6) -> None:
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert type(ours[name]) is type(value), name
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def compare(
    make: Callable[[nn.Module], Optimizer], *, tolerance: float = 1e-6, captures: int | None = 1, steps: int = STEPS
) -> cf.Step:
    data = batches(steps)
    reference, model = model_of(), model_of()
    expected, optimizer = make(reference), make(model)
    eager(reference, expected, data)
    step = cf.compile_step(model, loss_of, optimizer)
    for inputs, target in data:
        step(inputs, target)
    assert_same(tensors_of(model, optimizer), tensors_of(reference, expected), tolerance)
    assert captures is None or step.captures == captures
    return step


def matrices(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.dim() == 2]


OF_TORCH: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "sgd-nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd-maximize": lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.5, maximize=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, weight_decay=0.1),
    "adam-amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01),
    "rmsprop-centered": lambda m: torch.optim.RMSprop(
        m.parameters(), lr=0.01, centered=True, momentum=0.9, weight_decay=0.1
    ),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1, lr_decay=0.1, initial_accumulator_value=0.3),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters(), lr=0.5, weight_decay=0.1),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.01, weight_decay=0.1),
    "nadam-decoupled": lambda m: torch.optim.NAdam(
        m.parameters(), lr=0.01, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "radam": lambda m: torch.optim.RAdam(m.parameters(), lr=0.01),
    "radam-decoupled": lambda m: torch.optim.RAdam(
        m.parameters(), lr=0.01, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "adamax": lambda m: torch.optim.Adamax(m.parameters(), lr=0.01, weight_decay=0.1),
    "asgd": lambda m: torch.optim.ASGD(m.parameters(), lr=0.1, t0=3, lambd=0.01),
    "rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=0.01),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.1),
}


@pytest.mark.parametrize("name", OF_TORCH)
def test_optimizers_of_torch_train_as_in_eager(name: str) -> None:
    compare(OF_TORCH[name])


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")
def test_muon_trains_matrices_as_in_eager() -> None:
    data = batches()
    reference, model = model_of(), model_of()
    for each in (reference, model):
        for parameter in each.parameters():
            parameter.requires_grad_(parameter.dim() == 2)
    expected, optimizer = (torch.optim.Muon(matrices(each), lr=0.02) for each in (reference, model))
    eager(reference, expected, data)
    step = cf.compile_step(model, loss_of, optimizer)
    for inputs, target in data:
        step(inputs, target)
    assert_same(tensors_of(model, optimizer), tensors_of(reference, expected))


def test_a_first_dampened_step_is_captured_by_itself() -> None:
    compare(lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.5), captures=2)


class Lion(Optimizer):
    """Sign of an interpolated momentum, written as users write it."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                beta1, beta2 = group["betas"]
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_((state["exp_avg"] * beta1 + p.grad * (1 - beta1)).sign(), alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(p.grad, alpha=1 - beta2)


class Counting(Optimizer):
    """Adam without its second moment, with a Python count, and something else done at every third step."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "seen": 0})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            group["seen"] += 1
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["step"], state["scale"] = 0, 1.0
                    state["mean"] = torch.zeros_like(p)
                state["step"] += 1
                state["scale"] *= 0.9
                state["mean"] = 0.9 * state["mean"] + 0.1 * p.grad
                corrected = state["mean"] / (1 - 0.9 ** state["step"])
                p.add_(corrected, alpha=-group["lr"] * state["scale"] / group["seen"])
                if state["step"] % 3 == 0:
                    p.mul_(0.99)


class Shrinking(torch.optim.AdamW):
    """AdamW that does something of its own after its step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.clamp_(-0.4, 0.4)


class Slow(Optimizer):
    """Keeps a slow copy of each weight that starts as the weight."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "slow" not in state:
                    state["slow"] = p.detach().clone()
                p.sub_(p.grad, alpha=group["lr"])
                state["slow"].lerp_(p, 0.5)
                p.copy_(state["slow"])


class SkipsFirst(Optimizer):
    """Only looks at the first gradient."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "last" not in state:
                    state["last"] = torch.zeros_like(p)
                else:
                    p.sub_(p.grad + state["last"], alpha=group["lr"])
                state["last"].copy_(p.grad)


class Lamb(Optimizer):
    """A step as long as the weight is."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * (p.norm() / (p.grad.norm() + 1e-6)).clamp(max=10), alpha=group["lr"])


class Noisy(Optimizer):
    """Langevin dynamics."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad + 0.01 * torch.randn_like(p), alpha=group["lr"])


WRITTEN: dict[str, tuple[Callable[[nn.Module], Optimizer], int | None]] = {
    "lion": (lambda m: Lion(m.parameters(), lr=0.01, decay=0.1), 1),
    "counting": (lambda m: Counting(m.parameters()), None),
    "subclass": (lambda m: Shrinking(m.parameters(), lr=0.05), 1),
    "slow": (lambda m: Slow(m.parameters()), 1),
    "skips-first": (lambda m: SkipsFirst(m.parameters()), 2),
    "lamb": (lambda m: Lamb(m.parameters()), 1),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_optimizers_that_users_write_train_as_in_eager(name: str) -> None:
    make, captures = WRITTEN[name]
    compare(make, captures=captures)
