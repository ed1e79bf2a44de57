"""Gathers started early: how far, why no further, and never above the peak of live memory."""

from __future__ import annotations

import random
import textwrap

import pytest

from crossfade.communicate.raise_gathers import RaiseGathers
from crossfade.graph import collectives
from crossfade.graph.memory import memory_curve
from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse
from crossfade.graph.verify import verify


def raised(text: str) -> Program:
    done = run_passes(parse(textwrap.dedent(text), groups={"dp": 2}), [RaiseGathers()])
    verify(done, recompute=True)
    return done


def names(program: Program) -> list[str]:
    return [node.name for node in program.graph.nodes if node.op == "call_function"]


def test_gathers_share_what_is_left_below_the_peak_in_their_order() -> None:
    """The peak of 1,024 bytes at `big` leaves room for both gathers of 256, and not for the third."""
    done = raised("""
        x: f32[32] = input("x")
        p: f32[32] = parameter("p")
        a: f32[32] = aten.neg(x)
        b: f32[32] = aten.exp(a)
        g: f32[64] = c10d.all_gather_into_tensor(p, 2, "dp")
        w: f32[64] = c10d.wait_tensor(g)
        c: f32[] = aten.sum(w)
        d: f32[32] = aten.exp(b)
        h: f32[64] = c10d.all_gather_into_tensor(p, 2, "dp")
        v: f32[64] = c10d.wait_tensor(h)
        e: f32[] = aten.sum(v)
        big: f32[256] = aten.new_empty(x, [256])
        f: f32[] = aten.sum(big)
        k: f32[64] = c10d.all_gather_into_tensor(p, 2, "dp")
        u: f32[64] = c10d.wait_tensor(k)
        i: f32[] = aten.sum(u)
        return output("c", c), output("d", d), output("e", e), output("f", f), output("i", i)
    """)
    assert names(done) == ["g", "h", "a", "b", "w", "c", "d", "v", "e", "big", "f", "k", "u", "i"]
    assert [str(verdict) for verdict in done.history[0].verdicts] == [
        "g: moved: started as early as what it needs and the peak of live memory allow: 2 nodes earlier, after p",
        "h: moved: started as early as what it needs and the peak of live memory allow: 6 nodes earlier, after p",
        "k: left alone: earlier it would hold more than the peak of live memory",
    ]


def test_what_prepares_the_input_rises_too_and_what_it_needs_does_not() -> None:
    done = raised("""
        x: f32[32, 32] = input("x")
        m: f32[32, 32] = aten.mm(x, x)
        n: f32[32, 32] = aten.mm(m, x)
        o: f32[32, 32] = aten.mm(n, n)
        q: f32[32, 32] = aten.mul.Tensor(m, 2)
        g: f32[64, 32] = c10d.all_gather_into_tensor(q, 2, "dp")
        w: f32[64, 32] = c10d.wait_tensor(g)
        y: f32[64, 32] = aten.mm(w, o)
        big: f32[9000] = aten.new_empty(x, [9000])
        z: f32[64, 32] = aten.mm(y, x)
        return output("z", z), output("big", big)
    """)
    assert names(done) == ["m", "q", "g", "n", "o", "w", "y", "big", "z"]


@pytest.mark.parametrize("seed", range(30))
def test_the_peak_never_rises_and_nothing_starts_later(seed: int) -> None:
    draw = random.Random(seed)
    lines, values = ['x: f32[8] = input("x")', 'p: f32[64] = parameter("p")'], ["x"]
    for number in range(40):
        kind, source = draw.choice(["neg", "exp", "gather", "large"]), draw.choice(values[-6:])
        if kind == "gather":
            lines.append(f'g{number}: f32[128] = c10d.all_gather_into_tensor(p, 2, "{draw.choice(["dp", "tp"])}")')
            lines.append(f"w{number}: f32[128] = c10d.wait_tensor(g{number})")
            lines.append(f"v{number}: f32[8] = aten.slice.Tensor(w{number}, 0, 0, 8)")
            lines.append(f"n{number}: f32[8] = aten.add.Tensor(v{number}, {source})")
        elif kind == "large":
            lines.append(f"e{number}: f32[64, 8] = aten.expand({source}, [64, 8])")
            lines.append(f"c{number}: f32[64, 8] = aten.exp(e{number})")
            lines.append(f"n{number}: f32[8] = aten.sum.dim_IntList(c{number}, [0])")
        else:
            lines.append(f"n{number}: f32[8] = aten.{kind}({source})")
        values.append(f"n{number}")
    lines.append("return " + ", ".join(f'output("{name}", {name})' for name in values[-3:]))
    program = parse("\n".join(lines), groups={"dp": 2, "tp": 2})
    done = run_passes(program, [RaiseGathers()])
    verify(done, recompute=True)
    assert memory_curve(done).peak <= memory_curve(program).peak
    hidden = [distances(each) for each in (program, done)]
    assert all(after >= before for before, after in zip(*(h.values() for h in hidden), strict=True))
    for group in ("dp", "tp"):
        order = [[c.node.name for c in collectives.find(each.graph) if c.group == group] for each in (program, done)]
        assert order[0] == order[1]


def distances(program: Program) -> dict[str, int]:
    """How many operators run while each gather travels."""
    position = {node: place for place, node in enumerate(program.graph.nodes)}
    starts = {node for c in collectives.find(program.graph) for node in (c.node, *c.waits)}
    return {
        c.node.name: sum(
            position[c.node] < position[node] < position[c.waits[0]] for node in position if node not in starts
        )
        for c in sorted(collectives.find(program.graph), key=lambda c: c.node.name)
    }
