"""Parameters gathered before their first use, whatever their rows."""

from __future__ import annotations

from crossfade.shard.gather_parameters import GatherParameters
from tests.shard.parts import after, lines


def test_even_rows_need_no_cut_and_single_numbers_stay():
    text, done = after(
        """
        w: f32[4] = parameter("w")
        s: f32[] = parameter("s")
        x: f32[4] = input("x")
        mul: f32[4] = aten.mul.Tensor(x, s)
        add: f32[4] = aten.add.Tensor(mul, w)
        sub: f32[4] = aten.sub.Tensor(add, w)
        return output("y", sub)
        """,
        GatherParameters(),
    )
    assert text == lines("""
        w: f32[2] = parameter("w")
        s: f32[] = parameter("s")
        x: f32[4] = input("x")
        mul: f32[4] = aten.mul.Tensor(x, s)
        all_gather_into_tensor: f32[4] = c10d.all_gather_into_tensor(w, 2, "dp")
        wait_tensor: f32[4] = c10d.wait_tensor(all_gather_into_tensor)
        add: f32[4] = aten.add.Tensor(mul, wait_tensor)
        sub: f32[4] = aten.sub.Tensor(add, wait_tensor)
        return output("y", sub)
    """)
    verdicts = {verdict.subject: verdict.reason for verdict in done.history[0].verdicts}
    assert verdicts["s"] == "a single number, kept whole on every rank"
    assert verdicts["all_gather_into_tensor"] == "gathers a parameter before its first use"


def test_an_unused_parameter_is_split_and_not_gathered():
    text, done = after(
        """
        w: f32[3, 2] = parameter("w")
        x: f32[4] = input("x")
        return output("y", x)
        """,
        GatherParameters(),
    )
    assert text[0] == 'w: f32[2, 2] = parameter("w")'
    assert done.history[0].counts == {"split": 1, "gathered": 0}


def test_a_parameter_that_is_a_result_is_gathered_at_the_end():
    text, _ = after(
        """
        w: f32[1] = parameter("w")
        x: f32[4] = input("x")
        neg: f32[4] = aten.neg(x)
        return output("y", neg), output("w", w)
        """,
        GatherParameters(),
    )
    assert text[3:] == lines("""
        all_gather_into_tensor: f32[2] = c10d.all_gather_into_tensor(w, 2, "dp")
        wait_tensor: f32[2] = c10d.wait_tensor(all_gather_into_tensor)
        slice_1: f32[1] = aten.slice.Tensor(wait_tensor, 0, 0, 1)
        return output("y", neg), output("w", slice_1)
    """)


def test_parameters_to_keep_whole_stay_what_they_are():
    text = """
        w: f32[4, 2] = parameter("w")
        v: f32[4, 2] = parameter("v")
        mul: f32[4, 2] = aten.mul.Tensor(w, v)
        return output("y", mul)
    """
    found, done = after(text, GatherParameters(whole=("w",)))
    assert found[:2] == ['w: f32[4, 2] = parameter("w")', 'v: f32[2, 2] = parameter("v")']
    assert str(done.history[0].verdicts[0]) == "w: left alone: kept whole on every rank, gathered when updated"
