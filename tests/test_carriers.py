"""What follows from backends: what is exchanged, in which pieces, and what a machine is like that they use."""

from __future__ import annotations

import dataclasses
import math

import pytest

from crossfade.carriers import Carriers
from crossfade.communicate.lower_reduce_scatters import LowerReduceScatters
from crossfade.cost.machine import Machine
from crossfade.cost.presets import preset
from crossfade.graph.collectives import Kind

ETHERNET = preset("ethernet-10gbit")


def pieces(carriers: Carriers, ranks: int) -> float:
    (found,) = [one for one in carriers.lowering({"dp": ranks}) if isinstance(one, LowerReduceScatters)]
    return found.piece_mb


@pytest.mark.parametrize(("ranks", "megabytes"), [(2, 1.5), (8, 2.7), (64, 4.8)])
def test_among_many_ranks_exchanges_are_as_large_as_latency_asks_for(ranks: int, megabytes: float) -> None:
    found = pieces(Carriers({"dp": "gloo"}, ETHERNET), ranks)
    assert found == pytest.approx(megabytes, abs=0.1)
    latency = ETHERNET.collective_seconds(Kind.ALL_TO_ALL, 0, ranks, "dp")
    travel = ETHERNET.collective_seconds(Kind.ALL_TO_ALL, round(found * 2**20), ranks, "dp")
    assert latency / travel == pytest.approx(0.2, rel=1e-4)


def test_where_latency_is_small_and_without_a_machine_pieces_are_as_small_as_ever() -> None:
    assert pieces(Carriers({"dp": "gloo"}, preset("ethernet-1gbit")), 2) == LowerReduceScatters.piece_mb
    assert pieces(Carriers({"dp": "gloo"}, None), 64) == LowerReduceScatters.piece_mb


def test_what_is_no_slower_in_one_travels_in_one() -> None:
    fabric = dataclasses.replace(ETHERNET.fabric("dp"), piece=None)
    assert pieces(Carriers({"dp": "gloo"}, dataclasses.replace(ETHERNET, fabrics={"*": fabric})), 8) == math.inf


@pytest.mark.parametrize(
    ("backend", "machine", "exchanged"),
    [
        ("gloo", None, ["dp"]),
        ("nccl", None, []),
        ("emulated", None, []),
        ("emulated", ETHERNET, ["dp"]),
        ("emulated", preset("h100-nvlink-node"), []),
    ],
)
def test_what_scatters_badly_is_exchanged(backend: str, machine: Machine | None, exchanged: list[str]) -> None:
    assert Carriers({"dp": backend}, machine).exchanged == exchanged


def test_a_plan_counts_what_runs() -> None:
    gloo, emulated = (Carriers({"dp": backend}, ETHERNET) for backend in ("gloo", "emulated"))
    assert gloo.run_on(ETHERNET).fabric("dp") == ETHERNET.fabric("dp")
    assert emulated.run_on(ETHERNET).fabric("dp").slows_compute == 0
    assert emulated.run_on(ETHERNET).fabric("other").slows_compute == ETHERNET.fabric("dp").slows_compute
    planned = gloo.planned_for(ETHERNET).fabric("dp").links
    assert planned[Kind.REDUCE_SCATTER] == ETHERNET.fabric("dp").links[Kind.ALL_TO_ALL]
