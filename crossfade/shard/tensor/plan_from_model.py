"""The tensor-parallel plan that a model of the transformers library brings along."""

from __future__ import annotations

import itertools
from typing import Any

from crossfade.errors import PlanError
from crossfade.shard.tensor.plan_names import matches
from crossfade.shard.tensor.plan_styles import REFUSED


def entries_of_model(model: Any) -> tuple[dict[str, str], tuple[str, ...]]:
    """The entries of a model's plan that can be used, and a note for each that cannot.

    The library writes one plan for all sizes of a family, so some entries name what this model does not have.
    """
    plan = getattr(model, "tp_plan", None) or _base_plan(model)
    if not plan:
        remedy = "write a plan, or let Plan.megatron(exported_program) find one"
        raise PlanError(f"{type(model).__name__} has no tensor-parallel plan", expected="a tp_plan", remedy=remedy)
    known = _names(model)
    usable, notes = {}, []
    for name, style in plan.items():
        if style in REFUSED:
            notes.append(f"{name}: {style} left out: {REFUSED[style]}")
        elif not matches(name, known):
            notes.append(f"{name}: {style} left out: the model has nothing of that name")
        else:
            usable[name] = style
    return usable, tuple(notes)


def _base_plan(model: Any) -> dict[str, str]:
    """The plan of the configuration, whose names are those of the base model inside."""
    plan = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    prefix = getattr(model, "base_model_prefix", "")
    inside = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    return {inside + name: style for name, style in plan.items()}


def _names(model: Any) -> list[str]:
    tensors = itertools.chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    modules = model.named_modules(remove_duplicate=False)
    return [name for name, _ in itertools.chain(modules, tensors)]
