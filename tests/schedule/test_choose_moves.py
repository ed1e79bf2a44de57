"""What is kept, computed again or moved: compared with all that could be, on small programs; when copies travel."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from crossfade.cost.machine_parts import HostLink
from crossfade.cost.presets import preset
from crossfade.cost.timeline import Costs, simulate
from crossfade.graph import offload
from crossfade.graph.memory import memory_curve
from crossfade.graph.passes import run_passes
from crossfade.schedule.choose_recompute import frontier
from crossfade.schedule.kept_values import NONE, KeptValues
from crossfade.schedule.offload_values import OffloadValues
from crossfade.schedule.recompute_values import RecomputeValues
from tests.schedule.test_choose_recompute import forward_and_backward

LINKS = [HostLink(0.01, 2048.0), HostLink(0.01, 1024.0), HostLink(0.01, 4096.0, apart=False)]
"""A value of eight columns takes one second, two, or half of one that computation waits for."""


def with_link(count: int, seed: int, link: HostLink | None) -> KeptValues:
    plain = forward_and_backward(count, seed=seed)
    seconds = dict(zip(plain.nodes, plain.seconds, strict=True))
    seconds |= {node: 1.0 for node in plain.nodes if node.name.startswith("s")}
    forward = {node.name for node in plain.nodes if node.name.startswith(("v", "loss"))}
    return KeptValues(plain.program, Costs(seconds, {}, {}), forward=forward, host=link)


def best_of_all(values: KeptValues) -> list[tuple[int, float]]:
    """Each peak that any choice has, with the fewest seconds that it takes within it."""
    options = []
    for cell, size in enumerate(values.size):
        again = [cell] if values.eligible[cell] and values.late_start[cell] != NONE else []
        moves = [values.move(cell), values.move(cell, at_once=True)] if not values.why_stays[cell] else []
        if size > 4 and (again or moves):
            options.append([None, *again, *moves])
    best: dict[int, float] = {}
    for picked in itertools.product(*options):
        choice = values.choose(number for number in picked if number is not None)
        best[choice.peak] = min(choice.seconds, best.get(choice.peak, choice.seconds))
    return sorted(best.items())


@pytest.mark.parametrize("link", LINKS, ids=["fast", "slow", "by the computing thread"])
def test_choices_are_near_the_best_that_there_are(link: HostLink):
    """Of every limit that some choice keeps, on sampled programs: how much slower, and how often nothing is found."""
    ratios, missed, limits = [], 0, 0
    for seed in range(3):
        values = with_link(4, seed, link)
        found, exact = frontier(values), best_of_all(values)
        for limit, _ in exact:
            fewest = min(seconds for peak, seconds in exact if peak <= limit)
            choice, limits = found.within(limit), limits + 1
            if choice is None:
                missed += 1
                continue
            assert choice.seconds >= fewest - 1e-9
            ratios.append((choice.seconds + 1) / (fewest + 1))
    assert sum(ratios) / len(ratios) <= 1.1
    assert missed <= 0.05 * limits


@pytest.mark.parametrize("link", LINKS[::2], ids=["apart", "by the computing thread"])
def test_a_link_only_helps_and_more_memory_is_never_slower(link: HostLink):
    for seed in range(2):
        values = with_link(10, seed, link)
        found = frontier(values)
        without = frontier(with_link(10, seed, None))
        seconds = [choice.seconds for choice in found.choices]
        assert seconds == sorted(seconds)
        for choice in without.choices:
            with_it = found.within(choice.peak)
            assert with_it is not None
            assert with_it.seconds <= choice.seconds
        assert any(choice.moves for choice in found.choices)


@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_chosen_runs_as_foreseen(seed: int):
    """The written program's peak is that of the choice, and a simulated run waits for its copies as long or less."""
    values = with_link(12, seed, LINKS[0])
    machine = dataclasses.replace(preset("loopback-gloo"), host=LINKS[0])
    for choice in frontier(values).choices[1::4]:
        names = tuple(sorted(values.spelled(cell) for cell in choice.cells))
        moves = tuple(
            f"{values.name_of(move.cell)}@{values.nodes[move.left].name}@{values.nodes[move.back].name}"
            for move in choice.moves
        )
        done = run_passes(values.program, [RecomputeValues(names), OffloadValues(moves)], context={"machine": machine})
        assert memory_curve(done).peak <= choice.peak
        took = dict(zip([node.name for node in values.nodes], values.seconds, strict=True))
        compute = {
            node: took.get(str(node.meta.get("crossfade_computed_again", node.name)), 0.0) for node in done.graph.nodes
        }
        travel = {copy.node: LINKS[0].seconds(copy.bytes) for copy in offload.find(done.graph)}
        run = simulate(done, Costs(compute, travel, {}))
        assert run.exposed <= sum(move.exposed for move in choice.moves) + 1e-6
