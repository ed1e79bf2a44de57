"""Calibration on two real ranks: one answer, possible numbers, predictions near what is measured right then."""

from __future__ import annotations

import itertools
import math
import statistics
import time
import unittest.mock
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from crossfade import Ranks
from crossfade.cost.calibrate import MB, best_piece, calibrate, rows
from crossfade.cost.machine import Link, Machine
from crossfade.cost.machine_parts import fitted
from crossfade.errors import MachineError
from crossfade.graph import collectives
from crossfade.graph.collectives import Kind


def calibrated_and_measured() -> tuple[str, float]:
    """The machine as JSON, and the seconds of a 16 MB all-reduce on this rank, timed before and after."""
    times = [one_all_reduce() for _ in range(4)]
    machine = calibrate("here", {"dp": dist.group.WORLD}, seconds=1.5)
    times += [one_all_reduce() for _ in range(4)]
    return machine.to_json(), statistics.median(times)


def one_all_reduce() -> float:
    """Seconds of 16 MB in pieces of 1 MB, which is what a link's figures are for."""
    pieces = torch.ones(4 * MB).chunk(16)
    dist.barrier()
    start = time.perf_counter()
    started = [collectives.all_reduce(value, "sum", dist.group.WORLD.group_name) for value in pieces]  # type: ignore[union-attr]
    for value in started:
        collectives.wait(value)
    return time.perf_counter() - start


def agreed_machine(answers: list[tuple[str, float]]) -> tuple[Machine, float]:
    (first, here), (second, there) = answers
    assert first == second
    return Machine.from_json(first), max(here, there)


def test_ranks_agree_on_a_machine_of_possible_numbers(ranks: Callable[[int], Ranks]) -> None:
    machine, _ = agreed_machine(ranks(2).run(calibrated_and_measured, timeout=240))
    assert (machine.name, list(machine.fabrics), machine.device) == ("here", ["dp"], "cpu")
    assert "dp: 2 ranks on gloo" in machine.source
    fabric = machine.fabric("dp")
    assert all(link.bandwidth < 1e12 and link.latency < 1 for link in fabric.links.values())
    assert 0 < fabric.launch < 0.1
    assert 0 < machine.overhead < 0.01
    assert machine.host_link().bandwidth > 1e6
    assert not machine.host_link().apart
    assert min(machine.flops.values()) > 1e6  # half precision without instructions for it


def pieces_of_a_slow_gather() -> list[int | None]:
    """The pieces found where gathers in fewer than four take twice their bytes' time, and other kinds never do."""

    def once(_: object, kind: Kind, inputs: list[torch.Tensor]) -> float:
        slower = 2 if kind is Kind.ALL_GATHER and len(inputs) < 4 else 1
        return sum(value.nbytes for value in inputs) * slower * 1e-9

    with unittest.mock.patch("crossfade.cost.calibrate._Axis._once", once):
        links = calibrate("here", {"dp": dist.group.WORLD}, seconds=0.1).fabric("dp").links
    return [links[kind].piece for kind in (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.ALL_TO_ALL)]


