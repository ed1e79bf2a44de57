"""The backward gathers for itself what the forward gathered, with views and conversions of it."""

from __future__ import annotations

from crossfade.shard.gather_again import GatherAgain
from tests.shard.parts import after, lines

FORWARD = """
    w: f32[2, 4] = parameter("w")
    x: f32[4, 4] = input("x")
    start: f32[4, 4] = c10d.all_gather_into_tensor(w, 2, "dp")
    done: f32[4, 4] = c10d.wait_tensor(start)
"""


def test_views_and_conversions_of_the_forward_are_made_anew():
    text, _ = after(
        FORWARD
        + """
    half: bf16[4, 4] = aten._to_copy(done, dtype=bf16)
    t: bf16[4, 4] = aten.t(half)
    a: bf16[4, 4] = aten._to_copy(x, dtype=bf16)
    mm: bf16[4, 4] = aten.mm(a, t)
    loss: bf16[] = aten.sum(mm)
    expand: bf16[4, 4] = aten.expand(loss, [4, 4])
    mm_1: bf16[4, 4] = aten.mm(expand, t)
    return loss("loss", loss), output("dx", mm_1)
    """,
        GatherAgain(),
    )
    assert text[-7:] == lines("""
        expand: bf16[4, 4] = aten.expand(loss, [4, 4])
        start_1: f32[4, 4] = c10d.all_gather_into_tensor(w, 2, "dp")
        done_1: f32[4, 4] = c10d.wait_tensor(start_1)
        half_1: bf16[4, 4] = aten._to_copy(done_1, dtype=bf16)
        t_1: bf16[4, 4] = aten.t(half_1)
        mm_1: bf16[4, 4] = aten.mm(expand, t_1)
        return loss("loss", loss), output("dx", mm_1)
    """)


def test_what_one_side_alone_uses_is_left():
    text, done = after(
        FORWARD
        + """
    mm: f32[4, 4] = aten.mm(x, done)
    loss: f32[] = aten.sum(mm)
    return loss("loss", loss)
    """,
        GatherAgain(),
    )
    assert sum("all_gather" in line for line in text) == 1
    assert [verdict.reason for verdict in done.history[0].verdicts] == ["only the forward uses it"]


def test_what_is_computed_from_a_parameter_and_others_is_kept():
    text, _ = after(
        FORWARD
        + """
    mul: f32[4, 4] = aten.mul.Tensor(done, x)
    loss: f32[] = aten.sum(mul)
    scaled: f32[4, 4] = aten.mul.Tensor(mul, loss)
    return loss("loss", loss), output("y", scaled)
    """,
        GatherAgain(),
    )
    assert sum("all_gather" in line for line in text) == 1
