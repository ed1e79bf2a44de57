"""Trials: what is bounded is never undercut, and a sketch tells what all layers would."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from crossfade.cost.presets import preset
from crossfade.search.candidates import Candidate
from crossfade.search.trial import Trials
from tests.forecast.models import Tower, tokens


def trials(layers: int = 2, samples: int = 16) -> Trials:
    with torch.device("meta"):
        model = Tower(layers, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    return Trials(model, None, optimizer, tokens(samples, 16), preset("ethernet-1gbit"), "gloo")


ALL = [
    Candidate({"dp": 4}),
    *(Candidate({"dp": 4}, mode) for mode in ("zero1", "zero2", "zero3")),  # type: ignore[arg-type]
    Candidate({"dp_replicate": 2, "dp_shard": 2}, "zero3"),
    Candidate({"dp": 2, "tp": 2}, "zero2", 2),
    Candidate({"dp": 4}, "zero3", 2),
    Candidate({"tp": 4}),
    Candidate({}),
]


@pytest.mark.models  # it takes a minute
def test_no_step_takes_less_than_its_bounds() -> None:
    tried = trials()
    for candidate in ALL:
        least, found = tried.least(candidate), tried.simulate(candidate).figures
        assert least.seconds <= found.seconds
        assert 0.9 * found.held < least.held <= found.held
        assert least.memory <= found.memory
    assert len(tried._captured) == 6  # each number of samples and of parts once


@pytest.mark.parametrize("candidate", [Candidate({"dp": 4}, "zero3"), Candidate({"dp": 2}, "zero1")], ids=str)
def test_a_sketch_tells_what_all_layers_would(candidate: Candidate) -> None:
    deep = trials(layers=12)
    assert deep.few_layers(candidate) is not None
    sketch, whole = deep.sketch(candidate), deep.simulate(candidate).figures
    assert sketch.seconds == pytest.approx(whole.seconds, rel=0.12)  # of a toy that latency bounds
    assert sketch.memory == pytest.approx(whole.memory, rel=0.12)
    assert sketch.held == pytest.approx(whole.held, rel=0.01)


def test_further_micro_batches_count_as_much_as_the_third() -> None:
    tried, candidate = trials(samples=32), Candidate({"dp": 4}, "zero1", 4)
    whole, carried_on = tried.run(candidate).figures, tried.simulate(candidate).figures
    assert carried_on.seconds == pytest.approx(whole.seconds, rel=0.02)
    assert carried_on.memory == pytest.approx(whole.memory, rel=0.05)


def test_modes_hold_their_parts_of_parameters_and_state() -> None:
    tried = trials()
    plain, state, both = (tried.simulate(candidate).figures.held for candidate in (ALL[0], ALL[1], ALL[3]))
    assert state / plain == pytest.approx((1 + 2 / 4) / 3, rel=0.05)
    assert both / plain == pytest.approx(1 / 4, rel=0.05)


def test_parameters_are_named_by_module_where_all_of_it_is_meant() -> None:
    tried = trials()
    names = [name for name, _ in tried.model.named_parameters()]
    assert tried.patterns([name for name in names if name.startswith("blocks.0.")]) == ["blocks.0.*"]
    assert tried.patterns(["words.weight", "blocks.0.up.weight"]) == ["words.weight", "blocks.0.up.weight"]


def test_a_backend_decides_what_carries_a_scatter() -> None:
    on_gloo, on_nccl = trials(), dataclasses.replace(trials(), backend="nccl")
    kinds = [{travel.kind for travel in tried.simulate(ALL[1]).timeline.communication} for tried in (on_gloo, on_nccl)]
    assert "all_to_all" in kinds[0] and "reduce_scatter" not in kinds[0] and "reduce_scatter" in kinds[1]
