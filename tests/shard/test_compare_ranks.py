"""Numbers that ranks compare are one more input, reduced like the loss."""

from __future__ import annotations

from crossfade.graph.collectives import find
from crossfade.graph.program import MADE_FOR
from crossfade.shard.compare_ranks import CompareRanks
from tests.shard.parts import after, lines

TEXT = 'x: f32[4] = input("x")\nsum_1: f32[] = aten.sum(x)\nreturn loss("loss", sum_1)'


def test_as_many_numbers_of_each_group_as_are_asked_for():
    found, done = after(TEXT, CompareRanks(numbers=3), CompareRanks("dp_replicate", "sum", 2))
    assert found == lines("""
        x: f32[4] = input("x")
        alike_dp: f32[3] = alike("alike.dp")
        alike_dp_replicate: f32[2] = alike("alike.dp_replicate")
        all_reduce_1: f32[2] = c10d.all_reduce(alike_dp_replicate, "sum", "dp_replicate")
        wait_tensor_1: f32[2] = c10d.wait_tensor(all_reduce_1)
        all_reduce: f32[3] = c10d.all_reduce(alike_dp, "avg", "dp")
        wait_tensor: f32[3] = c10d.wait_tensor(all_reduce)
        sum_1: f32[] = aten.sum(x)
        return loss("loss", sum_1), alike("alike.dp", wait_tensor), alike("alike.dp_replicate", wait_tensor_1)
    """)
    assert [collective.node.meta[MADE_FOR] for collective in find(done.graph)] == ["comparison of ranks"] * 2
