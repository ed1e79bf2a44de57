"""Gradients of micro-batches that wait in `.grad`, each rank's own, for the exchange of the last one (`no_sync`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from crossfade.errors import CrossfadeError
from crossfade.graph.private import version_of
from crossfade.shard.add_earlier_gradients import SCALE, earlier_name

LossIs = Literal["mean", "sum"]
"""How ranks' losses, and so their gradients, are put together."""


@dataclass
class WaitingGradients:
    """Which `.grad` are this rank's alone, and what they were multiplied by; as in DDP, clearing `.grad` drops them."""

    ranks: int
    _parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    _aside: dict[str, Tensor] = field(default_factory=dict)
    """What was in `.grad` before, exchanged already."""
    _weights: list[Tensor] = field(default_factory=list)
    """What each loss was multiplied by."""
    _loss_is: LossIs = "sum"

    def __bool__(self) -> bool:
        """Whether any gradient waits; forgets those that the user has cleared."""
        for name in [name for name, parameter in self._parameters.items() if parameter.grad is None]:
            del self._parameters[name]
            self._aside.pop(name, None)
        if not self._parameters:
            self._weights.clear()
        return bool(self._parameters)

    def kept(
        self,
        trained: Mapping[str, nn.Parameter],
        weight: Tensor,
        loss_is: LossIs,
        seen: Mapping[str, tuple[Tensor, int]],
    ) -> float:
        """One micro-batch's gradients are about to be added to `.grad`: what to multiply them by first.

        Of those that were `seen` to wait at its call, what is gone now was cleared.
        """
        for name in seen:
            if name in self._parameters and self._parameters[name].grad is None:
                self._aside.pop(name, None)
        if not self._parameters:
            self._loss_is = loss_is
        for name, parameter in trained.items():
            if name not in self._parameters and parameter.grad is not None:
                self._aside[name], parameter.grad = parameter.grad, None
        self._parameters.update(trained)
        self._weights.append(weight.detach())
        return self._share(loss_is) / self._share(self._loss_is)

    def for_exchange(self, loss_is: LossIs) -> dict[str, Tensor]:
        """What a program is given that exchanges them, by its inputs' names."""
        weight = self._weights[0]
        scale = self._share(self._loss_is) / self._share(loss_is) / weight
        given = {earlier_name(name): p.grad for name, p in self._parameters.items() if p.grad is not None}
        return {SCALE: scale.to(torch.float32), **given}

    def _share(self, loss_is: LossIs) -> float:
        """By what gradients become such that their sum over the ranks is the whole batch's."""
        return 1 / self.ranks if loss_is == "mean" else 1.0

    def seen(self) -> dict[str, tuple[Tensor, int]]:
        """The gradients that wait, to see later whether they are still the same."""
        return {n: (p.grad, version_of(p.grad)) for n, p in self._parameters.items() if p.grad is not None}

    def exchanged(self, seen: Mapping[str, tuple[Tensor, int]], weight: Tensor) -> None:
        """They are about to be replaced in `.grad` by what was exchanged; `seen` is what the exchange was given."""
        for name, (gradient, version) in seen.items():
            now = self._parameters[name].grad if name in self._parameters else None
            if now is not gradient or version_of(gradient) != version:
                raise CrossfadeError(
                    f"the gradient of {name} was cleared or changed after micro-batches were put together",
                    expected="zero_grad() before a call, or after its backward()",
                    remedy="call zero_grad() after optimizer.step()",
                )
        weights = {float(each) for each in (*self._weights, weight)}
        if len(weights) > 1:
            raise CrossfadeError(
                f"losses that are exchanged together were multiplied by {', '.join(map(str, sorted(weights)))}",
                expected="one number for all of them",
                remedy="divide every micro-batch's loss alike, or leave no_sync() out",
            )
        for name in seen:
            self._parameters[name].grad = self._aside.pop(name, None)
        self._parameters.clear()
        self._weights.clear()
