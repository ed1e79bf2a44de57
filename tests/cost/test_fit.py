"""A machine fitted to measurements that another one made is that other one."""

from __future__ import annotations

import pytest

from crossfade.cost.fit import CollectiveTime, Constant, StepTime, fit, set_constant
from crossfade.cost.machine import Machine
from crossfade.cost.presets import preset
from crossfade.errors import MachineError
from crossfade.graph.collectives import Kind

START = preset("a100-cluster")


def seconds_on(machine: Machine) -> float:
    return 1e13 / machine.flops["float16"] + 1e9 / machine.memory_bandwidth


def bound_by_memory(machine: Machine) -> float:
    return 1e12 / machine.flops["float16"] + 4e11 / machine.memory_bandwidth


def test_constants_are_found_again() -> None:
    true = set_constant(set_constant(START, "flops", 240e12), "memory_bandwidth", 1.3e12)
    steps = [StepTime(str(n), form(true), form) for n, form in enumerate((seconds_on, bound_by_memory))]
    found = fit(START, (), steps, [Constant("flops", 1.0), Constant("memory_bandwidth", 1.0)])
    assert found.constants["flops"] == pytest.approx(240e12, rel=0.01)
    assert found.constants["memory_bandwidth"] == pytest.approx(1.3e12, rel=0.01)
    assert max(abs(error) for error in found.steps.values()) < 0.01
    assert "2 steps" in str(found) and "mean error" in str(found)


def test_an_odd_measurement_bends_little() -> None:
    steps = [StepTime(str(n), seconds_on(START), seconds_on) for n in range(9)]
    found = fit(START, (), [*steps, StepTime("odd", 3 * seconds_on(START), seconds_on)], [Constant("flops", 1.0)])
    assert found.constants["flops"] == pytest.approx(START.flops["float16"], rel=0.05)
    assert found.steps["odd"] == pytest.approx(-2 / 3, abs=0.05)


@pytest.mark.parametrize("seconds", [float("nan"), 0.0, -1.0, float("inf")])
def test_a_time_that_cannot_be_is_refused(seconds: float) -> None:
    with pytest.raises(MachineError, match="was measured to take"):
        fit(START, [CollectiveTime(Kind.ALL_REDUCE, 8, 1024, seconds)])


def test_nothing_to_fit_is_refused() -> None:
    with pytest.raises(MachineError, match="nothing was measured"):
        fit(START)
    with pytest.raises(MachineError, match=r"has no network\.start"):
        fit(
            preset("loopback-gloo"), [CollectiveTime(Kind.ALL_REDUCE, 8, 1024, 1.0)], (), [Constant("network.start", 1)]
        )
