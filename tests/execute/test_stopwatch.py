"""Timed runs: the same results, every node and collective accounted for, late ranks seen by those that wait."""

from __future__ import annotations

import math
import textwrap
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from crossfade import Ranks
from crossfade.cost.timeline import Computed, Timeline, Travelled
from crossfade.errors import NotYetError
from crossfade.execute import stopwatch
from crossfade.execute.executable import Executable
from crossfade.execute.stopwatch import Stopwatch, profile
from crossfade.graph.program import Program
from crossfade.graph.text import parse
from tests.several import best_of_several

LATE = 0.4
"""Seconds by which a rank comes late, far above what a busy machine delays the other."""

SMALL = """
x: f32[2] = input("x")
n: f32[2] = aten.neg(x)
s: f32[2] = c10d.all_reduce(n, "sum", "dp")
e: f32[2] = aten.exp(x)
w: f32[2] = c10d.wait_tensor(s)
y: f32[2] = aten.add.Tensor(e, w)
return output("y", y)
"""

EVERY_SPELLING = """
x: f32[8] = input("x")
k: f32[8] = input("k")
j: f32[8] = input("j")
r: f32[8] = c10d.all_reduce(x, "sum", "dp")
g: f32[16] = c10d.all_gather_into_tensor(x, 2, "dp")
c: (f32[16], f32[16]) = c10d.all_gather_into_tensor_coalesced([x, k], 2, "dp")
c0: f32[16] = c[0]
c1: f32[16] = c[1]
p: f32[8] = c10d.all_reduce_(j, "sum", "dp")
e: f32[8] = aten.exp(x)
wr: f32[8] = c10d.wait_tensor(r)
wg: f32[16] = c10d.wait_tensor(g)
w0: f32[16] = c10d.wait_tensor(c0)
w1: f32[16] = c10d.wait_tensor(c1)
wp: f32[8] = c10d.wait_tensor(p)
return output("e", e), output("wr", wr), output("wg", wg), output("w0", w0), output("w1", w1), output("wp", wp)
"""

SAME_MEMORY = """
a: f32[1] = input("a")
b: f32[1] = input("b")
m: f32[16777216] = input("m")
ra: f32[1] = c10d.all_reduce(a, "sum", "dp")
rb: f32[1] = c10d.all_reduce(b, "sum", "dp")
low: f32[8388608] = aten.slice.Tensor(m, 0, 0, 8388608)
high: f32[8388608] = aten.slice.Tensor(m, 0, 8388608, 16777216)
rl: f32[8388608] = c10d.all_reduce_(low, "sum", "dp")
rh: f32[8388608] = c10d.all_reduce_(high, "sum", "dp")
wh: f32[8388608] = c10d.wait_tensor(rh)
total: f32[()] = aten.sum(wh)
wl: f32[8388608] = c10d.wait_tensor(rl)
wa: f32[1] = c10d.wait_tensor(ra)
wb: f32[1] = c10d.wait_tensor(rb)
return output("total", total), output("wl", wl), output("wa", wa), output("wb", wb)
"""


def long_computation(after_launch: int) -> str:
    products = [f"m{i}: f32[512, 512] = aten.mm(m{i - 1}, m0)" for i in range(1, after_launch)]
    return "\n".join([
        'm0: f32[512, 512] = input("m0")',
        's: f32[512, 512] = c10d.all_reduce(m0, "sum", "dp")',
        *products,
        "w: f32[512, 512] = c10d.wait_tensor(s)",
        f'return output("m", m{after_launch - 1}), output("w", w)',
    ])  # fmt: skip


def executable(text: str, group: Any = None) -> Executable:
    return Executable(parse(text, groups={"dp": 2}), {"dp": (group or dist.group.WORLD).group_name})


def profile_on_rank(text: str, inputs: list[Tensor], late: int | None = None) -> tuple[list[Tensor], Timeline]:
    run = executable(text)
    dist.barrier()
    if dist.get_rank() == late:
        time.sleep(LATE)
    results, timeline = profile(run, inputs)
    return list(results), timeline


def plain_and_profiled(text: str, shapes: list[int]) -> list[tuple[list[Tensor], list[Tensor]]]:
    pairs = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed + 10 * dist.get_rank())
        inputs = [torch.randn(size, generator=generator) for size in shapes]
        plain = executable(text)([tensor.clone() for tensor in inputs])
        pairs.append((list(plain), profile_on_rank(text, inputs)[0]))
    return pairs


