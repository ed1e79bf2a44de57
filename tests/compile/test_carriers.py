"""What follows from backends: what is exchanged, in which pieces, and what a machine is like that they use."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import pytest

from crossfade.communicate.lower_all_gathers import LowerAllGathers
from crossfade.communicate.lower_reduce_scatters import PIECE_MB
from crossfade.compile.carriers import Carriers
from crossfade.compile.pipeline import lowering, optimize, planning_for
from crossfade.cost.machine import Machine
from crossfade.cost.presets import preset
from crossfade.graph import collectives
from crossfade.graph.collectives import Kind
from crossfade.graph.text import parse

ETHERNET = preset("ethernet-10gbit")

SCATTER = """
x: f32[4194304] = input("x")
s: f32[65536] = c10d.reduce_scatter_tensor(x, "sum", 64, "dp")
w: f32[65536] = c10d.wait_tensor(s)
return output("w", w)
"""


def pieces(carriers: Carriers, ranks: int) -> float:
    (found,) = carriers.pieces({"dp": ranks})
    return found


@pytest.mark.parametrize(("ranks", "megabytes"), [(8, 2.7), (64, 4.8)])
def test_among_many_ranks_exchanges_are_as_large_as_latency_asks_for(ranks: int, megabytes: float) -> None:
    found = pieces(Carriers({"dp": "gloo"}, ETHERNET), ranks)
    assert found == pytest.approx(megabytes, abs=0.1)
    latency = ETHERNET.collective_seconds(Kind.ALL_TO_ALL, 0, ranks, "dp")
    travel = ETHERNET.collective_seconds(Kind.ALL_TO_ALL, round(found * 2**20), ranks, "dp")
    assert latency / travel == pytest.approx(0.2, rel=1e-4)


def test_where_latency_is_small_and_without_a_machine_pieces_are_as_small_as_ever() -> None:
    assert pieces(Carriers({"dp": "emulated"}, preset("ethernet-1gbit")), 2) == PIECE_MB
    assert pieces(Carriers({"dp": "gloo"}, None), 64) == PIECE_MB


@pytest.mark.parametrize(("backend", "slows", "times"), [("gloo", 0.1, 1), ("gloo", 0.4, 2), ("emulated", 0.4, 1)])
def test_where_pieces_cost_computation_much_they_are_larger(backend: str, slows: float, times: int) -> None:
    machine = preset("ethernet-1gbit")
    machine = dataclasses.replace(
        machine, fabrics={"*": dataclasses.replace(machine.fabric("dp"), slows_compute=slows)}
    )
    assert pieces(Carriers({"dp": backend}, machine), 2) == times * PIECE_MB
    assert Carriers({"dp": "gloo"}, small_gathers(machine)).gather_pieces({"dp": 2}) == (
        PIECE_MB if slows < 0.2 else 2,
    )


def small_gathers(machine: Machine) -> Machine:
    """A machine whose gathers are fastest in small pieces."""
    fabric = machine.fabric("dp")
    gather = dataclasses.replace(fabric.links[Kind.ALL_GATHER], piece=2**19)
    links = {**fabric.links, Kind.ALL_GATHER: gather}
    return dataclasses.replace(machine, fabrics={"*": dataclasses.replace(fabric, links=links)})


def test_what_is_no_slower_in_one_travels_in_one() -> None:
    links = ETHERNET.fabric("dp").links
    links = {**links, Kind.ALL_TO_ALL: dataclasses.replace(links[Kind.ALL_TO_ALL], piece=None)}
    fabric = dataclasses.replace(ETHERNET.fabric("dp"), links=links)
    assert pieces(Carriers({"dp": "gloo"}, dataclasses.replace(ETHERNET, fabrics={"*": fabric})), 8) == math.inf


def test_gathers_on_gloo_are_cut_where_a_machine_says_so() -> None:
    assert Carriers({"dp": "gloo", "tp": "nccl"}, ETHERNET).gather_pieces({"dp": 2}) == (2.0,)
    assert Carriers({"dp": "gloo"}, ETHERNET).gather_pieces({"dp": 64})[0] > 4  # latency among many asks for more
    assert Carriers({"dp": "gloo"}, preset("loopback-gloo")).gather_pieces({"dp": 2}) == (math.inf,)
    assert Carriers({"dp": "gloo"}, None).gather_pieces({"dp": 2}) == (math.inf,)


def test_within_a_memory_limit_gathers_stay_whole() -> None:
    carriers = Carriers({"dp": "gloo"}, ETHERNET)
    cut, whole = (lowering(carriers, {"dp": 2}, limit)[-1] for limit in (None, 10**9))
    assert (cut, whole) == (LowerAllGathers(("dp",), 2.0), LowerAllGathers(("dp",)))


@pytest.mark.parametrize(
    ("backend", "machine", "exchanged"),
    [
        ("gloo", None, ("dp",)),
        ("nccl", None, ()),
        ("emulated", None, ()),
        ("emulated", ETHERNET, ("dp",)),
        ("emulated", preset("h100-nvlink-node"), ()),
    ],
)
def test_what_scatters_badly_is_exchanged(backend: str, machine: Machine | None, exchanged: tuple[str, ...]) -> None:
    assert Carriers({"dp": backend}, machine).exchanged == exchanged


def test_a_plan_counts_what_runs() -> None:
    gloo, emulated = (Carriers({"dp": backend}, ETHERNET) for backend in ("gloo", "emulated"))
    assert gloo.run_on(ETHERNET).fabric("dp") == ETHERNET.fabric("dp")
    assert emulated.run_on(ETHERNET).fabric("dp").slows_compute == 0
    assert emulated.run_on(ETHERNET).fabric("other").slows_compute == ETHERNET.fabric("dp").slows_compute
    planned = gloo.planned_for(ETHERNET).fabric("dp").links
    exchange = ETHERNET.fabric("dp").links[Kind.ALL_TO_ALL]
    assert exchange.piece is not None
    assert planned[Kind.REDUCE_SCATTER] == dataclasses.replace(exchange, piece=None)  # cut where it is lowered


def test_each_axis_has_its_own_pieces() -> None:
    carriers = Carriers({"dp": "gloo", "tp": "nccl", "cp": "gloo"}, ETHERNET)
    few, many = carriers.pieces({"dp": 2, "tp": 8, "cp": 64})
    assert few < many == pieces(Carriers({"dp": "gloo"}, ETHERNET), 64)


@pytest.mark.parametrize(
    ("backend", "expected"),
    [("gloo", {Kind.ALL_TO_ALL: 3}), ("emulated", {Kind.ALL_TO_ALL: 3}), ("nccl", {Kind.REDUCE_SCATTER: 1})],
)
def test_graphs_are_optimized_for_what_carries_them(backend: str, expected: dict[Kind, int]) -> None:
    program = parse(SCATTER, groups={"dp": 64})
    done = optimize(program.module(), machine=ETHERNET, groups={"dp": 64}, backends={"dp": backend})
    found = Counter(one.kind for one in collectives.find(done.module.graph))
    assert found == expected  # exchanges of about 4.8 MB


def test_an_emulated_graph_is_planned_without_slowing() -> None:
    assert planning_for(ETHERNET, {"dp": "emulated"})["machine"].fabric("dp").slows_compute == 0
