"""One process is a rank of an emulated world: what arrives, when it arrives, and whose code runs on it unchanged."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import crossfade as cf
from crossfade import emulated
from crossfade.cost.machine import Fabric, Link, Machine
from crossfade.errors import CrossfadeError
from crossfade.graph import collectives as c10d
from crossfade.graph.collectives import Kind
from tests.several import best_of_several

WORLDS = [(8, 3), (64, 5)]
worlds = pytest.mark.parametrize(("ranks", "rank"), WORLDS, ids=["8 ranks", "64 ranks"])
Alone = Callable[..., Any]


@pytest.fixture(scope="module")
def alone() -> Iterator[Alone]:
    """Call a function of this file in a process kept for it: a world is a thing of a whole process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # leaving ends the process, busy or not
        yield lambda function, *args: pool.apply_async(function, args).get(timeout=300)


def machine(seconds: float = 0.0, ranks: int = 8, axes: tuple[str, ...] = ("*",), launch: float = 0.0) -> Machine:
    """A machine on which any collective of few bytes among `ranks` takes so long."""
    link = Link(latency=seconds / (ranks.bit_length() - 1), bandwidth=1e12)
    fabric = Fabric(dict.fromkeys(Kind, link), launch=launch)
    return Machine("test", dict.fromkeys(axes, fabric), flops={"float32": 1e10}, memory_bandwidth=1e10)


def sample(*shape: int) -> Tensor:
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape)


# What arrives


