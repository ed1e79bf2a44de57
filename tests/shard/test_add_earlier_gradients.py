"""Gradients that have waited are added before they are exchanged."""

from __future__ import annotations

import textwrap

from crossfade.graph.passes import run_passes
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify
from crossfade.shard.add_earlier_gradients import AddEarlierGradients
from crossfade.shard.average_gradients import AverageGradients

TEXT = """
w: f32[2] = parameter("w")
scale: f64[2] = parameter("scale")
g: f32[2] = aten.neg(w)
h: f64[2] = aten.neg(scale)
l: f32[] = aten.sum(g)
return loss("loss", l), gradient("w", g), gradient("scale", h), output("o", g)
"""


def test_each_gradient_has_an_input_of_its_own_kind_and_one_number_is_shared():
    done = run_passes(parse(TEXT, groups={"dp": 2}), [AddEarlierGradients(), AverageGradients()])
    verify(done, recompute=True)
    expected = """
        w: f32[2] = parameter("w")
        scale: f64[2] = parameter("scale")
        scale_1: f32[] = earlier(":scale")
        w_earlier: f32[2] = earlier("w:earlier")
        scale_earlier: f64[2] = earlier("scale:earlier")
        g: f32[2] = aten.neg(w)
        mul: f32[2] = aten.mul.Tensor(w_earlier, scale_1)
        add: f32[2] = aten.add.Tensor(g, mul)
        all_reduce_1: f32[2] = c10d.all_reduce(add, "avg", "dp")
        wait_tensor_1: f32[2] = c10d.wait_tensor(all_reduce_1)
        h: f64[2] = aten.neg(scale)
        mul_1: f64[2] = aten.mul.Tensor(scale_earlier, scale_1)
        add_1: f64[2] = aten.add.Tensor(h, mul_1)
        all_reduce_2: f64[2] = c10d.all_reduce(add_1, "avg", "dp")
        wait_tensor_2: f64[2] = c10d.wait_tensor(all_reduce_2)
        l: f32[] = aten.sum(g)
        all_reduce: f32[] = c10d.all_reduce(l, "avg", "dp")
        wait_tensor: f32[] = c10d.wait_tensor(all_reduce)
        return loss("loss", wait_tensor), gradient("w", wait_tensor_1), gradient("scale", wait_tensor_2), \
output("o", g)
    """
    assert render(done) == textwrap.dedent(expected).strip()
    assert done.history[0].counts == {"added": 2}


def test_without_gradients_there_is_nothing_to_add():
    done = run_passes(parse('x: f32[2] = input("x")\nreturn output("x", x)'), [AddEarlierGradients()])
    assert not done.history[0].changed and len(done.inputs) == 1
