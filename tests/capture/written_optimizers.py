"""Optimizers as users write them, with what makes each of them unlike torch's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


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


class WrittenRAdam(Optimizer):
    """As found in many repositories: a Python count, math.sqrt, and a branch on how many steps were taken."""

    def __init__(self, params: Any, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                state["exp_avg"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                power = beta2 ** state["step"]
                longest = 2 / (1 - beta2) - 1
                length = longest - 2 * state["step"] * power / (1 - power)
                size = group["lr"] / (1 - math.pow(beta1, state["step"]))
                if length >= 5:
                    size *= math.sqrt((1 - power) * (length - 4) / (longest - 4) * (length - 2) / length)
                    p.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(1e-8), value=-size)
                else:
                    p.add_(state["exp_avg"], alpha=-size)


class Averaging(Optimizer):
    """Weights averaged on the way: sums in the group, one of which the step itself puts there."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "total": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["total"] += group["lr"] ** 2
            group["share"] = group["lr"] ** 2 / group["total"]
            for p in group["params"]:
                state = self.state[p]
                if "z" not in state:
                    state["z"] = p.clone()
                p.lerp_(state["z"], group["share"])
                state["z"].sub_(p.grad, alpha=group["lr"])


class RootMeanSquare(Optimizer):
    """A number in the state that becomes a tensor, and a maximum of both."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "least": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["rms"] = 0
                state["rms"] = p.norm() / p.numel() ** 0.5
                p.sub_(p.grad * max(group["least"], state["rms"]), alpha=group["lr"])


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


class Rooted(Optimizer):
    """Element by element, but by a number that depends on how large the tensor is."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"] / math.sqrt(p.numel()))


WRITTEN: dict[str, tuple[Callable[[nn.Module], Optimizer], int | None]] = {
    "lion": (lambda m: Lion(m.parameters(), lr=0.01, decay=0.1), 1),
    "counting": (lambda m: Counting(m.parameters()), None),
    "subclass": (lambda m: Shrinking(m.parameters(), lr=0.05), 1),
    "slow": (lambda m: Slow(m.parameters()), 1),
    "skips-first": (lambda m: SkipsFirst(m.parameters()), 2),
    "lamb": (lambda m: Lamb(m.parameters()), 1),
    "written-radam": (lambda m: WrittenRAdam(m.parameters()), None),
    "averaging": (lambda m: Averaging(m.parameters()), 2),
    "root-mean-square": (lambda m: RootMeanSquare(m.parameters()), 2),
}