def wait_for_nobody() -> str:
    group = dist.new_group(timeout=timedelta(seconds=1.5))
    if dist.get_rank():
        return ""
    run = Stopwatch(executable(SMALL, group))
    try:
        run([torch.ones(2)])
    except RuntimeError as error:
        return run.collective_at(error)
    return "no error"


def test_the_code_is_the_plain_one_with_stamps() -> None:
    run = Stopwatch(Executable(parse(SMALL, groups={"dp": 2}), {}))
    assert run.compiled.source == textwrap.dedent("""
        def run(inputs):
            [x] = inputs; inputs.clear()
            n = neg(x); stamp(now())
            s = call(n, 'sum', 'dp'); launched('s', 'dp', s, (n,)); del n; stamp(now())
            e = exp(x); del x; stamp(now())
            arrive('s'); w = call_1(s); del s; stamp(now())
            y = add(e, w); del e, w; stamp(now())
            return (y,)
    """).strip()  # fmt: skip


@pytest.mark.ranks
def test_results_equal_those_of_a_plain_run(ranks: Any) -> None:
    for pairs in ranks(2).run(plain_and_profiled, EVERY_SPELLING, [8, 8, 8]):
        for plain, profiled in pairs:
            assert len(plain) == 6
            assert all(torch.equal(result, other) for result, other in zip(plain, profiled, strict=True))


@pytest.mark.ranks
def test_flights_on_the_same_memory_wait_for_each_other(ranks: Any) -> None:
    inputs = [torch.ones(1), torch.ones(1), torch.ones(2**24)]
    for (total, low, *_), _ in ranks(2).run(profile_on_rank, SAME_MEMORY, inputs, 1):
        assert float(total) == 2**24
        assert bool((low == 2).all())


@pytest.mark.ranks
def test_a_run_is_computation_and_standing_still_without_holes(ranks: Any) -> None:
    for _, timeline in ranks(2).run(profile_on_rank, SMALL, [torch.ones(2)]):
        assert math.isclose(timeline.busy + timeline.exposed, timeline.seconds, rel_tol=1e-9)
        assert [node.name for node in timeline.computation if node.name != "w"] == ["n", "s", "e", "y"]
        (travel,) = timeline.communication
        assert (travel.name, travel.kind, travel.group, travel.bytes) == ("s", "all_reduce", "dp", 8)
        assert 0 < travel.launch <= travel.start <= travel.finish <= timeline.seconds
        assert timeline.source == "measured"


@pytest.mark.ranks
@best_of_several
def test_a_late_rank_is_seen_by_the_one_that_waits(ranks: Any) -> None:
    (_, punctual), (_, late) = ranks(2).run(profile_on_rank, SMALL, [torch.ones(2)], 1)
    assert punctual.exposed > 0.8 * LATE
    assert late.exposed < 0.5 * LATE
    assert punctual.communication[0].finish > 0.8 * LATE
    assert "w" not in [node.name for node in punctual.computation]


@pytest.mark.ranks
@best_of_several
def test_an_arrival_during_computation_is_seen_when_it_happens(ranks: Any) -> None:
    for _, timeline in ranks(2).run(profile_on_rank, long_computation(200), [torch.eye(512)]):
        (travel,) = timeline.communication
        assert travel.exposed == timeline.exposed == 0
        assert travel.finish < 0.9 * travel.needed  # type: ignore[operator]
        assert "w" in [node.name for node in timeline.computation]


@pytest.mark.ranks
def test_an_error_while_waiting_is_raised_where_the_program_waits(ranks: Any) -> None:
    named, _ = ranks(2).run(wait_for_nobody)
    assert named == "all_reduce s of 8 bytes on group 'dp'"


@pytest.mark.gpu
def test_streams_are_timed_by_events() -> None:
    with Ranks(1, backend="nccl", timeout=120) as world:
        [(plain, profiled, timeline)] = world.run(profile_on_cuda)
    assert all(torch.equal(result, other) for result, other in zip(plain, profiled, strict=True))
    assert math.isclose(timeline.busy + timeline.exposed, timeline.seconds, rel_tol=1e-3)
    (travel,) = timeline.communication
    assert 0 < travel.launch <= travel.start <= travel.finish < travel.needed  # type: ignore[operator]
    assert [node.name for node in timeline.computation][:2] == ["s", "m1"]


