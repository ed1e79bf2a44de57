"""Starts rise and waits sink within the peak of live memory that the program had, and no farther."""

from __future__ import annotations

import textwrap
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfade.communicate import rising, sinking
from crossfade.communicate.hiding import Hiding
from crossfade.communicate.raise_gathers import RaiseGathers
from crossfade.communicate.raise_launches import RaiseLaunches
from crossfade.communicate.sink_waits import SinkWaits
from crossfade.graph import collectives
from crossfade.graph.memory import memory_curve
from crossfade.graph.order import Order
from crossfade.graph.passes import Pass, run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse
from crossfade.graph.verify import verify
from tests.properties.sampled_programs import Machine, Sampled, sampled_programs

PASSES: tuple[Pass, ...] = (RaiseLaunches(), RaiseLaunches(gathers=True), SinkWaits(), RaiseGathers())
FEWER = settings(max_examples=100, deadline=None)

CASES: dict[str, tuple[Pass, str, str, list[str]]] = {
    "a gather that would raise the peak stays": (
        RaiseGathers(),
        """
        x: f32[8] = input("x")
        p: f32[32] = parameter("p")
        a: f32[32] = aten.new_empty(x, [32])
        b: f32[32] = aten.exp(a)
        c: f32[] = aten.sum(b)
        g: f32[64] = c10d.all_gather_into_tensor(p, 2, "dp")
        w: f32[64] = c10d.wait_tensor(g)
        d: f32[] = aten.sum(w)
        return output("c", c), output("d", d)
        """,
        "a b c g w d",
        ["g: left alone: earlier it would hold more than the peak of live memory"],
    ),
    "one that fits rises": (
        RaiseGathers(),
        """
        x: f32[8] = input("x")
        p: f32[16] = parameter("p")
        a: f32[8] = aten.exp(x)
        b: f32[8] = aten.exp(a)
        g: f32[32] = c10d.all_gather_into_tensor(p, 2, "dp")
        w: f32[32] = c10d.wait_tensor(g)
        d: f32[32] = aten.exp(w)
        return output("b", b), output("d", d)
        """,
        "g a b w d",
        [
            "g: moved: started as early as what it needs and the peak of live memory allow: 2 nodes earlier, after p",
        ],
    ),
    "what is exchanged is larger than what it is made from: it rises as far as fits": (
        RaiseLaunches(),
        """
        x: f32[8] = input("x")
        y: f32[32] = input("y")
        a: f32[8] = aten.exp(x)
        b: f32[32] = aten.new_empty(x, [32])
        c: f32[] = aten.sum(b)
        d: f32[8] = aten.sin(x)
        r: f32[32] = c10d.broadcast(y, 0, "dp")
        w: f32[32] = c10d.wait_tensor(r)
        e: f32[] = aten.sum(w)
        return output("c", c), output("d", d), output("e", e), output("a", a)
        """,
        "a b c r d w e",
        ["r: moved: started as early as the peak of live memory allows: 1 nodes earlier, after c"],
    ),
    "a wait sinks as far as what is reduced may be kept": (
        SinkWaits(),
        """
        x: f32[8] = input("x")
        a: f32[8] = aten.neg(x)
        s: f32[4] = c10d.reduce_scatter_tensor(a, "sum", 2, "dp")
        w: f32[4] = c10d.wait_tensor(s)
        b: f32[8] = aten.neg(x)
        c: f32[8] = aten.neg(b)
        y: f32[4] = aten.exp(w)
        return output("y", y), output("w", w), output("c", c)
        """,
        "a s b w c y",
        ["s: moved: waited for as late as the peak of live memory allows: 1 nodes later, before c"],
    ),
    "a wait that can sink nowhere stays": (
        SinkWaits(),
        """
        x: f32[8] = input("x")
        a: f32[8] = aten.neg(x)
        s: f32[4] = c10d.reduce_scatter_tensor(a, "sum", 2, "dp")
        w: f32[4] = c10d.wait_tensor(s)
        b: f32[16] = aten.new_empty(x, [16])
        c: f32[] = aten.sum(b)
        y: f32[4] = aten.exp(w)
        return output("y", y), output("c", c)
        """,
        "a s w b c y",
        ["s: left alone: later it would hold more than the peak of live memory"],
    ),
    "a copy of the input travels: an all-reduce holds nothing and sinks past the peak": (
        SinkWaits(),
        """
        x: f32[8] = input("x")
        a: f32[8] = aten.neg(x)
        s: f32[8] = c10d.all_reduce(a, "sum", "dp")
        w: f32[8] = c10d.wait_tensor(s)
        b: f32[16] = aten.new_empty(x, [16])
        c: f32[] = aten.sum(b)
        y: f32[8] = aten.exp(w)
        return output("y", y), output("c", c)
        """,
        "a s b c w y",
        ["s: moved: waited for just before its first use: 2 nodes later, before y"],
    ),
    "a bucket and the copies out of it are there at once: they sink to where both have room": (
        SinkWaits(),
        """
        x: f32[2, 2] = input("x")
        s: f32[4, 2] = c10d.all_gather_into_tensor(x, 2, "dp")
        w: f32[4, 2] = c10d.wait_tensor(s)
        parts: (f32[4, 1], f32[4, 1]) = aten.split.Tensor(w, 1, 1)
        a: f32[4, 1] = parts[0]
        b: f32[4, 1] = parts[1]
        ca: f32[4, 1] = aten.clone(a, memory_format=contiguous_format)
        cb: f32[4, 1] = aten.clone(b, memory_format=contiguous_format)
        e: f32[2, 2] = aten.mm(x, x)
        na: f32[4, 1] = aten.neg(ca)
        nb: f32[4, 1] = aten.neg(cb)
        return output("a", na), output("b", nb), output("e", e)
        """,
        "s w parts a b ca cb e na nb",
        ["s: left alone: later it would hold more than the peak of live memory"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_moved_as_far_as_memory_lets_it(name: str) -> None:
    step_pass, text, order, verdicts = CASES[name]
    program = parse(textwrap.dedent(text), groups={"dp": 2})
    done = run_passes(program, [step_pass])
    assert [str(verdict) for verdict in done.history[0].verdicts] == verdicts
    assert [node.name for node in done.graph.nodes if node.op == "call_function"] == order.split()
    assert peak(done) <= peak(program)
    assert not run_passes(done, [step_pass]).history[-1].changed


def peak(program: Program) -> int:
    """Counted node by node, as `graph/memory.py` does for a whole program: not as a change to what was before."""
    return memory_curve(program).peak


def hidden(program: Program) -> dict[str, int]:
    """Bytes of each collective under which a matmul is computed, by its start."""
    hiding = Hiding(Order(program.graph))
    return {
        each.node.name: each.bytes if hiding.window(each).hidden_by is not None else 0
        for each in collectives.find(program.graph)
    }


EXCHANGES = {
    "gather": ("f32[{0}]", 'c10d.all_gather_into_tensor({1}, 2, "{2}")', 2),
    "scatter": ("f32[{0}]", 'c10d.reduce_scatter_tensor({1}, "sum", 2, "{2}")', 0.5),
    "reduce": ("f32[{0}]", 'c10d.all_reduce({1}, "sum", "{2}")', 1),
    "exchange": ("f32[{0}]", 'c10d.all_to_all_single({1}, [{0} // 2, {0} // 2], [{0} // 2, {0} // 2], "{2}")', 1),
    "write": ("f32[{0}]", 'c10d.all_reduce_({1}, "sum", "{2}")', 1),
}


def drawn(seed: int) -> Program:
    """Collectives of many sizes between matmuls, large temporaries, buckets that are taken apart, lists, and writes."""
    draw = Random(seed)
    lines = ['x: f32[8, 8] = input("x")', 'p: f32[64] = parameter("p")']
    last, flat, late = "x", ["p"], list[tuple[str, int]]()
    for number in range(draw.randint(8, 40)):
        kind = draw.choice(["mm", "mm", "large", "flat", "bucket", "list", "use", *EXCHANGES])
        if kind == "mm":
            lines.append(f"m{number}: f32[8, 8] = aten.mm({last}, x)")
            last = f"m{number}"
        elif kind == "large":
            lines.append(f"l{number}: f32[{draw.choice([64, 256, 1024])}] = aten.new_empty(x, [{{}}])")
            lines[-1] = lines[-1].format(lines[-1].split("[")[1].split("]")[0])
            lines.append(f"n{number}: f32[] = aten.sum(l{number})")
        elif kind == "flat":
            lines.append(f"v{number}: f32[64] = aten.view({last}, [64])")
            lines.append(f"flat{number}: f32[64] = aten.neg(v{number})")
            flat.append(f"flat{number}")
        elif kind == "bucket":
            lines.append(f'bucket{number}: f32[128] = c10d.all_gather_into_tensor({draw.choice(flat)}, 2, "dp")')
            lines.append(f"w{number}: f32[128] = c10d.wait_tensor(bucket{number})")
            lines.append(f"o{number}: (f32[2, 40], f32[2, 24]) = crossfade.unpack(w{number}, 2, [40, 24])")
            for part, size in enumerate((40, 24)):
                lines.append(f"o{number}_{part}: f32[2, {size}] = o{number}[{part}]")
                late.append((f"o{number}_{part}", 2 * size))
        elif kind == "list":
            both = f"[{draw.choice(flat)}, {draw.choice(flat)}]"
            lines.append(
                f'c{number}: (f32[32], f32[32]) = c10d.reduce_scatter_tensor_coalesced({both}, "sum", 2, "tp")'
            )
            for part in range(2):
                lines.append(f"c{number}_{part}: f32[32] = c{number}[{part}]")
                lines.append(f"w{number}_{part}: f32[32] = c10d.wait_tensor(c{number}_{part})")
                late.append((f"w{number}_{part}", 32))
        elif kind == "use" and late:
            lines.append(use(*late.pop(draw.randrange(len(late))), number))
        elif kind in EXCHANGES:
            made, call, factor = EXCHANGES[kind]
            source, size = draw.choice(flat), int(64 * factor)
            if kind == "write":
                lines.append(f"k{number}: f32[64] = aten.clone({source})")
                source = f"k{number}"
            call = call.format(size, source, draw.choice(["dp", "tp"])).replace("64 // 2", "32")
            lines.append(f"s{number}: {made.format(size)} = {call}")
            lines.append(f"w{number}: {made.format(size)} = c10d.wait_tensor(s{number})")
            late.append((f"w{number}", size))
    lines += [use(name, size, 100 + number) for number, (name, size) in enumerate(late)]
    sums = [line.split(":")[0] for line in lines if "aten.sum" in line]
    lines.append("return " + ", ".join(f'output("{name}", {name})' for name in [last, *sums]))
    return parse("\n".join(lines), groups={"dp": 2, "tp": 2})


def use(name: str, size: int, number: int) -> str:
    return f"use{number}: f32[] = aten.sum({name})"


@pytest.mark.parametrize("seed", range(80))
def test_no_peak_rises_no_overlap_is_lost_and_groups_keep_their_order(seed: int) -> None:
    program = drawn(seed)
    before, most = hidden(program), peak(program)
    for step_pass in PASSES:
        done = run_passes(program, [step_pass])
        verify(done, recompute=True)
        assert peak(done) <= most, step_pass.name
        assert all(size >= before[name] for name, size in hidden(done).items()), step_pass.name
    done = run_passes(program, [RaiseLaunches(), SinkWaits(), RaiseGathers()])
    assert peak(done) <= most
    for group in ("dp", "tp"):
        order = [[c.node.name for c in collectives.find(each.graph) if c.group == group] for each in (program, done)]
        assert order[0] == order[1]


def test_drawn_programs_move_and_are_held() -> None:
    """So that the test above tries what it is about."""
    reasons = [
        verdict.reason
        for seed in range(80)
        for record in run_passes(drawn(seed), [RaiseLaunches(), SinkWaits(), RaiseGathers()]).history
        for verdict in record.verdicts
    ]
    for reason in (
        rising.HELD,
        sinking.HELD,
        "started as early as the peak of live memory allows",
        "waited for as late as the peak of live memory allows",
        "started as early as it can be",
        "waited for just before its first use",
    ):
        assert reasons.count(reason) >= 10, reason


@FEWER
@given(sampled_programs(), st.sampled_from(PASSES))
def test_results_stay_and_so_does_the_peak(sampled: Sampled, step_pass: Pass) -> None:
    program = sampled.program
    expected = Machine().run(program, list(program.graph.nodes))
    done = run_passes(program, [step_pass])
    assert peak(done) <= peak(program)
    assert Machine().run(done, list(done.graph.nodes)) == expected