def test_each_kind_has_its_own_piece(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(pieces_of_a_slow_gather) == [[None, 2 * MB, None]] * 2


def link_whose_pieces_travel_together() -> Link:
    """What is found where all pieces that are started together wait for one latency."""

    def once(_: object, kind: Kind, inputs: list[torch.Tensor]) -> float:
        return 6e-3 + sum(value.nbytes for value in inputs) * 4e-9

    with unittest.mock.patch("crossfade.cost.calibrate._Axis._once", once):
        return calibrate("here", {"dp": dist.group.WORLD}, seconds=0.1).fabric("dp").links[Kind.ALL_REDUCE]


def test_pieces_on_their_way_together_have_one_latency(ranks: Callable[[int], Ranks]) -> None:
    """With one a piece, large collectives would be all latency, and still larger pieces cost next to nothing."""
    found = ranks(2).run(link_whose_pieces_travel_together)[0]
    assert found.latency == pytest.approx(6e-3, rel=0.02)
    assert found.bandwidth == pytest.approx(250e6, rel=0.02)


def told_of_a_link_that_stalls() -> tuple[str, list[str]]:
    """What is said of a link on which every other round of a large gather takes twice as long, and of no other kind."""
    rounds = itertools.count()
    said: list[str] = []

    def once(_: object, kind: Kind, inputs: list[torch.Tensor]) -> float:
        stalls = kind is Kind.ALL_GATHER and len(inputs) > 1 and next(rounds) % 2
        return sum(value.nbytes for value in inputs) * (2 if stalls else 1) * 1e-9

    def warn(text: str, *values: object) -> None:
        said.append(text % values)

    with (
        unittest.mock.patch("crossfade.cost.calibrate._Axis._once", once),
        unittest.mock.patch("crossfade.cost.calibrate.log.warning", warn),
    ):
        machine = calibrate("here", {"dp": dist.group.WORLD}, sizes=(16 * MB, 4096, MB), seconds=0.1)
    return machine.source, said


def test_a_link_that_does_not_keep_its_pace_is_told_of(ranks: Callable[[int], Ranks]) -> None:
    (source, said), (same, unsaid) = ranks(2).run(told_of_a_link_that_stalls)
    assert source == same
    assert source.endswith("; times varied: all_gather on dp by 2.0x")
    assert unsaid == []
    assert [line.partition(";")[0] for line in said] == ["times that vary while calibrating: all_gather on dp by 2.0x"]


@pytest.mark.parametrize(
    ("whole", "piece"),
    [
        ([36, 36, 37, 37, 36, 37, 36], 8),
        ([35, 35, 35, 35, 68, 68, 68], 1),  # as fast at the median, but not to be relied on
        ([36, 36, 37, 37, 36, 37, 500], 8),  # one stall says nothing
    ],
)
def test_a_piece_is_as_good_as_its_slower_rounds(whole: list[float], piece: int) -> None:
    assert best_piece({1: [36, 37, 36, 38, 36, 35, 36], 8: whole}) == piece


@pytest.mark.models
def test_it_predicts_what_is_measured_right_then(ranks: Callable[[int], Ranks]) -> None:
    """Other work on the same cores makes one all-reduce thrice as slow as the next: one of three tries must fit."""
    ratios = []
    for _ in range(3):
        machine, measured = agreed_machine(ranks(2).run(calibrated_and_measured, timeout=60))
        ratios.append(machine.collective_seconds(Kind.ALL_REDUCE, 16 * MB, ranks=2, axis="dp") / measured)
        if 0.5 < ratios[-1] < 2:
            return
    raise AssertionError(f"predicted by measured: {ratios}")


def test_without_ranks_it_says_how_to_get_some() -> None:
    with pytest.raises(MachineError, match=r"no process group.*init_process_group first, or run crossfade calibrate"):
        calibrate("alone", {"dp": None})


def refused() -> list[str]:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    messages = []
    for axes, options in (
        ({"tp": alone}, {}),
        ({"dp": dist.group.WORLD}, {"device": "cuda"}),
        ({"dp": dist.group.WORLD}, {"sizes": (MB, MB)}),
        ({"dp": dist.group.WORLD}, {"device": "mps"}),
    ):
        try:
            calibrate("none", axes, **options)  # type: ignore[arg-type]
        except MachineError as error:
            messages.append(str(error))
    return messages


def test_what_cannot_be_measured_is_refused_before_anything_travels(ranks: Callable[[int], Ranks]) -> None:
    (alone, cuda, sizes, other), _ = ranks(2).run(refused)
    assert alone.startswith("axis 'tp' has one rank: expected at least 2")
    assert cuda.startswith("axis 'dp' would carry cuda tensors over gloo: expected nccl (gloo's all-gather")
    assert sizes.startswith(f"the sizes are [{MB}, {MB}]: expected at least two different ones")
    assert other == "device='mps': expected one of cpu, cuda. Remedy: pass one of them."


def points(latency: float, bandwidth: float, noise: tuple[float, ...]) -> list[tuple[float, float, float]]:
    sizes = [4**i * 1000.0 for i in range(len(noise))]
    return [(1, size, (latency + size / bandwidth) * factor) for size, factor in zip(sizes, noise, strict=True)]


def test_a_fit_finds_the_link_through_noise() -> None:
    found = fitted(points(1e-4, 1e8, (1.1, 0.9, 1.05, 0.95, 1.1, 0.92)))
    assert found.latency == pytest.approx(1e-4, rel=0.15)
    assert found.bandwidth == pytest.approx(1e8, rel=0.15)


@pytest.mark.parametrize(
    "measured",
    [
        [(1, 1e3, 1e-6), (1, 1e4, 1e-4), (1, 1e5, 1e-2)],  # ever slower: no latency explains it
        [(1, 1e3, 1e-2), (1, 1e4, 1e-3), (1, 1e5, 1e-4)],  # the larger the faster: no bandwidth explains it
        [(1, 1e3, 1e-3), (1, 1e3, 1e-3)],  # one size only
    ],
)
def test_a_fit_is_never_negative_or_infinite(measured: list[tuple[float, float, float]]) -> None:
    found = fitted(measured)
    assert found.latency >= 0
    assert 0 < found.bandwidth < math.inf


def test_no_latency_is_longer_than_what_took_the_least() -> None:
    """On a busy machine sizes between 30 kB and 1 MB took alike: all would be latency, at 64 GB/s behind it."""
    small = [(1, 2e3, 2e-4), (1, 3.2e4, 3e-3), (1, 1.3e5, 7.2e-3), (1, 5e5, 6.8e-3)]
    found = fitted([*small, (4, 2e6, 13.4e-3), (16, 8.4e6, 51.5e-3)])
    assert found.bandwidth == pytest.approx(1.7e8, rel=0.05)


def test_rows_say_everything_in_units() -> None:
    from crossfade.cost.presets import preset

    table = rows(preset("h100-nvlink-node"))
    assert table[0] == ("all_reduce", "*", "8 us", "360 GB/s")
    assert table[5] == ("launch", "*", "5 us", "computation 10% slower meanwhile")
    assert ("matrix product", "bfloat16", "", "760 TFLOP/s") in table
    assert table[-3] == ("copy to the host", "cuda", "10 us", "53.55 GB/s")
    assert table[-2:] == [("memory", "cuda", "", "2.78 TB/s"), ("operator", "cuda", "1.6 us", "")]


def test_a_link_is_what_was_fitted() -> None:
    assert fitted([(2, 1000, 0.003), (2, 10_000, 0.012)]) == Link(latency=0.001, bandwidth=1e6)