def profile_on_cuda() -> tuple[list[Tensor], list[Tensor], Timeline]:
    run = executable(long_computation(200))
    run.device = "cuda"  # the text of a program does not say
    inputs = torch.randn(512, 512, device="cuda") / 512**0.5
    plain = run([inputs.clone()])
    timed = Stopwatch(run)
    for _ in range(3):
        profiled = timed([inputs.clone()])
    return [tensor.cpu() for tensor in plain], [tensor.cpu() for tensor in profiled], timed.timeline


def read(text: str, times: list[float], finishes: dict[str, float]) -> Timeline:
    program: Program = parse(text, groups={"real": 2})
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    return stopwatch._Reading(times, finishes, {"real": "dp"}).timeline(nodes)


TWO_IN_A_ROW = """
x: f32[2] = input("x")
r: f32[2] = c10d.all_reduce(x, "sum", "real")
s: f32[2] = c10d.all_reduce(x, "sum", "real")
e: f32[2] = aten.exp(x)
wr: f32[2] = c10d.wait_tensor(r)
ws: f32[2] = c10d.wait_tensor(s)
return output("e", e), output("wr", wr), output("ws", ws)
"""


def test_a_link_carries_one_at_a_time() -> None:
    timeline = read(TWO_IN_A_ROW, [0.0, 1.0, 2.0, 5.0, 5.5, 8.5], {"r": 4.0, "s": 8.0})
    assert timeline == Timeline(
        (Computed("r", 0.0, 1.0), Computed("s", 1.0, 2.0), Computed("e", 2.0, 5.0), Computed("wr", 5.0, 5.5)),
        (
            Travelled("r", "all_reduce", "dp", 8, launch=1.0, start=1.0, finish=4.0, needed=5.0, exposed=0.0),
            Travelled("s", "all_reduce", "dp", 8, launch=2.0, start=4.0, finish=8.0, needed=5.5, exposed=3.0),
        ),
        8.5,
        "measured",
    )


def test_what_arrives_before_its_predecessor_has_no_time_of_its_own() -> None:
    timeline = read(TWO_IN_A_ROW, [0.0, 1.0, 2.0, 5.0, 5.5, 8.5], {"r": 4.0, "s": 3.0})
    assert [(collective.launch, collective.start, collective.finish) for collective in timeline.communication] == [
        (1.0, 1.0, 4.0),
        (2.0, 3.0, 3.0),
    ]


def test_the_end_stands_still_for_what_nobody_waited_for() -> None:
    text = "\n".join(line for line in TWO_IN_A_ROW.splitlines() if not line.startswith(("wr", "ws", "return")))
    timeline = read(text + '\nreturn output("e", e)', [0.0, 1.0, 2.0, 5.0], {"r": 9.0, "s": 7.0})
    assert [(collective.needed, collective.exposed) for collective in timeline.communication] == [
        (None, 2.0),
        (None, 2.0),
    ]
    assert timeline.seconds == 9.0 == timeline.busy + timeline.exposed


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(NotYetError, match="a program on device 'xpu': expected cpu or cuda"):
        stopwatch._clock("xpu")


def test_there_is_no_timeline_before_a_run_or_after_half_of_one() -> None:
    text = 'x: f32[2] = input("x")\ny: f32[1, 2] = aten.view(x, [1, 2])\nreturn output("y", y)'
    run = Stopwatch(Executable(parse(text), {}))
    with pytest.raises(RuntimeError, match="nothing timed yet"):
        _ = run.timeline
    with pytest.raises(RuntimeError, match="invalid for input of size 3"):
        run([torch.ones(3)])
    with pytest.raises(RuntimeError, match="nothing timed yet"):
        _ = run.timeline
    run([torch.ones(2)])
    assert [node.name for node in run.timeline.computation] == ["y"]


ONE_PRODUCT = """
x: f32[512, 512] = input("x")
y: f32[512, 512] = aten.mm(x, x)
return output("y", y)
"""


def test_a_node_says_for_how_long_it_had_a_processor() -> None:
    run = Executable(parse(ONE_PRODUCT), {})
    _, timeline = profile(run, [torch.randn(512, 512)])
    (node,) = timeline.computation
    assert node.on_core is not None
    assert 0 < node.on_core <= node.finish - node.start
    stamps = [(1.0, 0.5), (2.0, 1.25), (4.0, 1.5)]
    clock = stopwatch._clock("cpu")
    assert clock.seconds(stamps) == [0.0, 1.0, 3.0]
    assert clock.on_core(stamps) == [0.75, 0.25]