def reductions(ranks: int, rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    found = {}
    all_alike = torch.stack([sample(3).to(torch.float64)] * ranks)
    expected = {"SUM": all_alike.sum(0), "AVG": all_alike.mean(0), "PRODUCT": all_alike.prod(0)}
    expected |= {"MIN": all_alike.amin(0), "MAX": all_alike.amax(0)}
    with emulated.world(machine(), ranks, rank):
        for name, value in expected.items():
            tensor = sample(3).to(torch.float64)
            dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
            found[name] = tensor, value
        bits = torch.tensor([5, 6])
        dist.all_reduce(bits, dist.ReduceOp.BXOR)
        found["BXOR"] = bits, torch.zeros(2, dtype=torch.int64)  # an even number of equal ones
        flag = torch.tensor([True, False])
        dist.all_reduce(flag)
        found["bool"] = flag, torch.tensor([True, False])
    return found


def moves(ranks: int, rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Each collective of torch.distributed on its own: what it left, and what as many equal ranks would leave."""
    x, own = sample(ranks, 2), sample(ranks, 2)[rank : rank + 1]
    empty = lambda: [torch.empty(ranks, 2) for _ in range(ranks)]  # noqa: E731
    found = {}
    with emulated.world(machine(), ranks, rank):
        dist.all_gather_into_tensor(single := torch.empty(ranks * ranks, 2), x)
        found["all_gather_into_tensor"] = single, x.repeat(ranks, 1)
        dist.all_gather(listed := empty(), x)
        found["all_gather"] = torch.cat(listed), x.repeat(ranks, 1)
        dist.reduce_scatter_tensor(part := torch.empty(1, 2), x)
        found["reduce_scatter_tensor"] = part, own * ranks
        dist.reduce_scatter(part := torch.empty(1, 2), list(x.split(1)), dist.ReduceOp.AVG)
        found["reduce_scatter"] = part, own
        dist.all_to_all_single(swapped := torch.empty(ranks, 2), x)
        found["all_to_all_single"] = swapped, own.repeat(ranks, 1)
        dist.all_to_all(parts := list(torch.empty(ranks, 2).split(1)), list(x.split(1)))
        found["all_to_all"] = torch.cat(parts), own.repeat(ranks, 1)
        dist.broadcast(same := x.clone(), src=0)
        found["broadcast"] = same, x
        dist.reduce(mine := x.clone(), dst=rank)
        found["reduce here"] = mine, x * ranks
        dist.reduce(other := x.clone(), dst=0)
        found["reduce elsewhere"] = other, x
        dist.gather(x, listed := empty(), dst=rank)
        found["gather"] = torch.cat(listed), x.repeat(ranks, 1)
        dist.gather(x, dst=0)
        dist.scatter(part := torch.empty(1, 2), list(x.split(1)), src=rank)
        found["scatter"] = part, own
        dist.scatter(unknown := torch.empty(1, 2), src=0)
        found["scatter from elsewhere"] = unknown, torch.zeros(1, 2)
        dist.send(x, 0)
        dist.recv(received := x.clone(), 0)
        found["recv"] = received, x
        assert dist.recv(received) == 0
        both = [dist.P2POp(dist.isend, x, 0), dist.P2POp(dist.irecv, received, 0)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        dist.all_gather_object(objects := [None] * ranks, {"rank": rank})
        found["objects"] = torch.tensor([item["rank"] for item in objects]), torch.full((ranks,), rank)
        dist.barrier()
    return found


def functional(ranks: int, rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    x, own = sample(ranks, 2), sample(ranks, 2)[rank : rank + 1]
    ops = getattr(torch.ops, c10d.NAMESPACE)
    with emulated.world(machine(), ranks, rank):
        group = dist.group.WORLD.group_name
        started = {
            "all_reduce": (c10d.all_reduce(x, "sum", group), x * ranks),
            "all_reduce_": (ops.all_reduce_(x.clone(), "avg", group), x),
            "all_reduce_coalesced": (c10d.all_reduce_coalesced([x, x], "max", group)[1], x),
            "all_gather": (c10d.all_gather(x, ranks, group), x.repeat(ranks, 1)),
            "all_gather_coalesced": (c10d.all_gather_coalesced([own, x], ranks, group)[1], x.repeat(ranks, 1)),
            "all_gather_out": (
                ops.all_gather_into_tensor_out(x, ranks, group, out=torch.empty(ranks * ranks, 2)),
                x.repeat(ranks, 1),
            ),
            "reduce_scatter": (c10d.reduce_scatter(x, "sum", ranks, group), own * ranks),
            "reduce_scatter_coalesced": (c10d.reduce_scatter_coalesced([x, x], "avg", ranks, group)[1], own),
            "all_to_all": (c10d.all_to_all(x, ranks, group), own.repeat(ranks, 1)),
            "broadcast": (c10d.broadcast(x, 0, group), x),
            "broadcast_": (ops.broadcast_(x.clone(), 0, group), x),
        }
        return {name: (c10d.wait(tensor), expected) for name, (tensor, expected) in started.items()}


def large(ranks: int, rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Outputs that a thread writes, in the input's memory too, of tensors that autograd or inference mode guard."""
    x = sample(200_000)
    with emulated.world(machine(), ranks, rank):
        whole = torch.zeros(ranks * x.numel())
        part = whole.view(ranks, -1)[rank].copy_(x)
        dist.all_gather_into_tensor(whole, part)
        leaf = x.clone().requires_grad_()
        product = leaf * leaf
        dist.all_reduce(leaf)  # as from any other backend, autograd does not hear of it
        product.sum().backward()
        with torch.inference_mode():
            dist.all_reduce(guarded := x.clone())
        return {
            "in place": (whole, x.repeat(ranks)),
            "leaf": (leaf, x * ranks),
            "guarded": (guarded.clone(), x * ranks),
        }


@worlds
@pytest.mark.parametrize("collectives", [reductions, moves, functional, large], ids=lambda function: function.__name__)
def test_the_others_hold_what_this_rank_holds(alone: Alone, collectives: Any, ranks: int, rank: int) -> None:
    for name, (found, expected) in alone(collectives, ranks, rank).items():
        torch.testing.assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}")


def uneven_exchange() -> Tensor:
    with emulated.world(machine(), ranks=2, rank=1):
        out = torch.full((5,), -1.0)
        dist.all_to_all_single(out, sample(4), output_split_sizes=[2, 3], input_split_sizes=[2, 2])
        return out


def test_an_uneven_exchange_takes_what_fits(alone: Alone) -> None:
    assert alone(uneven_exchange).tolist() == [3, 4, 3, 4, 0]


def without_values() -> tuple[Tensor, Tensor]:
    with emulated.world(machine(), 8, values=False):
        small, big = torch.ones(1), torch.ones(100_000)
        dist.all_reduce(small)
        dist.all_reduce(big)
        return small, big


def test_without_values_large_outputs_are_left_alone(alone: Alone) -> None:
    small, big = alone(without_values)
    assert small.item() == 8
    assert torch.equal(big, torch.ones(100_000))


# When it arrives


def compute(seconds: float) -> None:
    """Keep this thread busy."""
    end, matrix = time.perf_counter() + seconds, torch.ones(100, 100)
    while time.perf_counter() < end:
        matrix @ matrix


def best(function: Callable[[], Any], times: int = 5) -> float:
    """The least seconds of several runs: the machine may be busy with something else."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return min(taken)


def overlapped() -> None:
    work = dist.all_reduce(torch.ones(1), async_op=True)
    compute(0.02)
    work.wait()


def serial() -> None:
    dist.all_reduce(torch.ones(1))
    compute(0.02)


def as_future() -> None:
    dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()


def reduce_on(*groups: Any) -> Callable[[], None]:
    def run() -> None:
        for work in [dist.all_reduce(torch.ones(1), group=group, async_op=True) for group in groups]:
            work.wait()

    return run


def times_of_one_rank() -> dict[str, float]:
    with emulated.world(machine(0.02), 8):
        found = {"alone": best(lambda: dist.all_reduce(torch.ones(1)))}
        found |= {"overlapped": best(overlapped), "serial": best(serial), "future": best(as_future)}
        with emulated.use(machine(0.005)):
            found["on another machine"] = best(lambda: dist.all_reduce(torch.ones(1)))
        with emulated.use(machine(0.0, launch=0.01)):
            found["launch"] = best(lambda: dist.all_reduce(torch.ones(1), async_op=True))
        with emulated.use(machine(0.01, launch=0.01)):
            found["launch and travel"] = best(lambda: dist.all_reduce(torch.ones(1)))
    return found


def check_times(found: dict[str, float], expected: dict[str, float]) -> None:
    """Nothing takes less than it should, nor several times as long."""
    assert found.keys() == expected.keys()
    assert all(0.98 * expected[name] <= seconds < 4 * expected[name] for name, seconds in found.items()), found


@best_of_several
def test_a_collective_takes_its_time_beside_computation(alone: Alone) -> None:
    found = alone(times_of_one_rank)
    expected = {"alone": 0.02, "overlapped": 0.02, "serial": 0.04, "future": 0.02, "on another machine": 0.005}
    check_times(found, expected | {"launch": 0.01, "launch and travel": 0.02})
    assert found["overlapped"] < 0.9 * found["serial"]


def times_on_links() -> dict[str, float]:
    with emulated.world(machine(0.02), 64) as fabric:
        mesh = init_device_mesh("cpu", (8, 8), mesh_dim_names=("dp", "tp"))
        dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
        found = {"one group": best(reduce_on(dp, dp)), "two axes": best(reduce_on(dp, tp))}
        again = dist.new_group(list(range(0, 64, 8)), group_desc="mesh_dp")
        found["two groups of one axis"] = best(reduce_on(dp, again))
        with emulated.use(fabric.machine, one_link=True):
            found["one link"] = best(reduce_on(dp, tp))
    return found


@best_of_several
def test_links_carry_one_collective_at_a_time(alone: Alone) -> None:
    found = alone(times_on_links)
    check_times(found, {"one group": 0.04, "two axes": 0.02, "two groups of one axis": 0.04, "one link": 0.04})
    assert found["two axes"] < 0.9 * min(found[name] for name in found if name != "two axes")


def times_by_size() -> dict[str, float]:
    slow = Machine("slow", {"*": Fabric(dict.fromkeys(Kind, Link(0.0, 1e8)))}, {"float32": 1e10}, 1e10)
    x, out = torch.ones(250_000), torch.empty(2_000_000)  # 1 MB, and 8 MB of 8 ranks
    with emulated.world(slow, 8, values=False):
        return {
            "all_reduce": best(lambda: dist.all_reduce(x)),
            "all_gather": best(lambda: dist.all_gather_into_tensor(out, x)),
            "reduce_scatter": best(lambda: dist.reduce_scatter_tensor(x, out)),
            "broadcast": best(lambda: dist.broadcast(x, 0)),
            "send": best(lambda: dist.send(x, 1)),
            "gather elsewhere": best(lambda: dist.gather(x, dst=1)),
            "coalesced": best(lambda: coalesced(x)),
        }


def coalesced(x: Tensor) -> None:
    with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.all_reduce(x)
        dist.all_reduce(x)
    manager.wait()


@best_of_several
def test_bytes_take_their_time(alone: Alone) -> None:
    expected = {"all_reduce": 0.0175, "all_gather": 0.07, "reduce_scatter": 0.07, "broadcast": 0.01, "send": 0.01}
    expected |= {"gather elsewhere": 0.07, "coalesced": 0.035}
    check_times(alone(times_by_size), expected)


def states_of_a_work() -> list[Any]:
    with emulated.world(machine(0.05), 8) as fabric:
        work = dist.all_reduce(tensor := torch.ones(1), async_op=True)
        states = [work.is_completed(), work.is_success()]
        work.wait()
        return [*states, work.is_completed(), work.is_success(), work.result() == [tensor], fabric.launched]


def test_a_work_says_where_it_is(alone: Alone) -> None:
    assert alone(states_of_a_work) == [False, False, True, True, True, 1]


def late_values() -> float:
    with emulated.world(machine(), 64) as fabric:
        dist.all_gather_into_tensor(torch.empty(64 * 500_000), torch.ones(500_000))
        return fabric.late


def test_values_that_take_longer_than_the_travel_are_counted(alone: Alone) -> None:
    assert alone(late_values) > 1e-3


# Whose code runs on it


def network(ranks: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 2 * ranks), nn.ReLU(), nn.Linear(2 * ranks, ranks))


def gradients(model: nn.Module) -> list[Tensor]:
    model(sample(4, 16) / 64).pow(2).mean().backward()
    return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]


def ddp(ranks: int, rank: int) -> tuple[list[Tensor], list[Tensor]]:
    with emulated.world(machine(1e-3), ranks, rank):
        wrapped = nn.parallel.DistributedDataParallel(network(ranks), bucket_cap_mb=0.001)
        gradients(wrapped)
        wrapped.zero_grad()  # the second time buckets are rebuilt
        return gradients(wrapped), gradients(network(ranks))


def compiled_ddp(ranks: int, rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """Buffers are broadcast by C++, which calls the group back inside of what is compiled."""
    found = []
    for in_a_world in (True, False):
        with emulated.world(machine(1e-3), ranks, rank) if in_a_world else contextlib.nullcontext():
            torch.manual_seed(0)
            model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
            wrapped = nn.parallel.DistributedDataParallel(model) if in_a_world else model
            compiled = torch.compile(nn.Sequential(wrapped, nn.Flatten()), backend="aot_eager")
            for rows in (4, 6, 6):  # of symbolic sizes from the second on
                compiled(sample(rows, 8)).square().mean().backward()
            found.append([parameter.grad for parameter in model.parameters()])
            torch.compiler.reset()
    return found[0], found[1]


def fsdp(ranks: int, rank: int) -> tuple[list[Tensor], list[Tensor]]:
    from torch.distributed.fsdp import fully_shard

    with emulated.world(machine(1e-3), ranks, rank):
        model = network(ranks)
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",)))
        found = [gradient.to_local() for gradient in gradients(model)]  # type: ignore[attr-defined]
    plain = network(ranks)  # whose ranks all hold this one's shards
    for parameter in plain.parameters():
        shard = parameter.data.chunk(ranks)[rank]
        parameter.data = shard.repeat(ranks, *[1] * (shard.dim() - 1))
    return found, [gradient.chunk(ranks)[rank] for gradient in gradients(plain)]


def tensor_parallel(ranks: int, rank: int) -> tuple[list[Tensor], list[Tensor]]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    x, size = sample(4, 16) / 64, ranks // 2
    with emulated.world(machine(1e-3), ranks, rank=0):  # which scatters the weights, and so knows its own
        mesh = init_device_mesh("cpu", (2, size), mesh_dim_names=("dp", "tp"))
        model = parallelize_module(network(ranks), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        found = model(x)
    first, _, last = network(ranks)
    hidden = torch.relu(x @ first.weight.chunk(size)[0].t() + first.bias.chunk(size)[0])
    return [found.detach()], [(size * (hidden @ last.weight.chunk(size, 1)[0].t()) + last.bias).detach()]


def distributed_tensor(ranks: int, rank: int) -> tuple[list[Tensor], list[Tensor]]:
    from torch.distributed.tensor import DTensor, Shard

    with emulated.world(machine(1e-3), ranks, rank):
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "tp"))
        whole = DTensor.from_local(sample(2, 3), mesh, [Shard(0), Shard(1)]).full_tensor()
    return [whole], [sample(2, 3).repeat(2, ranks // 2)]


def inductor(ranks: int, rank: int) -> tuple[list[Tensor], list[Tensor]]:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        gathered = funcol.all_gather_tensor(x, 0, dist.group.WORLD)
        reduced = funcol.all_reduce(x @ x, "avg", dist.group.WORLD)
        return gathered + 1, reduced * 2

    x = sample(4, 4)
    with emulated.world(machine(1e-3), ranks, rank):
        return list(torch.compile(step)(x)), [x.repeat(ranks, 1) + 1, (x @ x) * 2]


@worlds
@pytest.mark.parametrize(
    "code",
    [ddp, compiled_ddp, fsdp, tensor_parallel, distributed_tensor, inductor],
    ids=lambda function: function.__name__,
)
def test_code_for_process_groups_runs_unchanged(alone: Alone, code: Any, ranks: int, rank: int) -> None:
    found, expected = alone(code, ranks, rank)
    torch.testing.assert_close(found, expected)


def compiled_step(ranks: int, rank: int) -> tuple[Tensor, Tensor, float]:
    data, targets = sample(2 * ranks, 16) / 64, sample(2 * ranks, ranks) / 64
    mine = slice(2 * rank, 2 * rank + 2)
    with emulated.world(machine(0.01, ranks), ranks, rank):
        model = network(ranks)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = cf.compile_step(model, nn.functional.mse_loss, optimizer, {"dp": ranks})
        found = step(data, targets)
        seconds = best(lambda: step(data, targets))
    return found, nn.functional.mse_loss(network(ranks)(data[mine]), targets[mine]).detach(), seconds


@worlds
def test_a_compiled_step_runs_alone(alone: Alone, ranks: int, rank: int) -> None:
    found, expected, seconds = alone(compiled_step, ranks, rank)
    torch.testing.assert_close(found, expected)
    assert seconds >= 0.01


# What cannot be


def message(start: Callable[[], Any]) -> str:
    try:
        start()
    except CrossfadeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return "no error"


def world_with(options: Any) -> None:
    dist.init_process_group("emulated", store=dist.HashStore(), rank=0, world_size=4, pg_options=options)


def within_a_world(function: Callable[[], Any], **options: Any) -> None:
    with emulated.world(machine(**options), 8):
        function()


def messages() -> list[str]:
    short, sparse = torch.empty(7), torch.ones(8).to_sparse()
    soon = timedelta(milliseconds=1)
    return [
        message(lambda: world_with(None)),
        message(lambda: world_with("fast")),
        message(lambda: within_a_world(lambda: dist.all_reduce(torch.ones(1)), axes=("dp",))),
        message(lambda: within_a_world(lambda: dist.all_gather_into_tensor(short, torch.ones(1)))),
        message(lambda: within_a_world(lambda: dist.reduce_scatter_tensor(torch.empty(1), short))),
        message(lambda: within_a_world(lambda: dist.group.WORLD.allreduce([sparse]))),
        message(lambda: within_a_world(lambda: dist.all_reduce(torch.ones(1), async_op=True).wait(soon), seconds=0.1)),
    ]


def test_errors_say_what_to_do(alone: Alone) -> None:
    found = alone(messages)
    without, unknown, axis, size, parts, sparse, timeout = found
    assert without.startswith("MachineError: an emulated world has no machine")
    assert "pg_options of type str" in unknown
    assert "no fabric for axis '*'" in axis
    assert "an output of 7 elements: expected 8 in a group of 8 ranks" in size
    assert "a size of 7 in a group of 8 ranks: expected a multiple of 8" in parts
    assert "NotYetError: a torch.sparse_coo tensor" in sparse
    assert timeout.startswith("RankFailedError") and "at most 0.001 s" in timeout
    assert all("Remedy: " in message for message in found)
