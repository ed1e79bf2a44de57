"""Messages, exchanges and pipelined matmuls on an emulated fabric: what comes, and when it is due."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import crossfade.collective_matmul
from crossfade import emulated
from crossfade.cost.machine import Fabric, Link, Machine
from crossfade.graph import collectives
from crossfade.graph.collective_matmul import gather_matmul, matmul_scatter
from crossfade.graph.collectives import Kind
from tests.several import best_of_several

Alone = Callable[..., Any]
LATENCY, BANDWIDTH = 0.1, 1e6


@pytest.fixture(scope="module")
def alone() -> Iterator[Alone]:
    """Call a function of this file in a process kept for it: a world is a thing of a whole process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield lambda function, *args: pool.apply_async(function, args).get(timeout=300)


def machine(latency: float = LATENCY, bandwidth: float = BANDWIDTH) -> Machine:
    """All-gathers and exchanges take so long; a broadcast, which no message is, takes far longer."""
    links = dict.fromkeys(Kind, Link(latency, bandwidth)) | {Kind.BROADCAST: Link(10.0, 1.0)}
    return Machine("test", {"*": Fabric(links)}, flops={"float32": 1e10}, memory_bandwidth=1e10)


def fast() -> Machine:
    return machine(0.0, 1e12)


def messages() -> dict[str, Any]:
    found: dict[str, Any] = {}
    x = torch.arange(1000.0)
    with emulated.world(machine(), 8, 3):
        late, early = torch.zeros(1000), torch.zeros(1000)
        expected = dist.irecv(early, 2, tag=7)
        sent = dist.isend(x, 4, tag=7)
        again = dist.isend(2 * x, 4, tag=8)
        later = dist.irecv(late, 2, tag=8)
        for work in (expected, sent, again, later):
            work.wait()
        found["asked for first"] = early, x
        found["asked for last"] = late, 2 * x
        found["due"] = [expected.work.due - sent.due, later.work.due - again.due]
        found["one message"] = again.due - sent.due
    return found


@best_of_several
def test_what_comes_is_what_this_rank_sends_when_that_arrives(alone: Alone) -> None:
    found = alone(messages)
    for name in ("asked for first", "asked for last"):
        assert torch.equal(*found[name])
    assert found["due"] == [0.0, 0.0]
    assert found["one message"] == pytest.approx(LATENCY + 4000 / BANDWIDTH)  # what one rank sends to one other


def unlike() -> list[list[float]]:
    kept = []
    with emulated.world(fast(), 8, 3):
        dist.isend(torch.ones(4), 4, tag=1).wait()
        for place, tag in ((torch.zeros(4), 2), (torch.zeros(3), 1), (torch.zeros(4, dtype=torch.float64), 1)):
            work = dist.irecv(place, 2, tag=tag)
            work.wait()
            kept.append(place.tolist())
            assert work.is_completed()
            assert work.is_success()
            assert work.result()[0] is place
        last = torch.zeros(4)
        dist.recv(last, 2, tag=1)
        kept.append(last.tolist())
    return kept


def test_a_message_unlike_what_was_sent_leaves_what_was_there(alone: Alone) -> None:
    assert alone(unlike) == [[0.0] * 4, [0.0] * 3, [0.0] * 4, [1.0] * 4]


def batches() -> list[bool]:
    x, equal = torch.arange(5.0), []
    with emulated.world(fast(), 4, 1) as fabric:
        for order in (1, -1):
            place = torch.zeros(5)
            both = [dist.P2POp(dist.isend, x, 2), dist.P2POp(dist.irecv, place, 0)]
            for work in dist.batch_isend_irecv(both[::order]):
                work.wait()
            equal.append(torch.equal(place, x))
        equal.append(fabric.launched == 4)
    return equal


def test_batches_of_messages_in_either_order(alone: Alone) -> None:
    assert alone(batches) == [True, True, True]


def many_sent() -> int:
    with emulated.world(fast(), 4):
        works = [dist.isend(torch.full((2,), float(number)), 1) for number in range(100)]
        for work in works:
            work.wait()
        dist.recv(oldest := torch.zeros(2), 1)
        return int(oldest[0])


