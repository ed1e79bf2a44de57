"""What products cost, and when a rewrite pays."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from crossfade.cost.presets import preset
from crossfade.simplify.products import (
    VIEW,
    CallCost,
    CostComparison,
    are_pointwise,
    bytes_of,
    copy_of,
    is_only_read_by,
    product_of,
    product_of_sizes,
)
from tests.simplify.holds import program_of

PRESET = preset("ethernet-1gbit")
MACHINE = dataclasses.replace(PRESET, flops={"float32": 1e9, "float64": 5e8}, memory_bandwidth=1e8, overhead=1e-6)


@pytest.mark.parametrize(
    ("call", "seconds"),
    [
        (CallCost(flops=1e6, bytes=10), 1e-3 + 1e-6),
        (CallCost(flops=10, bytes=1e5), 1e-3 + 1e-6),
        (CallCost(flops=1e6, bytes=10, dtype=torch.float64), 2e-3 + 1e-6),
        (CallCost(flops=1e6, bytes=10, dtype=torch.bfloat16), 1e-3 + 1e-6),  # not listed: as float32
        (VIEW, 1e-6),
    ],
)
def test_the_longer_of_arithmetic_and_memory_and_the_overhead_of_a_call(call: CallCost, seconds: float):
    assert call.seconds(dataclasses.replace(MACHINE, device="cpu")) == pytest.approx(seconds)


def test_views_are_free_where_calls_are_queued():
    assert VIEW.seconds(dataclasses.replace(MACHINE, device="cuda")) == 0


def test_without_a_machine_nothing_may_grow():
    plain = CallCost(flops=100, bytes=10)
    assert CostComparison((plain, plain), (plain,)).reason_against(None) is None
    for after in ((plain, plain), (CallCost(100, 21),), (CallCost(201, 10),), (CallCost(0, 0),) * 3):
        reason = CostComparison((plain, plain), after).reason_against(None)
        assert reason == "it does not need less of everything, and no machine says what that costs"


def test_on_a_machine_a_tenth_must_be_saved():
    before = (CallCost(flops=1e6, bytes=0),)
    assert CostComparison(before, (CallCost(flops=8.9e5, bytes=0),)).reason_against(MACHINE) is None
    slower = CostComparison(before, (CallCost(flops=9.1e5, bytes=0),))
    assert slower.reason_against(MACHINE) == "it would not be faster on this machine"
    assert slower.on(MACHINE).endswith("; 1001.0 -> 911.0 us on ethernet-1gbit")


def test_calls_of_nodes():
    text = """
        a: f32[2, 3] = input("a")
        b: f32[3, 5] = input("b")
        y: f32[2, 5] = aten.mm(a, b)
        return output("y", y)
        """
    a, b, y, _ = program_of(text).graph.nodes
    assert product_of(a, b) == product_of_sizes(2, 3, 5, y.meta["val"]) == CallCost(60, 4 * (6 + 15 + 10))
    assert product_of_sizes(2, 3, 5, y.meta["val"], stack=4).flops == 240
    assert bytes_of(a, b) == 84 and copy_of(a, b) == CallCost(0, 168)


def test_readers():
    text = """
        x: f32[2] = input("x")
        a: f32[2] = aten.neg(x)
        b: f32[2] = aten.mul.Tensor(a, a)
        c: f32[2] = aten.cumsum(b, 0)
        return output("c", c)
        """
    _, a, b, c, _ = program_of(text).graph.nodes
    assert not is_only_read_by(a, b), "it reads it twice"
    assert is_only_read_by(b, c) and not is_only_read_by(2, c)
    assert are_pointwise([a, b]) and not are_pointwise([b, c]) and not are_pointwise([])
