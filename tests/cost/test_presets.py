"""Named machines: all possible, in a sensible order, and near what was measured."""

from __future__ import annotations

import pytest

from crossfade.cost.machine import Machine
from crossfade.cost.presets import PRESETS, preset
from crossfade.errors import MachineError
from crossfade.graph.collectives import Kind

NAMES = ["loopback-gloo", "ethernet-1gbit", "ethernet-10gbit", "ethernet-100gbit", "h100-nvlink-node",
         "h200-nvlink-node", "infiniband-cluster", "pcie-node", "a100-node", "a100-cluster", "h100-cluster",
         "h100-96gb-cluster", "h200-cluster"]  # fmt: skip


def test_all_are_there() -> None:
    assert list(PRESETS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_each_is_whole_and_says_where_it_comes_from(name: str) -> None:
    machine = preset(name)
    assert machine.name == name
    assert Machine.from_json(machine.to_json()) == machine
    assert "measured" in machine.source or "data sheet" in machine.source


@pytest.mark.parametrize(
    ("kind", "milliseconds"),
    [(Kind.ALL_REDUCE, 530), (Kind.ALL_GATHER, 264), (Kind.REDUCE_SCATTER, 530), (Kind.ALL_TO_ALL, 258)],
)
def test_a_gigabit_is_as_slow_as_measured(kind: Kind, milliseconds: float) -> None:
    predicted = preset("ethernet-1gbit").collective_seconds(kind, 60_200_000, ranks=2, axis="dp")
    assert predicted == pytest.approx(milliseconds / 1e3, rel=0.05)


def test_many_small_all_reduces_in_flight_are_as_slow_as_measured() -> None:
    """389 parameters of 10.7 MB together took 214 ms."""
    alone = preset("ethernet-1gbit").collective_seconds(Kind.ALL_REDUCE, 10_700_000 // 389, ranks=2)
    assert 389 * alone == pytest.approx(0.214, rel=0.15)


def seconds(name: str, axis: str = "dp") -> float:
    return preset(name).collective_seconds(Kind.ALL_REDUCE, 100_000_000, ranks=8, axis=axis)


def test_faster_networks_are_faster() -> None:
    names = ["ethernet-1gbit", "ethernet-10gbit", "ethernet-100gbit", "infiniband-cluster", "h100-nvlink-node"]
    times = [seconds(name) for name in names]
    assert times == sorted(times, reverse=True)
    assert seconds("infiniband-cluster", "tp") == seconds("h100-nvlink-node")
    assert seconds("pcie-node") > seconds("h100-nvlink-node")


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(MachineError) as caught:
        preset("ethernet-1gb")
    assert str(caught.value) == (
        f"there is no machine named 'ethernet-1gb': expected one of {', '.join(NAMES)}. "
        "Remedy: did you mean ethernet-1gbit."
    )
    with pytest.raises(MachineError, match="measure your own: crossfade calibrate"):
        preset("?")
