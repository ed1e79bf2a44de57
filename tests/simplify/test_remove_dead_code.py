"""Dead nodes go; whatever has an effect stays: writes, random draws, collectives, checks."""

from __future__ import annotations

import textwrap

from crossfade.graph.passes import run_passes
from crossfade.graph.text import parse, render
from crossfade.simplify.remove_dead_code import RemoveDeadCode


def removed(text: str) -> tuple[str, dict]:
    done = run_passes(parse(textwrap.dedent(text), groups={"dp": 2}), [RemoveDeadCode()])
    return render(done), dict(done.history[0].counts)


def test_whole_dead_chains_go():
    text, counts = removed("""
        x: f32[4] = input("x")
        y: f32[4] = input("y")
        k: f32[4] = constant("k")
        a: f32[4] = aten.add.Tensor(y, k)
        pair: (f32[2], f32[2]) = aten.split.Tensor(a, 2)
        first: f32[2] = pair[0]
        n: f32[4] = aten.neg(x)
        return output("n", n)
    """)
    assert text.splitlines() == [
        'x: f32[4] = input("x")',
        'y: f32[4] = input("y")',
        "n: f32[4] = aten.neg(x)",
        'return output("n", n)',
    ]
    assert counts == {"removed": 4}


def test_effects_stay():
    text = textwrap.dedent("""
        x: f32[4] = input("x")
        c: f32[4] = aten.clone(x)
        write: f32[4] = aten.add_.Tensor(c, 1)
        draw: f32[4] = aten.rand_like(x)
        drop: (f32[4], b8[4]) = aten.native_dropout(x, 0.5, True)
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        n: f32[4] = aten.neg(c)
        return output("n", n)
    """).strip()
    assert removed(text) == (text, {"removed": 0})


def test_undeclared_writes_stay():
    """Training batch norm moves its running statistics though its schema does not say so."""
    text = textwrap.dedent("""
        x: f32[4, 2] = input("x")
        m: f32[2] = buffer("m")
        v: f32[2] = buffer("v")
        dead: f32[4, 2] = aten.batch_norm(x, None, None, m, v, {training}, 0.1, 1e-05, False)
        return output("x", x)
    """).strip()
    assert removed(text.format(training=True))[1] == {"removed": 0}
    assert removed(text.format(training=False))[1] == {"removed": 1}


def test_dropout_outside_of_training_goes():
    text = textwrap.dedent("""
        x: f32[4] = input("x")
        dead: f32[4] = aten.dropout(x, 0.5, {training})
        return output("x", x)
    """).strip()
    assert removed(text.format(training=True))[1] == {"removed": 0}
    assert removed(text.format(training=False))[1] == {"removed": 1}
