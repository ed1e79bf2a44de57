"""Gradients reduced to the rows that each rank updates."""

from __future__ import annotations

from crossfade.shard.scatter_gradients import ScatterGradients
from tests.shard.parts import after, lines

GRADIENT = """
    w: f32[4, 2] = parameter("w")
    x: f32[2, 4] = input("x")
    t: f32[4, 2] = aten.t(x)
    sum_1: f32[] = aten.sum(t)
    return loss("loss", sum_1), gradient("w", t)
"""


def test_a_gradient_that_does_not_lie_in_rows_is_copied_and_the_loss_averaged():
    text, _ = after(GRADIENT, ScatterGradients())
    assert text[2:] == lines("""
        t: f32[4, 2] = aten.t(x)
        clone: f32[4, 2] = aten.clone(t, memory_format=contiguous_format)
        reduce_scatter_tensor: f32[2, 2] = c10d.reduce_scatter_tensor(clone, "avg", 2, "dp")
        wait_tensor_1: f32[2, 2] = c10d.wait_tensor(reduce_scatter_tensor)
        sum_1: f32[] = aten.sum(t)
        all_reduce: f32[] = c10d.all_reduce(sum_1, "avg", "dp")
        wait_tensor: f32[] = c10d.wait_tensor(all_reduce)
        return loss("loss", wait_tensor), gradient("w", wait_tensor_1)
    """)


def test_rows_are_averaged_over_those_who_hold_the_same():
    text, done = after(GRADIENT, ScatterGradients(copies="dp_replicate"))
    start = next(line for line in text if '"dp_replicate"' in line)
    assert start.startswith("all_reduce_1: f32[2, 2] = c10d.all_reduce(wait_tensor_1,")
    assert text[-1] == 'return loss("loss", wait_tensor), gradient("w", wait_tensor_2)'
    reasons = [verdict.reason for verdict in done.history[0].verdicts]
    assert reasons[1:] == [
        "reduces a gradient to the rows that each rank updates",
        "averages rows over the ranks that hold the same",
    ]


def test_of_whole_parameters_the_own_rows_are_given_to_the_optimizer():
    text, _ = after(GRADIENT, ScatterGradients(whole=True))
    assert text[2] == 'rank_dp: int = scalar("rank.dp")'
    assert text[-4:] == lines("""
        mul: int = operator.mul(rank_dp, 2)
        add: int = operator.add(mul, 2)
        slice_1: f32[2, 2] = aten.slice.Tensor(w, 0, mul, add)
        return loss("loss", wait_tensor), gradient("w", wait_tensor_1), shard("w", slice_1)
    """)
