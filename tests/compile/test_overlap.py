"""Bucket sizes chosen by what is predicted of each, and by the number of collectives where that says nothing."""

from __future__ import annotations

from dataclasses import replace

import torch

from crossfade.compile.overlap import plan_overlap
from crossfade.cost.keys import Keys
from crossfade.cost.presets import preset
from crossfade.graph import collectives
from crossfade.graph.program import Program
from crossfade.graph.text import parse

COUNT, NUMBERS = 16, 1 << 18


def gradients() -> Program:
    """As many gradients as are ready one after another, each all-reduced."""
    lines = [f'x: f32[{NUMBERS}] = input("x")']
    for i in range(COUNT):
        lines.append(f"g{i}: f32[{NUMBERS}] = aten.exp({'x' if not i else f'g{i - 1}'})")
        lines.append(f's{i}: f32[{NUMBERS}] = c10d.all_reduce(g{i}, "sum", "dp")')
        lines.append(f"w{i}: f32[{NUMBERS}] = c10d.wait_tensor(s{i})")
    lines.append("return " + ", ".join(f'output("{i}", w{i})' for i in range(COUNT)))
    return parse("\n".join(lines), groups={"dp": 2})


def number_in_plan(seconds: float) -> int:
    """How many collectives the plan has if each operator computes for so long, and each gradient travels for 0.2 ms
    when it is alone. Memory is so fast that all are copied into buckets."""
    machine, program, keys = preset("ethernet-1gbit"), gradients(), Keys()
    fabric = machine.fabric("dp")
    links = {kind: replace(link, latency=1e-4, bandwidth=1e10, piece=None) for kind, link in fabric.links.items()}
    fast = replace(fabric, links=links, launch=1e-6, slows_compute=0.0)
    computed = program.graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default)
    plan = plan_overlap(
        program,
        replace(machine, memory_bandwidth=1e12, fabrics={"dp": fast}),
        {keys.of(node): seconds for node in computed},
    )
    return len(collectives.find(plan.program.graph))


def test_O3_of_sizes_that_hide_all_the_one_with_the_fewest_collectives_is_taken():
    assert number_in_plan(seconds=1e-3) == 4


def test_O3_where_the_last_one_is_a_large_share_of_a_step_more_are_worth_their_latency():
    assert number_in_plan(seconds=1e-4) == 6
