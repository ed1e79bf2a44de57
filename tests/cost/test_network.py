"""Networks that are hierarchies, against sums written out."""

from __future__ import annotations

import dataclasses

import pytest

from crossfade.cost.machine import Machine
from crossfade.cost.network import Network, Route, Wire
from crossfade.cost.presets import preset
from crossfade.errors import MachineError
from crossfade.graph.collectives import Kind

NETWORK = Network(8, Wire(1e-6, 100e9), Wire(5e-6, 10e9), start=1e-5, copy=1000e9)


def test_ranks_of_the_last_axis_are_neighbours() -> None:
    mesh = {"dp": 32, "tp": 4}
    assert NETWORK.along(mesh, "tp") == Route(4, 1)
    assert NETWORK.along(mesh, "dp") == Route(2, 16)
    assert NETWORK.along({"dp": 4, "tp": 16}, "tp") == Route(8, 2)
    assert NETWORK.along({"dp": 4, "tp": 16}, "dp") == Route(1, 4)


def test_a_ring_inside_a_node() -> None:
    size = 10**9
    expected = 1e-5 + size / 1000e9 + 14e-6 + 2 * 7 / 8 * size / 100e9
    assert NETWORK.seconds(Kind.ALL_REDUCE, size, 8, Route(8, 1)) == pytest.approx(expected)
    gathered = 1e-5 + size / 1000e9 + 7e-6 + 7 / 8 * size / 100e9
    assert NETWORK.seconds(Kind.ALL_GATHER, size, 8, Route(8, 1)) == pytest.approx(gathered)


def test_between_nodes_a_group_uses_as_many_rails_as_it_has_ranks_there() -> None:
    size, latency = 10**9, 2 * 3 * 5e-6
    alone = NETWORK.seconds(Kind.ALL_REDUCE, size, 4, Route(1, 4))
    assert alone == pytest.approx(1e-5 + 1e-3 + latency + 1.5 * size / 10e9)
    four = NETWORK.seconds(Kind.ALL_REDUCE, size, 16, Route(4, 4))
    assert four == pytest.approx(1e-5 + 1e-3 + latency + (30 - 6) * 1e-6 + 2 * 15 / 16 * size / 40e9)


def test_small_messages_among_many_go_by_a_tree() -> None:
    few, many = (NETWORK.seconds(Kind.ALL_REDUCE, 1024, 8 * nodes, Route(8, nodes)) for nodes in (4, 1024))
    assert many - few == pytest.approx(2 * 8 * 5e-6, rel=0.01)  # eight more levels, up and down
    ring = 2 * 1023 * 5e-6
    assert many < ring / 20


def test_a_machine_with_a_network_is_kept_as_json() -> None:
    machine = preset("a100-cluster")
    again = Machine.from_json(machine.to_json())
    assert again.network == machine.network and again.products == machine.products
    assert again.launching == machine.launching
    mesh = {"dp": 4, "tp": 8}
    for axis in mesh:
        ranks = mesh[axis]
        seconds = [
            each.on_mesh(mesh).collective_seconds(Kind.ALL_REDUCE, 10**8, ranks, axis) for each in (machine, again)
        ]
        assert seconds[0] == seconds[1]


def test_an_impossible_network_is_refused() -> None:
    wire = dataclasses.replace(NETWORK.inside, bandwidth=float("nan"))
    with pytest.raises(MachineError, match=r"network\.inside\.bandwidth = nan"):
        dataclasses.replace(preset("a100-cluster"), network=dataclasses.replace(NETWORK, inside=wire))
