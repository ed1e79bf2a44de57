"""Where values may be overwritten: layouts in which each element has a place of its own, regions, in-place twins."""

from __future__ import annotations

import pytest
import torch

from crossfade.graph.in_place import MemoryUse, has_layout_of, in_place_form, in_place_twin
from crossfade.graph.text import parse

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        (torch.empty(3, 4), True),
        (torch.empty(4, 3).t(), True),
        (torch.empty(3, 8)[:, ::2], True),
        (torch.empty(0, 4), True),
        (torch.empty(1, 4).expand(1, 4), True),
        (torch.empty(1, 4).expand(3, 4), False),
        (torch.empty(9).as_strided((3, 3), (2, 1)), False),
        (torch.empty(9).as_strided((3, 3), (1, 1)), False),
    ],
)
def test_only_values_without_shared_places_can_be_written(value: torch.Tensor, fits: bool):
    assert has_layout_of(value, value) is fits


def test_twins_have_the_same_arguments():
    assert in_place_twin(aten.index_put.default) is aten.index_put_.default
    assert in_place_twin(aten.copy.default) is aten.copy_.default
    assert in_place_twin(aten.add_.Tensor) is None
    assert in_place_twin(aten.t.default) is None  # a view
    assert in_place_twin(aten.set.source_Tensor) is None  # would share memory instead of writing it
    assert in_place_twin(len) is None


def test_regions_of_views_and_of_what_went_in_place():
    program = parse("""
    x: f32[8] = input("x")
    n: f32[8] = aten.neg(x)
    a: f32[4] = aten.slice.Tensor(n, 0, 0, 4)
    b: f32[4] = aten.slice.Tensor(n, 0, 4, 8)
    e: f32[4] = aten.exp(b)
    v: f32[2] = aten.slice.Tensor(e, 0, 2, 4)
    s: f32[] = aten.sum(v)
    return output("s", s), output("a", a)
    """)
    node = {each.name: each for each in program.graph.nodes}
    memory = MemoryUse(program)
    assert not memory.region[node["a"]].overlaps(memory.region[node["b"]])
    assert memory.region[node["n"]].overlaps(memory.region[node["b"]])
    assert memory.last_read(memory.region[node["b"]]) == memory.position[node["e"]]
    assert memory.last_read(memory.region[node["a"]]) == float("inf")
    assert in_place_form(node["e"]) is aten.exp_.default
    memory.merge(node["e"], memory.region[node["b"]])
    region = memory.region[node["v"]]
    assert (region.root, region.start, region.end) == (node["n"], 24, 32)
    assert memory.last_read(memory.region[node["b"]]) == memory.position[node["s"]]


def test_an_element_may_be_written_until_the_last_of_its_siblings_is_waited_for():
    program = parse("""
    x: f32[4] = input("x")
    both: (f32[2], f32[2]) = c10d.reduce_scatter_tensor_coalesced([x, x], "sum", 2, "dp")
    b0: f32[2] = both[0]
    b1: f32[2] = both[1]
    w0: f32[2] = c10d.wait_tensor(b0)
    e: f32[2] = aten.exp(w0)
    w1: f32[2] = c10d.wait_tensor(b1)
    return output("e", e), output("w1", w1)
    """)
    node = {each.name: each for each in program.graph.nodes}
    memory = MemoryUse(program)
    assert memory.last_read(memory.region[node["w0"]], ignoring=(node["e"],)) == memory.position[node["w1"]]
