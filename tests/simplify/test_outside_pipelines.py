"""A pass that no default pipeline runs says in its docstring when it is wanted, and by which line it is added."""

from __future__ import annotations

import re

import pytest

from crossfade.compile import pipeline
from crossfade.compile.catalogue import known_passes
from crossfade.cost.presets import preset
from crossfade.graph.passes import Pass
from crossfade.simplify.simplify_nodes import MEMBERS
from crossfade.simplify.spell_out_slow_operators import SpellOutSlowOperators

MACHINE = preset("ethernet-1gbit")
IN_PIPELINES = {step.name for step in (*pipeline.optimization({"dp": "gloo"}, MACHINE), *MEMBERS)}
IN_STEPS = {SpellOutSlowOperators.name}
"""Passes that `compile_step` runs between its pipelines, where it has measured operators."""

PASSES = [kind for kind in known_passes().values() if kind.__module__.startswith("crossfade.simplify.")]


def advice(kind: type[Pass]) -> str:
    """What a pass says about being in no pipeline; empty if it says nothing."""
    found = re.search(r"Not in a default pipeline: (.*?)\n\n", kind.__doc__ or "", re.DOTALL)
    return " ".join(found[1].split()) if found else ""


@pytest.mark.parametrize("kind", PASSES, ids=lambda kind: kind.name)
def test_passes_outside_of_pipelines_say_how_to_add_them(kind: type[Pass]):
    assert bool(advice(kind)) == (kind.name not in IN_PIPELINES | IN_STEPS)
    for code in re.findall(r"`((?:simplification|optimization)\([^`]*)`", advice(kind)):
        added = eval(code, {**vars(pipeline), kind.__name__: kind, "machine": MACHINE})
        assert kind in {type(step) for step in added}
