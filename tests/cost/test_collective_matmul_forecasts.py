"""Pipelines computed by hand: pieces, hops and copies beside computation, and what is never chosen."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest

from crossfade.cost.collective_matmul import (
    LEAST_ROWS,
    Exchange,
    Forecast,
    Forecasts,
    call_seconds,
    forecast,
    forecast_gather,
    forecast_scatter,
)
from crossfade.cost.machine import Fabric, Link, Machine
from crossfade.cost.presets import PRESETS
from crossfade.errors import MachineError
from crossfade.graph.collectives import Kind
from tests.cost.toy_machine import toy_machine

MANY = 8 * 10**9
"""Rows of which pieces compute as fast as all of them."""


def machine(latency: float = 0.0, launch: float = 0.0, slows: float = 0.0, **changes: object) -> Machine:
    """1 kB/s of links, and nothing else costs anything unless it is said."""
    fabric = Fabric(dict.fromkeys(Kind, Link(latency, 1e3)), launch=launch, slows_compute=slows)
    return toy_machine(**{"fabrics": {"*": fabric}, "overhead": 0.0, "memory_bandwidth": 1e15} | changes)


def gather(
    form: str, chunks: int, ranks: int, matmul: float, *, each: int = 1000, products: int = 1, on: Machine | None = None
) -> Forecast:
    work = Exchange(on or machine(), "tp", ranks, each * ranks, matmul, MANY, products)
    return forecast(work, Kind.ALL_GATHER, form, chunks)


def scatter(form: str, chunks: int, ranks: int, matmul: float, on: Machine | None = None) -> Forecast:
    work = Exchange(on or machine(), "tp", ranks, 1000 * ranks, matmul, MANY)
    return forecast(work, Kind.REDUCE_SCATTER, form, chunks)


def test_a_gather_in_one_piece_hides_the_own_block() -> None:
    found = gather("chunked", 1, ranks=4, matmul=4.0)
    assert found.plain == pytest.approx(3 + 4)
    assert found.seconds == pytest.approx(3 + 3)  # the own block's second while three travel, then three blocks
    assert found.exposed == pytest.approx(2)
    assert found.hidden == pytest.approx(1)
    assert found.saved == pytest.approx(1)


def test_pieces_hide_all_if_each_takes_as_long_to_compute_as_the_next_to_travel() -> None:
    found = gather("chunked", 3, ranks=4, matmul=4.0)
    assert found.seconds == pytest.approx(4)
    assert found.exposed == pytest.approx(0)
    assert found.hidden == pytest.approx(3)


def test_each_piece_has_its_latency_and_its_launch() -> None:
    slow = machine(latency=0.25, launch=0.1)
    # launched at 0.1 and 0.2; each travels 0.25 + 0.5, so they arrive at 0.85 and 1.6; own block until 1.2
    found = gather("chunked", 2, ranks=2, matmul=2.0, on=slow)
    assert found.seconds == pytest.approx(1.2 + 0.5 + 0.5)
    tiny = gather("chunked", 2, ranks=2, matmul=0.2, on=slow)
    assert tiny.seconds == pytest.approx(1.6 + 0.05)


def test_computation_is_slower_while_pieces_travel() -> None:
    # one second of travel covers two thirds of the own block; the last third, then the other block
    found = gather("chunked", 1, ranks=2, matmul=2.0, on=machine(slows=0.5))
    assert found.seconds == pytest.approx(1 + 1 / 3 + 1)
    assert found.plain == pytest.approx(3)


def test_every_call_beyond_the_first_has_its_overhead() -> None:
    on = machine(overhead=0.01)
    # two products: the own block's calls are those of the plain matmul; two pieces of two calls before and behind it
    found = gather("chunked", 2, ranks=4, matmul=40.0, products=2, on=on)
    assert found.seconds == pytest.approx(40 + 2 * 2 * 2 * 0.01)
    assert gather("ring", 2, ranks=4, matmul=40.0, products=2, on=on).seconds == pytest.approx(40 + 3 * 2 * 2 * 0.01)


def test_a_ring_computes_on_a_block_while_the_next_hops() -> None:
    assert gather("ring", 1, ranks=4, matmul=4.0).seconds == pytest.approx(4)
    # half a second a block: it stands still for every hop, which arrive at 1, 2 and 3
    fast = gather("ring", 1, ranks=4, matmul=2.0)
    assert fast.seconds == pytest.approx(3.5)
    assert fast.exposed == pytest.approx(1.5)
    assert gather("ring", 2, ranks=4, matmul=2.0).seconds == pytest.approx(3.25)  # half a block behind the last hop


def test_a_hop_has_one_latency_where_a_collective_has_more() -> None:
    slow = machine(latency=1.0)
    # arrivals of a ring: 2, 4, 6; of a collective: 2 + 3 at once
    assert gather("ring", 1, ranks=4, matmul=0.0, on=slow).seconds == pytest.approx(6)
    assert gather("chunked", 1, ranks=4, matmul=0.0, on=slow).seconds == pytest.approx(5)


def test_symmetric_copies_are_two_ahead_at_most() -> None:
    # copies of a second, blocks of two: all but the first copy are hidden, nothing waits but for the end
    assert gather("symmetric", 1, ranks=4, matmul=8.0).seconds == pytest.approx(8)
    # blocks of a tenth: copies 1 and 2 at once arrive at 1 and 2, the third starts when the first is computed on
    assert gather("symmetric", 1, ranks=4, matmul=0.4).seconds == pytest.approx(3.1)
    # the own part is read and written where others can reach it
    on = machine(memory_bandwidth=1e3)
    assert gather("symmetric", 1, ranks=2, matmul=20.0, on=on).seconds == pytest.approx(22)


def test_a_scatter_sends_others_blocks_first() -> None:
    found = scatter("chunked", 1, ranks=4, matmul=4.0)
    assert found.plain == pytest.approx(7)
    assert found.seconds == pytest.approx(3 + 3)  # three blocks, then they travel while the own is computed
    assert scatter("chunked", 3, ranks=4, matmul=4.0).seconds == pytest.approx(4)  # arrivals at 2, 3 and 4
    assert scatter("ring", 1, ranks=4, matmul=4.0).seconds == pytest.approx(4)
    assert scatter("symmetric", 1, ranks=4, matmul=4.0).seconds == pytest.approx(4)


def test_what_a_scatter_receives_is_added_up() -> None:
    on = machine(memory_bandwidth=3e3)
    # blocks of 1000 bytes: reading two and writing one takes a second, for each of three ranks
    assert scatter("chunked", 1, ranks=4, matmul=4.0, on=on).seconds == pytest.approx(6 + 3)
    # each hop but the first is added to before it is sent: 1-2, 2, add until 3, 3-4, 4, 5-6, own until 6, add
    assert scatter("ring", 1, ranks=4, matmul=4.0, on=on).seconds == pytest.approx(7)
    # four blocks are read and one is written, at once
    assert scatter("symmetric", 1, ranks=4, matmul=4.0, on=on).seconds == pytest.approx(4 + 5 / 3)


def test_a_scatter_is_told_by_the_exchange_and_plain_by_the_reduction() -> None:
    links = dict.fromkeys(Kind, Link(0.0, 1e3)) | {Kind.REDUCE_SCATTER: Link(0.0, 500.0)}
    found = scatter("chunked", 1, ranks=4, matmul=4.0, on=machine(fabrics={"*": Fabric(links)}))
    assert (found.plain, found.seconds) == (pytest.approx(6 + 4), pytest.approx(6))


def test_small_pieces_compute_slower() -> None:
    cpu, cuda = machine(), machine(device="cuda")
    assert call_seconds(cpu, 1.0, rows=8) == pytest.approx(2)
    assert call_seconds(cpu, 1.0, rows=80) == pytest.approx(1.1)
    assert call_seconds(cuda, 1e-4, rows=1) == pytest.approx(1.1e-4)
    assert call_seconds(cuda, 4e-3, rows=1) == pytest.approx(4.04e-3)
    assert call_seconds(cuda, 1e-6, rows=1) == pytest.approx(2e-5)


def test_pieces_have_enough_rows() -> None:
    for device, least in LEAST_ROWS.items():
        found = forecast_gather(machine(device=device), "tp", 2, 2000, 2.0, rows=4 * least)
        assert {forecast.chunks for forecast in found.considered} == {1, 2, 4}
    few = forecast_scatter(machine(), "tp", 2, 2000, 2.0, rows=3)
    assert {forecast.chunks for forecast in few.considered} == {1}


def test_collectives_are_no_larger_than_the_pieces_that_were_measured() -> None:
    def considered(either: Callable[..., Forecasts], cut: Kind, *chunks: int) -> dict[str, list[int]]:
        links = machine().fabric("*").links
        fabric = Fabric({**links, cut: dataclasses.replace(links[cut], piece=1000)})
        found = either(machine(fabrics={"*": fabric}), "tp", 2, 4000, 1.0, rows=1000, chunks=chunks)
        return {
            form: sorted(forecast.chunks for forecast in found.considered if forecast.form == form)
            for form in ("chunked", "ring")
        }

    small, every = {"chunked": [4, 8], "ring": [1, 2, 4, 8]}, {"chunked": [1, 2, 4, 8], "ring": [1, 2, 4, 8]}
    assert considered(forecast_gather, Kind.ALL_GATHER, 1, 2, 4, 8) == small
    assert considered(forecast_gather, Kind.ALL_TO_ALL, 1, 2, 4, 8) == small  # which is what it is on gloo
    assert considered(forecast_scatter, Kind.ALL_TO_ALL, 1, 2, 4, 8) == small
    for either in (forecast_gather, forecast_scatter):
        assert considered(either, Kind.ALL_REDUCE, 1, 2, 4, 8) == every
        assert considered(either, Kind.ALL_TO_ALL, 1, 2) == {"chunked": [1, 2], "ring": [1, 2]}  # none smaller asked


def test_considered_are_all_asked_for_the_fastest_first() -> None:
    found = forecast_gather(machine(), "tp", 4, 4000, 4.0, MANY, ("chunked", "ring", "symmetric"), (1, 3))
    assert {(forecast.form, forecast.chunks) for forecast in found.considered} == {
        *itertools.product(("chunked", "ring"), (1, 3)),
        ("symmetric", 1),
    }
    seconds = [forecast.seconds for forecast in found.considered]
    assert seconds == sorted(seconds)
    assert found.best == found.considered[0]


def test_nothing_is_chosen_that_is_no_faster() -> None:
    found = forecast_gather(machine(latency=1.0, overhead=1e-3), "tp", 2, 2, 1e-9, MANY)
    assert found.considered
    assert found.best is None
    assert forecast_gather(machine(), "tp", 2, 2000, 2.0, MANY, forms=()).best is None


@pytest.mark.parametrize("name", PRESETS)
def test_never_faster_than_the_link_or_the_matmul(name: str) -> None:
    for ranks, size, matmul in itertools.product((2, 8), (10**5, 10**9), (1e-5, 1e-2, 1.0)):
        for ask, kind in ((forecast_gather, Kind.ALL_GATHER), (forecast_scatter, Kind.ALL_TO_ALL)):
            found = ask(PRESETS[name], "tp", ranks, size, matmul, 4096, ("chunked", "ring", "symmetric"))  # type: ignore[operator]
            link = PRESETS[name].fabric("tp").links[kind]
            carried = min(
                size * (ranks - 1) / ranks / link.bandwidth
                for link in (link, PRESETS[name].fabric("tp").links[Kind.ALL_GATHER])
            )
            for considered in found.considered:
                assert considered.seconds >= max(matmul, carried)
                assert considered.seconds == pytest.approx(considered.plain - considered.saved)
                assert 0 <= considered.exposed <= considered.seconds
            assert found.best is None or found.best.seconds < found.plain


def test_one_rank_is_plain() -> None:
    found = gather("chunked", 4, ranks=1, matmul=2.0)
    assert (found.seconds, found.saved, found.hidden) == (2.0, 0.0, 0.0)


def test_more_pieces_than_rows_are_as_many_as_rows() -> None:
    few = Exchange(machine(), "tp", 2, 2000, 2.0, rows=2)
    most, more = (forecast(few, Kind.ALL_GATHER, "chunked", chunks) for chunks in (2, 5))
    assert most.seconds == more.seconds


def test_an_unknown_form_is_named() -> None:
    with pytest.raises(MachineError, match=r"form 'spiral'.*chunked, ring, symmetric"):
        gather("spiral", 1, ranks=2, matmul=1.0)


def test_a_link_stands_still_for_a_launch_between_two_hops_on_a_cpu() -> None:
    # one launch of a tenth on the lane, then one with every hop: they arrive at 1.2, 2.3 and 3.4
    assert gather("ring", 1, ranks=4, matmul=4.0, on=machine(launch=0.1)).seconds == pytest.approx(4.4)
    assert gather("ring", 1, ranks=4, matmul=8.0, on=machine(launch=0.1)).seconds == pytest.approx(8.1)
    gpu = machine(launch=0.1, device="cuda")
    assert gather("ring", 1, ranks=4, matmul=0.0, on=gpu).seconds == pytest.approx(3.1, abs=1e-3)


def test_what_a_scatter_computes_meanwhile_hides_what_its_own_matmul_cannot() -> None:
    exchange = Exchange(machine(), "tp", 2, 2000, 0.5, rows=64)
    more = dataclasses.replace(exchange, meanwhile_seconds=0.25)
    for form in ("chunked", "ring"):
        alone, both = (forecast(work, Kind.REDUCE_SCATTER, form, 4) for work in (exchange, more))
        assert both.plain == pytest.approx(alone.plain + 0.25)
        assert both.seconds == pytest.approx(alone.seconds), form  # there was as much to be hidden
        assert both.exposed == pytest.approx(alone.exposed - 0.25)
    alone, both = (forecast(work, Kind.REDUCE_SCATTER, "symmetric", 1) for work in (exchange, more))
    assert both.seconds == pytest.approx(alone.seconds + 0.25)
