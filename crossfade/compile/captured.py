"""What tracing has made of a model: enough of it is kept to see whether tracing again made the same."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from crossfade.capture.symbolic_sizes import SymbolicCapture
from crossfade.graph.passes import fingerprint
from crossfade.graph.private import conditions_on_sizes
from crossfade.graph.program import Program
from crossfade.shard.loss_parts import LossParts


@dataclass(frozen=True)
class CaptureMark:
    """By what a captured program is known again."""

    text: str
    constants: Mapping[str, Any]
    loss_parts: LossParts
    conditions: tuple[str, ...]
    """On symbolic sizes, as tracing met them."""
    owners: tuple[weakref.ref[Any], ...]
    """The model's modules and parameters, which a compiled step holds on to."""

    def is_of(self, other: Captured) -> bool:
        """Whether a program computes the same, with the same constants, for the modules and parameters of this one."""
        mark = other.mark()
        if replace(self, constants={}) != replace(mark, constants={}) or self.constants.keys() != mark.constants.keys():
            return False
        return all(_same(value, mark.constants[name]) for name, value in self.constants.items())


@dataclass(frozen=True)
class Captured:
    """A rank's forward, loss and backward as they were traced, and how the losses of the parts make up the whole."""

    program: Program
    loss_parts: LossParts
    model: nn.Module
    conditions: tuple[str, ...] = ()

    @classmethod
    def of(cls, traced: tuple[Program, LossParts], model: nn.Module, symbolic: SymbolicCapture | None) -> Captured:
        """What was traced just now: passes meet further conditions later."""
        conditions = () if symbolic is None else tuple(map(str, conditions_on_sizes(traced[0].fake_mode)))
        return cls(*traced, model, conditions)

    def mark(self) -> CaptureMark:
        """By what it is known again, without its graph."""
        text, owners = fingerprint(self.program), owners_of(self.model)
        return CaptureMark(text, self.program.constants, self.loss_parts, self.conditions, owners)


def owners_of(model: nn.Module) -> tuple[weakref.ref[Any], ...]:
    """A model's modules and parameters, as long as there are any."""
    return tuple(weakref.ref(owner) for owner in (*model.modules(), *model.parameters()))


def _same(value: Any, other: Any) -> bool:
    """Whether two constants are equal. A fingerprint has the values of small ones only."""
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        return value is other
    return value is other or (value.dtype == other.dtype and torch.equal(value, other))
