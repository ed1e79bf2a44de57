"""Buffers that samples change are averaged; those that change alike on every rank are not."""

from __future__ import annotations

import pytest

from crossfade.shard.average_buffers import AverageBuffers
from tests.shard.parts import after, lines


def test_integers_take_the_first_ranks_value():
    found, _ = after(
        """
        n: i64[2] = buffer("n")
        x: i64[2] = input("x")
        add: i64[2] = aten.add.Tensor(n, x)
        return update("n", add)
        """,
        AverageBuffers(),
    )
    assert found == lines("""
        n: i64[2] = buffer("n")
        x: i64[2] = input("x")
        add: i64[2] = aten.add.Tensor(n, x)
        broadcast: i64[2] = c10d.broadcast(add, 0, "dp")
        wait_tensor: i64[2] = c10d.wait_tensor(broadcast)
        return update("n", wait_tensor)
    """)


SAME = {
    "it follows from the buffer alone": "add: f32[2] = aten.add.Tensor(b, 1)",
    "all ranks have reduced it": 's = c10d.all_reduce(x, "sum", "dp")\nadd = c10d.wait_tensor(s)',
    "all ranks have gathered it": 's = c10d.all_gather_into_tensor(h, 2, "dp")\nadd = c10d.wait_tensor(s)',
    "all ranks have it from one": 's = c10d.broadcast(x, 0, "dp")\nadd = c10d.wait_tensor(s)',
}


@pytest.mark.parametrize("why", SAME)
def test_what_is_the_same_on_every_rank_is_left(why: str):
    body = SAME[why].replace("s = ", "s: f32[2] = ").replace("add = ", "add: f32[2] = ")
    head = 'b: f32[2] = buffer("b")\nx: f32[2] = input("x")\nh: f32[1] = input("h")'
    _, done = after(f'{head}\n{body}\nreturn update("b", add)', AverageBuffers())
    assert not done.history[0].changed and done.history[0].counts == {"averaged": 0}


def test_a_reduce_scattered_value_differs_between_ranks():
    text = """
        b: f32[1] = buffer("b")
        x: f32[2] = input("x")
        s: f32[1] = c10d.reduce_scatter_tensor(x, "sum", 2, "dp")
        w: f32[1] = c10d.wait_tensor(s)
        return update("b", w)
        """
    _, done = after(text, AverageBuffers())
    assert done.history[0].counts == {"averaged": 1}


def test_updates_of_parameters_are_not_buffers():
    text = (
        'w: f32[2] = parameter("w")\nx: f32[2] = input("x")\na: f32[2] = aten.add.Tensor(w, x)\nreturn update("w", a)'
    )
    _, done = after(text, AverageBuffers())
    assert not done.history[0].changed
