"""The tensor-parallel plan that a model of the transformers library brings along, and what it leaves to be found."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from torch.export import ExportedProgram

from crossfade.errors import PlanError
from crossfade.shard.tensor.plan_names import ProgramNames, is_glob, matches, names_of
from crossfade.shard.tensor.plan_styles import REFUSED, Style


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


def unnamed(entries: Mapping[str, Style], found: Mapping[str, Style], exported: ExportedProgram) -> dict[str, Style]:
    """Those of the entries found that speak of no parameter which the plan's own entries speak of.

    An entry for several layers, of which the plan names some, is written out for the others.
    """
    names = names_of(exported)
    taken = {tensor for pattern in entries for name in names.matching(pattern) for tensor in _spoken_of(name, names)}
    modules = {name for pattern in entries for name in names.matching(pattern)}
    added: dict[str, Style] = {}
    for pattern, style in found.items():
        matched = names.matching(pattern)
        free = [name for name in matched if name not in modules and taken.isdisjoint(_spoken_of(name, names))]
        if len(free) == len(matched) and pattern not in entries:
            added[pattern] = style
        elif is_glob(pattern):
            added |= dict.fromkeys(free, style)
    return added


def _spoken_of(name: str, names: ProgramNames) -> set[str]:
    """The tensors that an entry for a module or a tensor is about, by their canonical names."""
    own = [name] if name in names.tensors else names.modules.get(name, ())
    return {names.canonical[tensor] for tensor in own}
