"""Bucket sizes from a machine: against a walk through the same story, and against building and predicting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from crossfade.communicate.bucket_all_reduces import BucketAllReduces
from crossfade.cost.estimate import estimate
from crossfade.cost.machine import LATENCY_SHARE, Fabric, Link, Machine
from crossfade.cost.timeline import simulate
from crossfade.graph.collectives import Kind
from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program
from crossfade.schedule.overlap_communication import OverlapCommunication
from crossfade.schedule.planned_bucket_sizes import MB, Load, choose_sizes, loads_of
from tests.schedule.toy_costs import program_of

LAYERS, SIZE = 64, 2**16


def machine(latency: float, bandwidth: float, flops: float = 1e9) -> Machine:
    links = dict.fromkeys(Kind, Link(latency, bandwidth))
    return Machine("toy", {"*": Fabric(links)}, flops={"float32": flops}, memory_bandwidth=1e30)


def backward() -> Program:
    """A chain of products; the gradient of each is summed where it is ready, and all are wanted at the end."""
    lines = ['x: f32[256, 256] = input("x")', "y0 = aten.neg(x)"]
    for i in range(LAYERS):
        lines.append(f"y{i + 1} = aten.mm(y{i}, x)")
        lines.append(f'c{i} = c10d.all_reduce(y{i + 1}, "sum", "dp")')
        lines.append(f"w{i} = c10d.wait_tensor(c{i})")
    lines.append("return " + ", ".join(f'output("{i}", w{i})' for i in range(LAYERS)))
    return program_of("\n".join(lines))


def builder(toy: Machine) -> Callable[[Program, float], Program]:
    def build(program: Program, cap: float) -> Program:
        passes = [BucketAllReduces(cap_mb=cap, first_mb=None), OverlapCommunication(toy)]
        return run_passes(program, passes, keep_text=False)

    return build


def walked(load: Load, buckets: int) -> float:
    """The same story told bucket by bucket."""
    free = 0.0
    for index in range(buckets):
        ready = load.hides * (index + 1) / buckets
        free = max(free, ready) + load.latency + load.bytes / buckets * load.seconds_a_byte
    return free - load.hides


@pytest.mark.parametrize("hides", [0.5, 2.0, 20.0])
@pytest.mark.parametrize("latency", [1e-4, 1e-2])
@pytest.mark.parametrize("buckets", [1, 4, 50])
def test_B8_exposed_is_what_a_walk_through_the_buckets_gives(hides: float, latency: float, buckets: int) -> None:
    load = Load(Kind.ALL_REDUCE, "dp", 100, 10**7, latency, 1e-7, 0.0, hides, 2)
    assert load.exposed(10**7 / buckets) == pytest.approx(walked(load, buckets))


def test_B8_loads_are_read_off_the_program() -> None:
    program, toy = backward(), machine(1e-3, 1e9)
    (load,) = loads_of(program, toy, estimate(program, toy))
    bytes_each = 4 * SIZE
    product = 2 * 256**3 / 1e9
    assert (load.kind, load.group, load.number, load.bytes) == (Kind.ALL_REDUCE, "dp", LAYERS, LAYERS * bytes_each)
    assert (load.latency, load.seconds_a_byte) == (1e-3, pytest.approx(1e-9))
    assert load.hides == pytest.approx((LAYERS - 1) * product, rel=1e-3)


def test_B8_latency_is_a_small_share_of_a_bucket() -> None:
    for latency in (1e-5, 1e-4, 1e-3):
        cap = choose_sizes(backward(), machine(latency, 1e9))[Kind.ALL_REDUCE].cap_mb * MB
        assert latency / (latency + cap * 1e-9) <= LATENCY_SHARE + 1e-9


def test_B8_buckets_grow_with_latency_and_shrink_with_what_hides_them() -> None:
    caps = [choose_sizes(backward(), machine(latency, 1e8))[Kind.ALL_REDUCE].cap_mb for latency in (1e-5, 1e-3, 1e-1)]
    assert caps == sorted(caps) and caps[0] < caps[-1]
    fast, slow = (choose_sizes(backward(), machine(1e-3, 1e7, flops))[Kind.ALL_REDUCE].cap_mb for flops in (1e12, 1e9))
    assert slow < fast


@pytest.mark.parametrize(("bandwidth", "latency", "alone"), [(1e9, 1e-6, 5e5), (4e9, 1e-6, 2e6), (1e9, 1e-3, 4e6)])
def test_what_is_large_enough_and_not_worth_copying_shares_no_bucket(
    bandwidth: float, latency: float, alone: float
) -> None:
    """Each byte is read and written in a copy; a latency is worth as many bytes as travel in four."""
    plain = machine(latency, 1e9)
    fabric = replace(plain.fabric("dp"), launch=1e-3)
    size = choose_sizes(backward(), replace(plain, fabrics={"*": fabric}, memory_bandwidth=bandwidth))[Kind.ALL_REDUCE]
    assert [either.alone_mb * MB for either in (size, size.scaled(2))] == pytest.approx([alone, alone])


@pytest.mark.parametrize(("number", "longest"), [(1, "tp"), (4, "dp")])
def test_sizes_are_those_of_the_group_that_travels_longest(number: int, longest: str) -> None:
    """Latency and bytes both count: a second each of the first group's, 1 + 3 of the second's."""
    lines = ['x: f32[65536] = input("x")', 'y: f32[786432] = input("y")']
    lines += [f'c{i} = c10d.all_reduce(x, "sum", "dp")\nw{i} = c10d.wait_tensor(c{i})' for i in range(number)]
    lines += ['t = c10d.all_reduce(y, "sum", "tp")', "v = c10d.wait_tensor(t)", "a = aten.exp(y)"]
    lines.append("return " + ", ".join(f'output("{i}", w{i})' for i in range(number)) + ', output("v", v)')
    program, toy = program_of("\n".join(lines)), machine(latency=1.0, bandwidth=MB)
    loads = {load.group: load for load in loads_of(program, toy, estimate(program, toy))}
    assert loads["dp"].best_cap() != loads["tp"].best_cap()
    size = choose_sizes(program, toy)[Kind.ALL_REDUCE]
    (other,) = {"dp", "tp"} - {longest}
    assert size.cap_mb == loads[longest].best_cap() / MB
    assert [(group, cap) for group, cap, _ in size.along] == [(other, loads[other].best_cap() / MB)]
    assert [cap for _, cap, _ in size.scaled(2).along] == [2 * loads[other].best_cap() / MB]


def test_each_axis_has_the_least_bucket_that_fills_its_link() -> None:
    """Inside a node a link is full with a sixteenth of the bytes that it takes between nodes."""
    inside, between = Link(1e-6, 16e9), Link(4e-6, 64e9)
    fabrics = {axis: Fabric(dict.fromkeys(Kind, link)) for axis, link in (("tp", inside), ("dp", between))}
    toy = Machine("two axes", fabrics, flops={"float32": 1e15}, memory_bandwidth=1e30)
    lines = ['x: f32[4096] = input("x")']
    for i, axis in enumerate(["dp", "tp"] * 200):
        lines += [f'a{i} = c10d.all_reduce(x, "sum", "{axis}")', f"w{i} = c10d.wait_tensor(a{i})"]
    program = program_of("\n".join([*lines, "return " + ", ".join(f'output("{i}", w{i})' for i in range(400))]))
    size = choose_sizes(program, toy)[Kind.ALL_REDUCE]
    ((axis, cap, _),) = size.along
    chosen = {"tp" if axis == "dp" else "dp": size.cap_mb, axis: cap}
    least = {axis: toy.worthwhile(Kind.ALL_REDUCE, 2, axis) / MB for axis in fabrics}
    assert least["dp"] == pytest.approx(16 * least["tp"])
    assert all(chosen[axis] >= least[axis] * (1 - 1e-9) for axis in fabrics)


CASES = [(1e-4, 1e9, 1e9), (1e-3, 1e8, 1e9), (1e-3, 1e9, 1e11), (1e-4, 1e9, 1e11), (1e-3, 1e8, 1e11), (5e-3, 1e9, 1e12)]


@pytest.mark.parametrize(("latency", "bandwidth", "flops"), CASES)
def test_B8_the_chosen_cap_is_near_the_best_of_many(latency: float, bandwidth: float, flops: float) -> None:
    program, toy = backward(), machine(latency, bandwidth, flops)
    chosen = choose_sizes(program, toy)[Kind.ALL_REDUCE].cap_mb
    built = {cap: builder(toy)(program, cap) for cap in (0.25, 0.5, 1, 2, 4, 8, 16, chosen)}
    seconds = {cap: simulate(done, estimate(done, toy)).seconds for cap, done in built.items()}
    assert seconds[chosen] <= 1.1 * min(seconds.values()), seconds
