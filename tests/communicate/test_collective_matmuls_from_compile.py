"""Sequence-parallel layers as torch.compile and our own shard stage have them, forward and backward, in fusions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crossfade.communicate import collective_matmul, fuse_gathers_into_matmuls
from crossfade.communicate.fuse_gathers_into_matmuls import FuseGathersIntoMatmuls
from crossfade.communicate.fuse_scatters_into_matmuls import FuseScattersIntoMatmuls
from crossfade.graph import collectives
from crossfade.graph.passes import Outcome, run_passes
from crossfade.graph.program import Program, from_graph_module
from crossfade.graph.verify import verify
from tests.communicate.all_collective_matmul_ranks import run_ranks
from tests.graph.traced_gathers import fake_group, random_inputs, traced

TOLD = [FuseGathersIntoMatmuls(form="chunked", chunks=2), FuseScattersIntoMatmuls(form="chunked", chunks=2)]
RANKS = 2


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layers(), Layers()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return x + self.second(x)


@pytest.fixture(scope="module")
def compiled() -> Iterator[tuple[Program, Program]]:
    """The forward and the backward of two layers of DTensors, each a piece of the sequence before and after."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

    kept: list[Program] = []

    def keep(module: torch.fx.GraphModule, _: Any) -> Any:
        kept.append(from_graph_module(module))
        return make_boxed_func(module)

    styles: dict[str, ParallelStyle] = {}
    for name in ("first", "second"):
        styles[f"{name}.up"] = ColwiseParallel(input_layouts=Shard(1))
        styles[f"{name}.down"] = RowwiseParallel(output_layouts=Shard(1))
    with fake_group(RANKS):
        layers = parallelize_module(Twice(), init_device_mesh("cpu", (RANKS,)), styles)
        backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
        run = torch.compile(layers, backend=backend, fullgraph=True, dynamic=False)
        run(torch.zeros(4, 6, 8, requires_grad=True)).sum().backward()
        torch._dynamo.reset()
        forward, backward = kept
        yield forward, backward


def sharded() -> Program:
    """A training step of the same layers as our shard stage splits them: the first enters whole."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import RowwiseParallel

    import crossfade as cf

    exported = torch.export.export(Twice(), (torch.zeros(4, 6, 8),))
    plan = {"*.up": "colwise", "*.down": RowwiseParallel(output_layouts=Shard(1))}
    local = cf.shard(exported, {"tp": RANKS}, plan, rank=0).program
    inputs = [node.meta["val"] for node in local.graph.find_nodes(op="placeholder")]

    def step(tangent: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        values = [value.detach().requires_grad_() if value.is_floating_point() else value for value in given]
        (result,) = local.graph_module(*values)
        wanted = [value for value in values if value.requires_grad]
        return result.detach(), *torch.autograd.grad(result, wanted, tangent)

    zeros = [torch.zeros([int(size) for size in value.shape], dtype=value.dtype) for value in inputs]
    return traced(step, torch.zeros(4, 6, 8), *zeros)


def fused(program: Program) -> Program:
    """The program in fusions, once its results are seen to be the same on all ranks."""
    done = run_passes(program, TOLD)
    verify(done, recompute=True)
    given = random_inputs(program.graph, RANKS)
    before, after = (run_ranks(program, [_copied(own) for own in given]) for program in (program, done))
    for own, other in zip(before, after, strict=True):
        for expected, found in zip(own, other, strict=True):
            if isinstance(expected, Tensor):
                assert found.stride() == expected.stride() and torch.equal(found, expected)
            else:
                assert found is expected
    return done


def _copied(values: list[Any]) -> list[Any]:
    return [value.clone() if isinstance(value, Tensor) else value for value in values]


def counted(done: Program) -> list[dict[str, int]]:
    return [record.counts for record in done.history]


def remaining(done: Program) -> list[str]:
    return [str(collective.kind) for collective in collectives.find(done.graph)]


def test_the_forward_of_dtensors(compiled: tuple[Program, Program]) -> None:
    forward, _ = compiled
    done = fused(forward)
    assert counted(done) == [{"collective matmuls": 2, "matmuls": 2, "left": 0}, {"collective matmuls": 2, "left": 0}]
    assert not remaining(done)


def test_the_backward_of_dtensors(compiled: tuple[Program, Program]) -> None:
    """Each gathered gradient feeds that of the activation, and that of the weight, which sums over what is gathered."""
    _, backward = compiled
    done = fused(backward)
    assert counted(done) == [{"collective matmuls": 2, "matmuls": 4, "left": 0}, {"collective matmuls": 2, "left": 0}]
    assert not remaining(done)


def test_a_step_of_our_shard_stage() -> None:
    done = fused(sharded())
    assert counted(done) == [{"collective matmuls": 3, "matmuls": 5, "left": 3}, {"collective matmuls": 3, "left": 0}]
    left = [verdict.reason for verdict in done.history[0].verdicts if verdict.outcome is Outcome.LEFT]
    assert sorted(left) == sorted(
        [collective_matmul.CYCLE, fuse_gathers_into_matmuls.NO_MATMUL, fuse_gathers_into_matmuls.NO_MATMUL]
    )
    assert sorted(remaining(done)) == ["all_gather", "all_gather", "all_reduce"]  # the results', and the first layer's
