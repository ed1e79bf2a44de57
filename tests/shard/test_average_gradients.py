"""One average for each gradient and the loss, where it is ready."""

from __future__ import annotations

import textwrap

from crossfade.graph.passes import run_passes
from crossfade.graph.program import MADE_FOR
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify
from crossfade.shard.average_gradients import AverageGradients


def test_gradients_and_loss_only_each_where_it_is_ready():
    program = parse(
        textwrap.dedent("""
        w: f32[2] = parameter("w")
        b: f32[2] = buffer("b")
        g: f32[2] = aten.neg(w)
        l: f32[] = aten.sum(g)
        b1: f32[2] = aten.add.Tensor(b, 1)
        return loss("loss", l), gradient("w", g), gradient("tied", g), update("b", b1), output("o", g)
    """),
        groups={"tp": 2},
    )
    done = run_passes(program, [AverageGradients("tp")])
    verify(done, recompute=True)
    expected = """
        w: f32[2] = parameter("w")
        b: f32[2] = buffer("b")
        g: f32[2] = aten.neg(w)
        all_reduce_2: f32[2] = c10d.all_reduce(g, "avg", "tp")
        wait_tensor_2: f32[2] = c10d.wait_tensor(all_reduce_2)
        all_reduce_1: f32[2] = c10d.all_reduce(g, "avg", "tp")
        wait_tensor_1: f32[2] = c10d.wait_tensor(all_reduce_1)
        l: f32[] = aten.sum(g)
        all_reduce: f32[] = c10d.all_reduce(l, "avg", "tp")
        wait_tensor: f32[] = c10d.wait_tensor(all_reduce)
        b1: f32[2] = aten.add.Tensor(b, 1)
        return loss("loss", wait_tensor), gradient("w", wait_tensor_1), gradient("tied", wait_tensor_2), \
update("b", b1), output("o", g)
    """
    assert render(done) == textwrap.dedent(expected).strip()
    assert [str(v) for v in done.history[0].verdicts] == [
        "all_reduce [loss]: inserted: averages the loss, where it is ready",
        "all_reduce_1 [w]: inserted: averages a gradient, where it is ready",
        "all_reduce_2 [tied]: inserted: averages a gradient, where it is ready",
    ]
    assert [v.bytes for v in done.history[0].verdicts] == [4, 8, 8]
    assert {node.meta.get(MADE_FOR) for node in done.graph.nodes} == {None, "loss", "w", "tied"}


def test_a_gradient_that_is_an_input_is_averaged_below_all_inputs():
    text = 'x: f32[2] = input("x")\ny: f32[2] = input("y")\nreturn gradient("w", x), output("y", y)'
    done = run_passes(parse(text, groups={"dp": 2}), [AverageGradients()])
    assert [node.name for node in done.graph.nodes] == ["x", "y", "all_reduce", "wait_tensor", "output"]


def test_nothing_to_average():
    done = run_passes(parse('x: f32[2] = input("x")\nreturn output("x", x)'), [AverageGradients()])
    assert not done.history[0].changed and not done.history[0].verdicts
