"""An emulated world on a CUDA device: collectives travel on streams of their own, and the thread goes on."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from crossfade import emulated
from crossfade.cost.machine import Fabric, Link, Machine
from crossfade.graph import collectives as c10d
from crossfade.graph.collectives import Kind

pytestmark = pytest.mark.gpu

worlds = pytest.mark.parametrize(("ranks", "rank"), [(8, 3), (64, 5)], ids=["8 ranks", "64 ranks"])
Alone = Callable[..., Any]


@pytest.fixture(scope="module")
def alone() -> Iterator[Alone]:
    """Call a function of this file in a process kept for it: a world is a thing of a whole process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # leaving ends the process, busy or not
        yield lambda function, *args: pool.apply_async(function, args).get(timeout=300)


def machine(seconds: float = 0.0, ranks: int = 8) -> Machine:
    """A machine on which any collective of few bytes among `ranks` takes so long."""
    link = Link(latency=seconds / (ranks.bit_length() - 1), bandwidth=1e13)
    fabric = Fabric(dict.fromkeys(Kind, link))
    return Machine("test", {"*": fabric}, flops={"float32": 1e13}, memory_bandwidth=1e12, device="cuda")


def sample(*shape: int) -> Tensor:
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel(), device="cuda").view(shape)


def on_cpu(pairs: dict[str, tuple[Tensor, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (found.cpu(), expected.cpu()) for name, (found, expected) in pairs.items()}


def values(ranks: int, rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    x, own = sample(ranks, 512), sample(ranks, 512)[rank : rank + 1]
    ops = getattr(torch.ops, c10d.NAMESPACE)
    with emulated.world(machine(1e-3), ranks, rank):
        group = dist.group.WORLD.group_name
        started = {
            "all_reduce": (c10d.all_reduce(x, "sum", group), x * ranks),
            "all_gather": (c10d.all_gather(x, ranks, group), x.repeat(ranks, 1)),
            "all_gather_out": (
                ops.all_gather_into_tensor_out(x, ranks, group, out=x.new_empty(ranks * ranks, 512)),
                x.repeat(ranks, 1),
            ),
            "reduce_scatter": (c10d.reduce_scatter(x, "avg", ranks, group), own),
            "all_to_all": (c10d.all_to_all(x, ranks, group), own.repeat(ranks, 1)),
            "broadcast": (c10d.broadcast(x, 0, group), x),
        }
        found = {name: (c10d.wait(tensor), expected) for name, (tensor, expected) in started.items()}
        dist.all_reduce(eager := x.clone())
        work = dist.all_reduce(later := x.clone(), async_op=True)
        (arrived,) = work.get_future().wait()
        dist.barrier()
        return on_cpu(
            found | {"eager": (eager, x * ranks), "future": (arrived, x * ranks), "later": (later, x * ranks)}
        )


def freed_before_arrival(ranks: int, rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """An input that is dropped at once: its memory must not be given away before it was read."""
    with emulated.world(machine(0.02, ranks), ranks, rank):
        out = torch.empty(ranks * 1_000_000, device="cuda")
        work = dist.all_gather_into_tensor(out, torch.ones(1_000_000, device="cuda"), async_op=True)
        others = [torch.full((1_000_000,), -1.0, device="cuda") for _ in range(8)]
        work.wait()
        return on_cpu({"gathered": (out, torch.ones_like(out)), "others": (others[0], -torch.ones_like(others[0]))})


@worlds
@pytest.mark.parametrize("collectives", [values, freed_before_arrival], ids=lambda one: one.__name__)
def test_the_others_hold_what_this_rank_holds(alone: Alone, collectives: Any, ranks: int, rank: int) -> None:
    for name, (found, expected) in alone(collectives, ranks, rank).items():
        torch.testing.assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}")


def best(function: Callable[[], Any]) -> float:
    """The least seconds of several runs, the device's work included."""
    taken = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return min(taken)


def products(matrix: Tensor, seconds: float) -> Callable[[], None]:
    """Matrix products that keep the device busy for about so long."""

    def multiply(times: int) -> None:
        for _ in range(times):
            matrix @ matrix

    count = round(200 * seconds / best(lambda: multiply(200)))
    return lambda: multiply(count)


def reduce_on(*groups: Any) -> Callable[[], None]:
    def run() -> None:
        for work in [dist.all_reduce(torch.ones(1, device="cuda"), group=one, async_op=True) for one in groups]:
            work.wait()

    return run


def times() -> dict[str, float]:
    with emulated.world(machine(0.02), 64):
        mesh = init_device_mesh("cuda", (8, 8), mesh_dim_names=("dp", "tp"))
        dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
        compute = products(torch.ones(2048, 2048, device="cuda"), 0.02)

        def overlapped() -> None:
            work = dist.all_reduce(torch.ones(1, device="cuda"), group=dp, async_op=True)
            compute()
            work.wait()

        def serial() -> None:
            dist.all_reduce(torch.ones(1, device="cuda"), group=dp)
            compute()

        found = {"alone": best(reduce_on(dp)), "compute": best(compute)}
        found |= {"overlapped": best(overlapped), "serial": best(serial)}
        return found | {"one group": best(reduce_on(dp, dp)), "two axes": best(reduce_on(dp, tp))}


def test_collectives_travel_beside_computation(alone: Alone) -> None:
    found = alone(times)
    assert found["alone"] == pytest.approx(0.02, rel=0.2)
    assert found["overlapped"] < 0.75 * (found["alone"] + found["compute"])
    assert found["serial"] == pytest.approx(found["alone"] + found["compute"], rel=0.2)
    assert found["one group"] == pytest.approx(2 * found["alone"], rel=0.2)
    assert found["two axes"] < 1.5 * found["alone"]


def host_and_device_seconds() -> tuple[float, float, bool, bool]:
    tensor = torch.ones(1, device="cuda")
    with emulated.world(machine(0.2), 8):
        dist.all_reduce(tensor)  # measures the clock
        torch.cuda.synchronize()
        start = time.perf_counter()
        work = dist.all_reduce(tensor, async_op=True)
        before = work.is_completed()
        work.wait()
        host = time.perf_counter() - start
        torch.cuda.synchronize()
        return host, time.perf_counter() - start, before, work.is_completed()


def test_waiting_does_not_hold_up_the_thread(alone: Alone) -> None:
    host, device, before, after = alone(host_and_device_seconds)
    assert host < 0.1 < 0.15 < device
    assert (before, after) == (False, True)


def network(ranks: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 2 * ranks), nn.ReLU(), nn.Linear(2 * ranks, ranks)).cuda()


def gradients(model: nn.Module) -> list[Tensor]:
    model(sample(4, 16) / 64).pow(2).mean().backward()
    return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]


def ddp(ranks: int, rank: int) -> tuple[list[Tensor], list[Tensor]]:
    with emulated.world(machine(1e-3), ranks, rank):
        wrapped = nn.parallel.DistributedDataParallel(network(ranks), device_ids=[0], bucket_cap_mb=0.001)
        gradients(wrapped)
        wrapped.zero_grad()  # the second time buckets are rebuilt
        return gradients(wrapped), gradients(network(ranks))


def fsdp(ranks: int, rank: int) -> tuple[list[Tensor], list[Tensor]]:
    from torch.distributed.fsdp import fully_shard

    with emulated.world(machine(1e-3), ranks, rank):
        model, mesh = network(ranks), init_device_mesh("cuda", (ranks,), mesh_dim_names=("dp",))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        found = [gradient.to_local() for gradient in gradients(model)]  # type: ignore[attr-defined]
    plain = network(ranks)  # whose ranks all hold this one's shards
    for parameter in plain.parameters():
        shard = parameter.data.chunk(ranks)[rank]
        parameter.data = shard.repeat(ranks, *[1] * (shard.dim() - 1))
    return found, [gradient.chunk(ranks)[rank] for gradient in gradients(plain)]


def inductor(ranks: int, rank: int) -> tuple[list[Tensor], list[Tensor]]:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        gathered = funcol.all_gather_tensor(x, 0, dist.group.WORLD)
        reduced = funcol.all_reduce(x * x, "avg", dist.group.WORLD)
        return gathered + 1, reduced * 2

    x = sample(4, 4)
    with emulated.world(machine(1e-3), ranks, rank):
        return list(torch.compile(step)(x)), [x.repeat(ranks, 1) + 1, x * x * 2]


def run_on_device(code: Any, ranks: int, rank: int) -> tuple[list[Tensor], list[Tensor]]:
    found, expected = code(ranks, rank)
    return [one.cpu() for one in found], [one.cpu() for one in expected]


@worlds
@pytest.mark.parametrize("code", [ddp, fsdp, inductor], ids=lambda one: one.__name__)
def test_code_for_process_groups_runs_unchanged(alone: Alone, code: Any, ranks: int, rank: int) -> None:
    found, expected = alone(run_on_device, code, ranks, rank)
    torch.testing.assert_close(found, expected)


def recorded() -> tuple[bool, float]:
    """Whether a CUDA graph of ten collectives one after another adds up, and how many of their buffers it holds."""
    with emulated.world(machine(1e-4), 8):
        x = torch.ones(2**22, device="cuda")
        dist.all_reduce(torch.ones(1, device="cuda"))  # measures the clock
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = x
            for _ in range(5):
                y = c10d.wait(c10d.all_reduce(y + 1, "avg", dist.group.WORLD.group_name))
                y = c10d.wait(c10d.all_gather(y + 1, 8, dist.group.WORLD.group_name))[: 2**22].clone()
        held = (torch.cuda.max_memory_allocated() - before) / x.nbytes
        graph.replay()
        return bool((y == 11).all()), held


def test_a_recorded_collective_gives_its_memory_back(alone: Alone) -> None:
    """At most what is gathered, its source, and the clone of it lie there at once."""
    right, held = alone(recorded)
    assert right
    assert held < 12