def test_messages_that_nobody_asks_for_are_not_kept_for_ever(alone: Alone) -> None:
    assert alone(many_sent) == 100 - 16


def exchanges() -> dict[str, Any]:
    ranks, rank = 8, 3
    nothing_here = [100 * (peer != rank) for peer in range(ranks)]
    with emulated.world(machine(), ranks, rank):
        group = dist.group.WORLD.group_name
        received, source = torch.ones(700), torch.ones(700)
        works = [
            dist.all_to_all_single(received, source, nothing_here, nothing_here, async_op=True),
            dist.all_to_all_single(torch.empty(800), torch.ones(800), async_op=True),
            dist.all_to_all_single(received, source, nothing_here, nothing_here, async_op=True),
        ]
        for work in works:
            work.wait()
        functional = collectives.wait(collectives.all_to_all_split(source, nothing_here, nothing_here, group))
    gaps = [later.due - sooner.due for sooner, later in itertools.pairwise(works)]
    return {"gaps": gaps, "received": received.unique().tolist(), "functional": functional.unique().tolist()}


@best_of_several
def test_an_exchange_counts_what_goes_to_others(alone: Alone) -> None:
    found = alone(exchanges)
    # 700 numbers go to others, whether there are 100 for oneself or none
    assert found["gaps"] == pytest.approx([3 * LATENCY + 2800 / BANDWIDTH] * 2)
    assert found["received"] == found["functional"] == [0.0]  # what only others could know


def pipelines(ranks: int, rank: int, form: str, chunks: int) -> dict[str, tuple[Tensor, Tensor]]:
    assert crossfade.collective_matmul is not None  # the operators run in this process
    generator = torch.Generator().manual_seed(0)
    part, weight = torch.randn(6, 5, generator=generator), torch.randn(5, 4, generator=generator)
    tall = torch.randn(6 * ranks, 5, generator=generator)
    with emulated.world(fast(), ranks, rank):
        group = dist.group.WORLD.group_name
        given: dict[str, Any] = {"dim": 0, "ranks": ranks, "group": group, "form": form, "chunks": chunks}
        product, kept = gather_matmul(part, [weight], ["mk,kn->mn"], keep=True, **given)
        scattered = matmul_scatter(tall, weight, "mk,kn->mn", **given)
    whole, blocks = part.repeat(ranks, 1), (tall @ weight).view(ranks, 6, 4)
    # nothing comes for the own block of an exchange; a ring adds each block that it passes on
    sums = blocks[rank] if form == "chunked" else blocks.sum(0)
    return {"product": (product, whole @ weight), "kept": (kept, whole), "scattered": (scattered, sums)}


@pytest.mark.parametrize("form", ["chunked", "ring"])
@pytest.mark.parametrize(("ranks", "rank", "chunks"), [(4, 0, 1), (4, 3, 2), (8, 2, 4)])
def test_pipelined_matmuls_run_in_one_process(alone: Alone, ranks: int, rank: int, form: str, chunks: int) -> None:
    for name, (found, expected) in alone(pipelines, ranks, rank, form, chunks).items():
        torch.testing.assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}")


def seconds_of_rings() -> list[float]:
    """A part of 8 kB a rank, 8 ms and 2 ms of latency a hop."""
    part, weight, tall = torch.randn(50, 40), torch.randn(40, 40), torch.randn(200, 40)
    with emulated.world(machine(2e-3), 4, 1):
        group = dist.group.WORLD.group_name
        given: dict[str, Any] = {"dim": 0, "ranks": 4, "group": group, "form": "ring"}
        starts = [time.perf_counter()]
        gather_matmul(part, [weight], ["mk,kn->mn"], **given)
        starts.append(time.perf_counter())
        matmul_scatter(tall, weight, "mk,kn->mn", **given)
        starts.append(time.perf_counter())
    return [later - sooner for sooner, later in itertools.pairwise(starts)]


def test_no_hop_of_a_ring_begins_before_the_one_before_has_come(alone: Alone) -> None:
    assert all(seconds >= 3 * (2e-3 + 8e-3) for seconds in alone(seconds_of_rings))
